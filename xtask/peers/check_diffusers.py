"""Loads what Sconce exported with diffusers itself, and compares what it computes with what was recorded of the original.

    SCONCE_EXPORTS=$PWD/target/exported cargo test --workspace --test exported_model
    python xtask/peers/check_diffusers.py target/exported-diffusers

The folder has the model and `recorded.safetensors.io`: inputs, and the `output` of the weights before Sconce had them, in f32.
"""

import argparse
import pathlib

import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors.torch import load


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    model, loading = CogVideoXTransformer3DModel.from_pretrained(folder, output_loading_info=True)
    wrong = {key: names for key, names in loading.items() if names}
    if wrong:
        raise SystemExit(f"{folder}: diffusers does not load it whole: {wrong}")
    recorded = load((folder / "recorded.safetensors.io").read_bytes())
    with torch.no_grad():
        output = model(
            hidden_states=recorded["hidden_states"],
            encoder_hidden_states=recorded["encoder_hidden_states"],
            timestep=recorded["timestep"],
            image_rotary_emb=(recorded["rotary_cos"], recorded["rotary_sin"]),
        ).sample
    furthest = (output - recorded["output"]).abs().max().item()
    print(f"{folder}: {sum(1 for _ in model.parameters())} parameters; outputs differ by {furthest:.2e} at most")
    if furthest > 1e-5:
        raise SystemExit("more than 1e-5")


if __name__ == "__main__":
    main()
