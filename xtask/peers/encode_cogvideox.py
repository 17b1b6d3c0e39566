"""Makes training data for the example `finetune_cogvideox` from videos and captions, with diffusers.

    python xtask/peers/encode_cogvideox.py --model_path THUDM/CogVideoX-2b --data_root VIDEOS --train_resolution 49x480x720 --out DATA
    python xtask/peers/encode_cogvideox.py --model_path THUDM/CogVideoX-2b --validation_prompts prompts.txt --out VALIDATION

Needs torch, diffusers, transformers, sentencepiece, av and safetensors; a GPU is used where there is one. The data root is laid out
as for CogVideoX's own trainer: a text file of captions and one of the videos' paths below the root, a line for each sample, and
for image-to-video perhaps one of images' paths (else the first frames are taken).

Shards `shard-00000.safetensors` have, in bf16 (`examples/src/diffusion/video_samples.rs` reads them):
    latents         [n, channels, frames, height, width]   a sample of the VAE's distribution times its scaling factor
    prompt_embeds   [n, tokens, width]                     T5's output for the padded caption
    image_latents   [n, channels, height, width]           with --model_type i2v: of the noised image
`prompts.safetensors` has prompt_embeds, negative_prompt_embeds [1, tokens, width] of an empty prompt, and image_latents.

CogVideoX's trainer draws the noise of the image, and a sample of the VAE's distribution of it, in every step; here both are
drawn once per sample. `--repeats` writes every sample several times, with other draws.
"""

import argparse
import pathlib

import torch
from safetensors.torch import save_file


def resolution(text):
    frames, height, width = (int(part) for part in text.split("x"))
    if (frames - 1) % 8:
        raise argparse.ArgumentTypeError(f"{frames} frames: expected 1 more than a multiple of 8")
    return frames, height, width


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True, help="pipeline folder or name on the Hub")
    parser.add_argument("--model_type", choices=["t2v", "i2v"], default="t2v")
    parser.add_argument("--data_root", type=pathlib.Path)
    parser.add_argument("--caption_column", default="prompts.txt", help="file of captions in the data root")
    parser.add_argument("--video_column", default="videos.txt", help="file of videos' paths in the data root")
    parser.add_argument("--image_column", help="file of images' paths in the data root")
    parser.add_argument("--train_resolution", type=resolution, help="FRAMESxHEIGHTxWIDTH")
    parser.add_argument("--validation_prompts", type=pathlib.Path, help="file of prompts; writes prompts.safetensors alone")
    parser.add_argument("--validation_images", type=pathlib.Path, help="file of images' paths, a line for each prompt")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--samples_per_shard", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    if (arguments.data_root is None) == (arguments.validation_prompts is None):
        parser.error("give either --data_root or --validation_prompts")
    if arguments.data_root and not arguments.train_resolution:
        parser.error("--data_root needs --train_resolution")
    if arguments.validation_images and not arguments.train_resolution:
        parser.error("--validation_images needs --train_resolution")
    if arguments.validation_prompts and arguments.model_type == "i2v" and not arguments.validation_images:
        parser.error("image-to-video needs --validation_images")
    return arguments


def lines(path):
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def resized(frames, height, width):
    """Frames [n, channels, height, width] of 0..255 as -1..1 in another size."""
    frames = torch.nn.functional.interpolate(frames.float(), (height, width), mode="bilinear", antialias=True)
    return frames / 127.5 - 1


