"""Loads what Sconce exported with transformers itself, and compares the logits with those that Sconce computed.

    SCONCE_EXPORTS=$PWD/target/exported cargo test --workspace --test exported_model
    python xtask/peers/check_exports.py target/exported

The folder has the model and `logits.safetensors.io`: `tokens` and the `logits` of Sconce's own Llama for them, in f32.
"""

import argparse
import pathlib

import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: names for key, names in loading.items() if names}
    if wrong:
        raise SystemExit(f"{folder}: transformers does not load it whole: {wrong}")
    sconce = load((folder / "logits.safetensors.io").read_bytes())
    with torch.no_grad():
        logits = model(sconce["tokens"].long()).logits
    furthest = (logits - sconce["logits"]).abs().max().item()
    print(f"{folder}: {sum(1 for _ in model.parameters())} parameters; logits differ by {furthest:.2e} at most")
    if furthest > 1e-5:
        raise SystemExit("more than 1e-5")


if __name__ == "__main__":
    main()
