"""What examples/benches/gpu_throughput.rs measures, in PyTorch: a Llama in bf16 with f32 masters on one GPU.

Same sizes, tokens, recipe (AdamW, clipping) and count of operations. The optimizer is fused and its state on the GPU, attention
is PyTorch's own; `--offload` keeps masters and optimizer state in the host's memory, where the CPU steps them, as Sconce does.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Attention(torch.nn.Module):
    def __init__(self, a):
        super().__init__()
        self.heads, self.kv_heads, self.size = a.heads, a.key_value_heads, a.hidden // a.heads
        self.q = torch.nn.Linear(a.hidden, a.hidden, bias=False)
        self.k = torch.nn.Linear(a.hidden, self.kv_heads * self.size, bias=False)
        self.v = torch.nn.Linear(a.hidden, self.kv_heads * self.size, bias=False)
        self.o = torch.nn.Linear(a.hidden, a.hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, sequence, hidden = x.shape
        split = lambda y, heads: y.view(batch, sequence, heads, self.size).transpose(1, 2)
        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.kv_heads), split(self.v(x), self.kv_heads)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(batch, sequence, hidden))


def rotate(x, cos, sin):
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class Layer(torch.nn.Module):
    def __init__(self, a):
        super().__init__()
        self.norm1, self.norm2 = (torch.nn.RMSNorm(a.hidden, eps=1e-5) for _ in range(2))
        self.attention = Attention(a)
        self.gate, self.up = (torch.nn.Linear(a.hidden, a.intermediate, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(a.intermediate, a.hidden, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embed = torch.nn.Embedding(a.vocabulary, a.hidden)
        self.layers = torch.nn.ModuleList(Layer(a) for _ in range(a.layers))
        self.norm = torch.nn.RMSNorm(a.hidden, eps=1e-5)
        self.head = torch.nn.Linear(a.hidden, a.vocabulary, bias=False)
        self.recompute = not a.keep_activations

    def forward(self, tokens, cos, sin):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recompute else layer(x, cos, sin)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    sizes = dict(layers=16, hidden=2048, intermediate=8192, heads=32, key_value_heads=8, vocabulary=32000, sequence=2048)
    for name, value in dict(**sizes, batch=4, steps=5).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--peak", type=float, default=989.0)
    for flag in ("keep-activations", "offload", "cpu"):
        parser.add_argument("--" + flag, action="store_true")
    a = parser.parse_args()
    device = "cpu" if a.cpu else "cuda"
    wait = (lambda: None) if a.cpu else torch.cuda.synchronize
    model = Llama(a).to(device, torch.bfloat16)
    home = "cpu" if a.offload else device
    masters = [p.detach().float().to(home).requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    ids = torch.arange(a.batch * a.sequence) * 7919 % a.vocabulary
    tokens = ids.view(a.batch, a.sequence).to(device)
    size = a.hidden // a.heads
    angles = torch.outer(torch.arange(a.sequence), 500000.0 ** (-torch.arange(0, size, 2) / size)).to(device)
    cos, sin = angles.cos(), angles.sin()
    seconds = []
    for step in range(a.steps + 2):
        wait()
        begin = time.perf_counter()
        logits = model(tokens, cos, sin)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        for master, p in zip(masters, model.parameters()):
            master.grad, p.grad = p.grad.to(home).float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
        wait()
        taken = time.perf_counter() - begin
        print(json.dumps({"step": step, "seconds": taken, "loss": loss.item()}), flush=True)
        seconds += [taken] * (step >= 2)
    median = sorted(seconds)[len(seconds) // 2]
    parameters = sum(p.numel() for p in model.parameters())
    count = a.batch * a.sequence
    matrices = 6 * (parameters - a.vocabulary * a.hidden)
    attention = 12 * a.layers * a.hidden * (a.sequence + 1) / 2
    print(json.dumps({
        "torch": torch.__version__,
        "parameters": parameters,
        "tokens_per_second": count / median,
        "share_of_peak": count * (matrices + attention) / median / (a.peak * 1e12),
        "offload": a.offload,
        "keep_activations": a.keep_activations,
    }))


if __name__ == "__main__":
    main()