def read_video(path, count, height, width):
    """Reads `count` frames, evenly spaced; a shorter video stands still at its end."""
    import av

    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    if not frames:
        raise SystemExit(f"{path}: has no frames")
    step = max(1, len(frames) // count)
    frames = frames[::step][:count]
    frames += [frames[-1]] * (count - len(frames))
    return resized(torch.stack(frames).permute(0, 3, 1, 2), height, width)


def read_image(path, height, width):
    import numpy
    from PIL import Image

    pixels = torch.from_numpy(numpy.array(Image.open(path).convert("RGB")))
    return resized(pixels.permute(2, 0, 1)[None], height, width)[0]


def encode_frames(vae, frames):
    """Encodes frames [n, channels, height, width] as [channels, frames, height, width]."""
    video = frames.permute(1, 0, 2, 3)[None].to(vae.device, vae.dtype)
    return (vae.encode(video).latent_dist.sample() * vae.config.scaling_factor)[0]


def encode_image(vae, image):
    """Encodes an image, noised as in CogVideoX's trainer, as [channels, height, width]."""
    sigma = torch.exp(torch.normal(-3.0, 0.5, (1,))).item()
    return encode_frames(vae, (image + sigma * torch.randn_like(image))[None])[:, 0]


def encode_text(tokenizer, text_encoder, text, tokens):
    ids = tokenizer(
        text, padding="max_length", max_length=tokens, truncation=True, add_special_tokens=True, return_tensors="pt"
    ).input_ids
    return text_encoder(ids.to(text_encoder.device))[0][0]


def save(samples, path):
    tensors = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    save_file({name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}, path)
    print(f"{path}: {len(samples)} samples")


@torch.no_grad()
def main():
    arguments = parse_arguments()
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
    from transformers import AutoTokenizer, T5EncoderModel

    torch.manual_seed(arguments.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = CogVideoXTransformer3DModel.load_config(arguments.model_path, subfolder="transformer")
    tokens = config["max_text_seq_length"]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_path, subfolder="tokenizer")
    encoder = T5EncoderModel.from_pretrained(arguments.model_path, subfolder="text_encoder", torch_dtype=torch.bfloat16)
    encoder.to(device)
    vae = AutoencoderKLCogVideoX.from_pretrained(arguments.model_path, subfolder="vae", torch_dtype=torch.bfloat16).to(device)
    vae.enable_slicing()
    vae.enable_tiling()
    arguments.out.mkdir(parents=True, exist_ok=True)

    if arguments.validation_prompts:
        prompts = lines(arguments.validation_prompts)
        tensors = {
            "prompt_embeds": torch.stack([encode_text(tokenizer, encoder, prompt, tokens) for prompt in prompts]),
            "negative_prompt_embeds": encode_text(tokenizer, encoder, "", tokens)[None],
        }
        if arguments.model_type == "i2v":
            _, height, width = arguments.train_resolution
            images = [read_image(path, height, width) for path in lines(arguments.validation_images)]
            if len(images) != len(prompts):
                raise SystemExit(f"there are {len(prompts)} prompts and {len(images)} images")
            tensors["image_latents"] = torch.stack([encode_frames(vae, image[None])[:, 0] for image in images])
        path = arguments.out / "prompts.safetensors"
        save_file({name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}, path)
        print(f"{path}: {len(prompts)} prompts")
        return

    root = arguments.data_root
    captions, videos = lines(root / arguments.caption_column), lines(root / arguments.video_column)
    images = lines(root / arguments.image_column) if arguments.image_column else None
    if len(captions) != len(videos) or (images is not None and len(images) != len(videos)):
        raise SystemExit(f"{root}: there are {len(captions)} captions, {len(videos)} videos, {len(images or videos)} images")
    count, height, width = arguments.train_resolution
    samples, shard = [], 0
    for _ in range(arguments.repeats):
        for number, (caption, video) in enumerate(zip(captions, videos)):
            frames = read_video(root / video, count, height, width)
            sample = {
                "latents": encode_frames(vae, frames),
                "prompt_embeds": encode_text(tokenizer, encoder, caption, tokens),
            }
            if arguments.model_type == "i2v":
                image = read_image(root / images[number], height, width) if images else frames[0]
                sample["image_latents"] = encode_image(vae, image)
            samples.append({name: tensor.to("cpu", torch.bfloat16) for name, tensor in sample.items()})
            if len(samples) == arguments.samples_per_shard:
                save(samples, arguments.out / f"shard-{shard:05}.safetensors")
                samples, shard = [], shard + 1
    if samples:
        save(samples, arguments.out / f"shard-{shard:05}.safetensors")


if __name__ == "__main__":
    main()
