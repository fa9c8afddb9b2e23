"""Chat templates in the styles of several families, chats, and a small tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Chat = list[dict[str, Any]]

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "[INST]", "[/INST]", "<think>", "</think>"]

ANSWER = "{% generation %}ANSWER{% endgeneration %}"

CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    + ANSWER.replace("ANSWER", "{{ message.content }}<|im_end|>\n")
    + "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + (tools | tojson) + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in turns %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}"
    "{{- '[INST] ' }}{%- if loop.first and system is defined %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message['content'] + '[/INST]' }}"
    "{%- else %}"
    + ANSWER.replace("ANSWER", "{{- ' ' + message['content'] + eos_token }}")
    + "{%- endif %}{%- endfor %}"
)
REASONING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last %}"
    "{%- set content = '<think>' + (message.reasoning_content or '') + '</think>' + content %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Earlier answers have no reasoning; and answers are not marked."""

MARKED = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}


def unmarked(template: str) -> str:
    """The same template without the marks of answers, as most are published."""
    for mark in ("generation", "endgeneration"):
        for left, right in (("{%- ", " %}"), ("{% ", " %}")):
            template = template.replace(left + mark + right, "")
    return template


def turn(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


CHATS: list[Chat] = [
    [turn("user", "hi"), turn("assistant", "hello, what is it?")],
    [turn("system", "be short"), turn("user", "2 + 2?"), turn("assistant", "4")],
    [
        turn("user", "say ü"),
        turn("assistant", "ü 🙂"),
        turn("user", "and now in words, please"),
        turn("assistant", "u umlaut; smile  "),
    ],
    [turn("user", "<|im_end|> is what?"), turn("assistant", "a token")],
]


def make_tokenizer(folder: Path, template: str | None) -> Path:
    """A tokenizer with `template`, saved by Transformers; returns its tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["what is it? hello, be short and say so in words, please, assistant, user, system"]
    tokenizer.train_from_iterator(text * 3, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(folder)
    return folder / "tokenizer.json"


def write_chats(path: Path, chats: list[Chat]) -> Path:
    """A .jsonl file of `chats`."""
    lines = [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def expected(folder: Path, chat: Chat, template: str) -> tuple[list[int], list[int]]:
    """Transformers' own tokens of a chat, and which of them are the assistant's."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(found["input_ids"]), list(found["assistant_masks"])
