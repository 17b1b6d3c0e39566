"""Records what transformers computes for one tiny model of every family that `finetune_llama` trains.

    pip install torch transformers==5.24.0 && python xtask/peers/make_llama_families.py

writes examples/tests/fixtures/llama-families/<case>: `model/` (config.json and random f32 weights), `expected.safetensors`
(tokens and labels i64 [2, sequence], logits [2, sequence, vocabulary], loss [1]) and `expected.json` (loss, global norm of
the gradients and that of every parameter). Attention is eager, everything f32, on the CPU.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

FOLDER = Path(__file__).parents[2] / "examples/tests/fixtures/llama-families"
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    attn_implementation="eager",
)


def rope(kind, **parameters):
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


# Case: configuration and length of the sequences; the longer ones reach past `max_position_embeddings`.
CASES = {
    "llama": (LlamaConfig(**SIZES, rms_norm_eps=1e-5), 24),
    "llama-biases": (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), 24),
    "llama-tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), 24),
    "llama-linear": (LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=2.0)), 48),
    "llama-dynamic": (LlamaConfig(**SIZES, rope_parameters=rope("dynamic", factor=2.0)), 48),
    "llama-yarn": (
        LlamaConfig(**SIZES, rope_parameters=rope("yarn", factor=2.0, original_max_position_embeddings=32)),
        48,
    ),
    "llama3": (
        LlamaConfig(
            **SIZES,
            rope_parameters=rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
        24,
    ),
    "mistral": (MistralConfig(**SIZES, sliding_window=5), 24),
    "qwen2": (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1), 24),
    "qwen3": (Qwen3Config(**SIZES, head_dim=12), 24),
}


def record(name, config, sequence):
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms that are 1 and biases that are 0 would hide that one is missing.
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
    folder = FOLDER / name
    model.save_pretrained(folder / "model")
    (folder / "model/generation_config.json").unlink(missing_ok=True)
    # Read again: what is recorded is what the files say, whatever a constructor changed.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, config.vocab_size, (2, sequence))
    labels = tokens.clone()
    labels[1, : sequence // 3] = -100
    output = model(input_ids=tokens, labels=labels, use_cache=False)
    output.loss.backward()
    norms = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    total = torch.tensor(list(norms.values()), dtype=torch.float64).norm().item()
    tensors = dict(tokens=tokens, labels=labels, logits=output.logits.detach(), loss=output.loss.detach().reshape(1))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "expected.safetensors")
    expected = dict(
        origin=f"make_llama_families.py, torch {torch.__version__}, transformers {transformers.__version__}",
        loss=output.loss.item(),
        grad_norm=total,
        grad_norms=norms,
    )
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


for name, (config, sequence) in CASES.items():
    record(name, config, sequence)
