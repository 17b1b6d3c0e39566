"""One PyTorch process of `cargo xtask bench train --peers`: trains transformers' Llama, a step for every line on stdin.

usage: bench_llama.py plain|ddp|fsdp2 CONFIG.json ROWS TOKENS

Answers with the seconds of forward, backward and update as JSON; says its peak memory when stdin ends. Needs torch and
transformers. AdamW is PyTorch's fused one, the fastest that it has on CPUs.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM


def status_mib(name):
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) / 1024
    return 0.0


def main():
    strategy, config_file, rows, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    before = status_mib("VmRSS:")
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(1)
    with open(config_file) as file:
        model = LlamaForCausalLM(LlamaConfig(**json.load(file)))
    if strategy == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    at = torch.arange(rank * rows * tokens, (rank + 1) * rows * tokens)
    ids = ((at * 7919 + at * at * 31) % 4096).reshape(rows, tokens)
    print("ready", flush=True)
    for _ in sys.stdin:
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        forward = time.perf_counter() - start
        loss.backward()
        backward = time.perf_counter() - start - forward
        optimizer.step()
        optimizer.zero_grad()
        update = time.perf_counter() - start - forward - backward
        print(json.dumps({"forward": forward, "backward": backward, "update": update}), flush=True)
    print(json.dumps({"peak_mib": status_mib("VmHWM:"), "before_mib": before}), flush=True)
    if world > 1:
        dist.destroy_process_group()


main()
