"""Records what transformers makes of conversations by chat templates of the usual kinds.

    pip install transformers==5.24.0 && python xtask/peers/make_chat_templates.py

writes examples/tests/fixtures/chat-templates.json: templates, conversations, their renderings with and without a prompt for an
answer, and, where the template marks what assistants say, token ids and mask by the tokenizer of examples/assets/tiny-instruct.
The templates use what those of Llama 2, Llama 3, Mistral, Qwen, Zephyr and others use.
"""

import json
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "examples/assets/tiny-instruct/tokenizer.json"

TEMPLATES = {
    "chatml": """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined and false %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{#- The system message comes first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function.arguments | tojson }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "thinking": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "marked": """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
        {{- message.content + eos_token }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content.replace('\\t', ' ').upper()[:60] + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}""",
}


def user(text):
    return dict(role="user", content=text)


def assistant(text):
    return dict(role="assistant", content=text)


CONVERSATIONS = [
    [user("What is ZeRO?"), assistant("A way to shard state.")],
    [dict(role="system", content="Be  brief. "), user(" Why \u201cé\u201d?\n"), assistant("Because <&> 'tis \"so\".")],
    [
        user("Who reads files?"),
        assistant("<think>\nHm.\n</think>\n\nRank 0."),
        user("And then?"),
        assistant("It sends them."),
    ],
]


def main():
    out = dict(origin=f"make_chat_templates.py, transformers {transformers.__version__}", templates={})
    for name, template in TEMPLATES.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(TOKENIZER), bos_token="<s>", eos_token="</s>", chat_template=template
        )
        cases = []
        for messages in CONVERSATIONS:
            render = lambda **options: tokenizer.apply_chat_template(messages, tokenize=False, **options)
            case = dict(messages=messages, text=render(), prompt=render(add_generation_prompt=True))
            if "generation %" in template:
                marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
                case.update(ids=list(marked["input_ids"]), mask=list(marked["assistant_masks"]))
            cases.append(case)
        out["templates"][name] = dict(template=template, cases=cases)
    path = ROOT / "examples/tests/fixtures/chat-templates.json"
    path.write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")


main()
