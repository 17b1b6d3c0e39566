"""Loads adapters that `finetune_llama` exported with PEFT, and compares with the model into which Sconce merged them.

    T="examples/assets/tiny-instruct"; D="examples/assets/instructions/sconce.jsonl"
    for OUT in adapters "merged --merge_adapters"; do
        cargo run -p sconce-cli -- launch -n 2 --example finetune_llama -- --model_dir $T --data $D --steps 5 --lr 1e-2 \\
            --lora_r 4 --use_rslora --lora_target_modules all-linear --output_dir target/$OUT
    done
    python xtask/peers/check_llama_adapters.py target/adapters target/merged
"""

import argparse
import json
import pathlib

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", type=pathlib.Path)
    parser.add_argument("merged", type=pathlib.Path)
    arguments = parser.parse_args()
    base = json.loads((arguments.adapters / "adapter_config.json").read_text())["base_model_name_or_path"]
    load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(1, 60).reshape(1, -1)
    with torch.no_grad():
        without = load(base)(tokens).logits
        adapted = PeftModel.from_pretrained(load(base), arguments.adapters)(tokens).logits
        merged = load(arguments.merged)(tokens).logits
    difference, effect = (adapted - merged).abs().max().item(), (adapted - without).abs().max().item()
    print(f"adapters change logits by {effect:.3g}; PEFT and the merged model differ by {difference:.3g}")
    assert effect > 1e-2 and difference < 1e-4 + 1e-4 * effect


main()
