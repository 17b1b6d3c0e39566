"""Loads adapters that `finetune_cogvideox` wrote with diffusers itself, and says how far they move the model's output.

    sconce launch --example finetune_cogvideox -- --output_dir OUT --rank 4 --train_steps 20 --learning_rate 1e-2 --lr_warmup_steps 0
    python xtask/peers/check_cogvideox_lora.py OUT/lora

Compares the transformer with loaded adapters to one whose weights have `lora_alpha / rank * B A` added by hand.
"""

import argparse
import json
import pathlib

import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors import safe_open

TRANSFORMER = pathlib.Path(__file__).parents[2] / "examples/assets/tiny-cogvideox/transformer"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--transformer", type=pathlib.Path, default=TRANSFORMER)
    arguments = parser.parse_args()
    path = arguments.folder / "pytorch_lora_weights.safetensors"
    with safe_open(path, "pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}

    plain, adapted, merged = (CogVideoXTransformer3DModel.from_pretrained(arguments.transformer) for _ in range(3))
    adapted.load_lora_adapter(dict(tensors), prefix="transformer", metadata=settings)
    weights = merged.state_dict()
    for name, b in tensors.items():
        if name.endswith(".lora_B.weight"):
            a = tensors[name.replace("lora_B", "lora_A")]
            layer = name.removeprefix("transformer.").replace("lora_B.weight", "weight")
            weights[layer] += settings["transformer.lora_alpha"] / settings["transformer.r"] * b @ a

    config = plain.config
    torch.manual_seed(0)
    latents = torch.randn(1, 3, config.in_channels, config.sample_height, config.sample_width)
    text = torch.randn(1, config.max_text_seq_length, config.text_embed_dim)
    size = config.attention_head_dim
    patches = 3 * (config.sample_height // config.patch_size) * (config.sample_width // config.patch_size)
    angles = torch.rand(patches, size // 2).repeat_interleave(2, dim=1)
    rotary = (angles.cos(), angles.sin()) if config.use_rotary_positional_embeddings else None
    with torch.no_grad():
        plain, adapted, merged = (
            model(
                hidden_states=latents, encoder_hidden_states=text, timestep=torch.tensor([500]), image_rotary_emb=rotary
            ).sample
            for model in (plain, adapted, merged)
        )
    moved, wrong = (adapted - plain).abs().max().item(), (adapted - merged).abs().max().item()
    print(f"{path}: {len(tensors)} tensors; outputs move by {moved:.2e}, and are {wrong:.2e} from the merged weights'")
    if not moved > 1e-4 or wrong > 1e-5:
        raise SystemExit("adapters do nothing, or something else than their scale says")


if __name__ == "__main__":
    main()
