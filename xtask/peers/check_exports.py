"""Loads what Sconce exported with transformers itself, and compares the logits with those that Sconce computed.

    SCONCE_EXPORTS=$PWD/target/exported cargo test --workspace --test exported_model
    python xtask/peers/check_exports.py target/exported

It runs with transformers 4 and 5, and with PyTorch since 1.13. The folder has the model and `logits.safetensors.io`: `tokens` and the `logits` of Sconce's own Llama for them, in f32.
"""

import argparse
import pathlib

import torch
import transformers
from safetensors.torch import load


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    # Version 5 has another name for it, and warns of the old one.
    dtype = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, **{dtype: torch.float32}
    )
    wrong = {key: names for key, names in loading.items() if names}
    if wrong:
        raise SystemExit(f"{folder}: transformers does not load it whole: {wrong}")
    sconce = load((folder / "logits.safetensors.io").read_bytes())
    with torch.no_grad():
        logits = model(sconce["tokens"].long()).logits
    furthest = (logits - sconce["logits"]).abs().max().item()
    print(
        f"{folder}: {sum(1 for _ in model.parameters())} parameters; logits differ by {furthest:.2e} at most "
        f"(transformers {transformers.__version__}, torch {torch.__version__})"
    )
    if furthest > 1e-5:
        raise SystemExit("more than 1e-5")


if __name__ == "__main__":
    main()
