"""Makes the small instruction data set and model that `finetune_llama` is shown with, from the repository's own documents.

    pip install torch transformers==5.24.0 && python xtask/peers/make_instructions.py

writes examples/assets/instructions/sconce.jsonl (questions and answers in Alpaca's form), chats.jsonl beside it (some of them
as conversations), and examples/assets/tiny-instruct: a byte-level BPE tokenizer of 512 tokens trained on both, a chat template,
and an untrained Llama in bf16.
"""

import json
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "examples/assets"
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "configs/README.md"]
TEMPLATE = """{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""


def plain(text):
    """Markdown without its marks."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", text.replace("`", "").replace("**", "")).strip()


def first_sentences(text, limit=220):
    out = ""
    for sentence in re.split(r"(?<=[.:;])\s+", text):
        if out and len(out) + len(sentence) > limit:
            break
        out = f"{out} {sentence}".strip()
    return out[:limit].rstrip(":;, ")


def samples_of(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.S)
    for section in re.split(r"^#+ ", text, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        heading = plain(heading)
        prose = [block for block in body.split("\n\n") if block.strip() and not block.lstrip().startswith(("|", "-"))]
        if prose and len(plain(prose[0])) > 40:
            yield f"What do Sconce's documents say about {heading!r}?", "", first_sentences(plain(prose[0]))
        for row in re.findall(r"^\| *(.+?) *\| *(.+?) *\|", body, flags=re.M):
            name, meaning = map(plain, row)
            if set(name) <= set("-: ") or name in ("flag", "command", "question", "strategy", "crate", "variable"):
                continue
            if len(meaning) > 15:
                yield f"In {heading!r}, what is this?", name, first_sentences(meaning)


samples = []
for document in DOCUMENTS:
    for instruction, context, output in samples_of(document):
        samples.append(dict(instruction=instruction, input=context, output=output))
(ASSETS / "instructions").mkdir(exist_ok=True)
lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
(ASSETS / "instructions/sconce.jsonl").write_text("".join(lines))


def asked(sample):
    return "\n\n".join(filter(None, (sample["instruction"], sample["input"])))


chats = []
for first, second in zip(samples[::4], samples[1::4]):
    messages = [dict(role="system", content="You know Sconce's documents.")]
    for sample in (first, second):
        messages.append(dict(role="user", content=asked(sample)))
        messages.append(dict(role="assistant", content=sample["output"]))
    chats.append(json.dumps(dict(messages=messages), ensure_ascii=False) + "\n")
(ASSETS / "instructions/chats.jsonl").write_text("".join(chats))

folder = ASSETS / "tiny-instruct"
folder.mkdir(exist_ok=True)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
trainer = trainers.BpeTrainer(
    vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
tokenizer.train_from_iterator([asked(sample) + "\n" + sample["output"] for sample in samples], trainer)
tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
config = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE, model_max_length=512)
(folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

torch.manual_seed(17)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
)
model.to(torch.bfloat16).save_pretrained(folder)
(folder / "generation_config.json").unlink(missing_ok=True)
print(len(samples), "samples,", len(chats), "chats")
