"""Makes what the example `finetune_cogvideox` ships with, and what its tests compare with, from diffusers itself.

    python xtask/peers/make_tiny_cogvideox.py

Needs torch, diffusers and safetensors. Writes examples/assets/tiny-cogvideox: a pipeline folder with a small random transformer in
the layout of the 5B models, a data set of waves that wander in the direction that the text says, and validation prompts. Writes
examples/tests/fixtures/cogvideox_schedules.json: noise schedules and sampled trajectories; and cogvideox_samples.safetensors: what
diffusers' pipeline samples from given noise.
"""

import json
import pathlib

import diffusers
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from safetensors.torch import save_file

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ASSETS = EXAMPLES / "assets/tiny-cogvideox"
TOKENS, WIDTH = 6, 12
# What the published pipelines have in common.
SCHEDULER = {
    "clip_sample": False,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}
# Pixels to the right and downwards from one frame to the next.
DIRECTIONS = [(1, 0), (-1, 0), (0, 1), (0, -1)]


def make_pipeline():
    torch.manual_seed(7)
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=WIDTH,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=TOKENS,
        use_rotary_positional_embeddings=True,
    )
    transformer.save_pretrained(ASSETS / "transformer")
    CogVideoXDDIMScheduler(**SCHEDULER, snr_shift_scale=1.0).save_pretrained(ASSETS / "scheduler")


def text_of(direction):
    """What a text encoder might make of a direction: the same for every token but for its place."""
    embedding = torch.zeros(TOKENS, WIDTH)
    embedding[:, direction] = 2.0
    embedding[:, len(DIRECTIONS) :] = torch.eye(TOKENS, WIDTH - len(DIRECTIONS))
    return embedding


def video_of(direction, number):
    """Waves [channels, frames, height, width], of another phase in every video."""
    step_x, step_y = DIRECTIONS[direction]
    frames, rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(8.0), torch.arange(8.0), indexing="ij")
    turn = 2 * torch.pi / 8
    x, y = (columns - step_x * frames) * turn + number, (rows - step_y * frames) * turn + 2 * number
    return torch.stack([x.cos() + y.cos(), x.sin(), y.sin(), (x + y).cos()])


def make_data():
    samples = [(number % len(DIRECTIONS), number) for number in range(16)]
    videos = torch.stack([video_of(*sample) for sample in samples])
    texts = torch.stack([text_of(direction) for direction, _ in samples])
    (ASSETS / "data").mkdir(parents=True, exist_ok=True)
    for shard, part in enumerate([slice(0, 10), slice(10, 16)]):
        tensors = {
            "latents": videos[part],
            "prompt_embeds": texts[part],
            "image_latents": videos[part, :, 0],
        }
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        save_file(tensors, ASSETS / f"data/shard-{shard:05}.safetensors")
    (ASSETS / "validation").mkdir(exist_ok=True)
    prompts = {
        "prompt_embeds": torch.stack([text_of(direction) for direction in range(3)]),
        "negative_prompt_embeds": torch.zeros(1, TOKENS, WIDTH),
        "image_latents": torch.stack([video_of(direction, 20)[:, 0] for direction in range(3)]),
    }
    save_file({name: tensor.contiguous() for name, tensor in prompts.items()}, ASSETS / "validation/prompts.safetensors")


def make_schedules():
    cases = []
    for settings in [
        {"snr_shift_scale": 3.0},
        {"snr_shift_scale": 1.0},
        {"snr_shift_scale": 1.0, "timestep_spacing": "leading", "steps_offset": 1, "set_alpha_to_one": False},
        {"snr_shift_scale": 3.0, "timestep_spacing": "linspace", "rescale_betas_zero_snr": False},
    ]:
        scheduler = CogVideoXDDIMScheduler(**(SCHEDULER | settings))
        for steps in [1, 7, 50]:
            if steps == 1 and settings.get("timestep_spacing") == "linspace":
                continue
            scheduler.set_timesteps(steps)
            sample = torch.tensor([0.3, -1.2, 0.05, 2.0], dtype=torch.float64)
            trajectory = []
            for t in scheduler.timesteps:
                velocity = torch.tanh(sample) * (0.2 + 0.001 * t)
                sample = scheduler.step(velocity, int(t), sample, return_dict=False)[0]
                trajectory.append(sample.tolist())
            cases.append(
                {
                    "config": dict(scheduler.config) | {"_use_default_values": None},
                    "steps": steps,
                    "timesteps": scheduler.timesteps.tolist(),
                    "trajectory": [trajectory[0], trajectory[-1]],
                    "alphas_cumprod": scheduler.alphas_cumprod.tolist()[::37] + scheduler.alphas_cumprod.tolist()[-1:],
                }
            )
    origin = {"script": "make_tiny_cogvideox.py", "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__}}
    path = EXAMPLES / "tests/fixtures/cogvideox_schedules.json"
    path.write_text(json.dumps({"origin": origin, "cases": cases}, indent=1) + "\n")


def make_samples():
    tensors = {}
    for variant, shift, guidance, (height, width) in [
        ("rotary", 1.0, 6.0, (8, 8)),
        ("rotary", 1.0, 2.0, (6, 10)),
        ("rotary", 1.0, 2.0, (12, 4)),
        ("sincos", 3.0, 1.0, (8, 8)),
    ]:
        transformer = CogVideoXTransformer3DModel.from_pretrained(EXAMPLES / "tests/fixtures/tiny-cogvideox" / variant)
        scheduler = CogVideoXDDIMScheduler(**SCHEDULER, snr_shift_scale=shift)
        pipeline = CogVideoXPipeline(None, None, None, transformer, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        torch.manual_seed(3)
        noise, text, negative = torch.randn(2, 3, 4, height, width), torch.randn(2, TOKENS, WIDTH), torch.randn(2, TOKENS, WIDTH)
        case = f"{variant}.{height}x{width}"
        tensors |= {f"{case}.noise": noise, f"{case}.text": text, f"{case}.negative": negative}
        tensors[f"{case}.latents"] = pipeline(
            prompt_embeds=text,
            negative_prompt_embeds=negative,
            latents=noise.clone(),
            height=8 * height,
            width=8 * width,
            num_frames=9,
            num_inference_steps=5,
            guidance_scale=guidance,
            output_type="latent",
        ).frames
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, EXAMPLES / "tests/fixtures/cogvideox_samples.safetensors")


if __name__ == "__main__":
    make_pipeline()
    make_data()
    make_schedules()
    make_samples()
