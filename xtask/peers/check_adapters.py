"""Loads adapters that Sconce exported with PEFT itself, and compares what the model computes with what Sconce computed.

    SCONCE_EXPORTS=$PWD/target/exported cargo test --workspace --test core adapters_become_a_folder_of_peft
    python xtask/peers/check_adapters.py target/exported/peft

The folder has the adapters and `base.safetensors.io`: the base model, `rows` and Sconce's `output` for them, in f32.
"""

import argparse
import pathlib

import torch
from peft import PeftModel
from safetensors.torch import load, load_file


class Model(torch.nn.Module):
    """The base model of the test: a tanh between two layers."""

    def __init__(self):
        super().__init__()
        first, second = torch.nn.Module(), torch.nn.Module()
        first.q_proj = torch.nn.Linear(3, 6)
        second.up_proj = torch.nn.Linear(6, 4, bias=False)
        self.layers = torch.nn.ModuleList([first, second])

    def forward(self, rows):
        return self.layers[1].up_proj(torch.tanh(self.layers[0].q_proj(rows)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    sconce = load((folder / "base.safetensors.io").read_bytes())
    rows, output = sconce.pop("rows"), sconce.pop("output")
    base = Model()
    base.load_state_dict(sconce)
    with torch.no_grad():
        without = base(rows)
        adapted = PeftModel.from_pretrained(base, folder)
        with_adapters = adapted(rows)
    names = {name.replace(".default", "") for name, _ in adapted.named_parameters() if "lora_" in name}
    exported = set(load_file(folder / "adapter_model.safetensors"))
    if names != exported:
        raise SystemExit(f"{folder}: PEFT has other adapters: {names ^ exported}")
    furthest = (with_adapters - output).abs().max().item()
    changed = (without - output).abs().max().item()
    print(f"{folder}: {len(names)} tensors; outputs differ by {furthest:.2e} at most, without adapters by {changed:.2e}")
    if furthest > 1e-5 or changed < 1e-3:
        raise SystemExit("expected at most 1e-5, and more than 1e-3 without adapters")


if __name__ == "__main__":
    main()
