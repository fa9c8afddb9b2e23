"""Chats and the tokenizer that they are for, as far as a host that plans a job can see them: what
the trainer would refuse (`trainer/text/chats.py`) is said before the queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.table import parse_json_object, path_text, read_text

LINE_BYTES = 2**24
"""A first line longer than this is left to the trainer."""
CONFIG_BYTES = 2**26
"""Tokenizers keep lists of their tokens beside the template."""


def require_chats(data: Path, tokenizer: Path, template: Path | None) -> None:
    """Raise SpecError where `data` has no chats, or the tokenizer in `tokenizer` no template for
    them. What is not on this host is looked at when the job begins."""
    first = _first_line(data)
    is_chat = first is None or _is_chat(first, data)
    if not is_chat or template is not None or not tokenizer.is_file():
        return
    if (tokenizer.parent / "chat_template.jinja").is_file():
        return
    config = tokenizer.parent / "tokenizer_config.json"
    if config.is_file() and _has_template(config):
        return
    raise SpecError(
        f"{path_text(tokenizer)} has no chat template: there is no chat_template.jinja, nor one in "
        "tokenizer_config.json, beside it; fetch these with the tokenizer, or give one by "
        "--chat-template"
    )


def _first_line(data: Path) -> bytes | None:
    """None: it is not here, or a folder."""
    if not data.is_file():
        return None
    if data.suffix != ".jsonl":
        raise SpecError(
            f"--sft takes chats from .jsonl files, not from {path_text(data)}: give one with "
            'a JSON object with "messages" in each line'
        )
    with data.open("rb") as file:
        line = file.readline(LINE_BYTES)
    return line if line.strip() and len(line) < LINE_BYTES else None


def _is_chat(line: bytes, data: Path) -> bool:
    """Whether the line is of messages, not of two texts."""
    try:
        found: Any = json.loads(line)
        if isinstance(found["messages"] if "messages" in found else found["prompt"], list):
            return True
        if isinstance(found["completion"], str) and "messages" not in found:
            return False
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise SpecError(
        f"the first line of {path_text(data)} is no chat: write JSON objects with "
        '"messages", each with "role" and "content", or with "prompt" and "completion"'
    )


def _has_template(config: Path) -> bool:
    text = read_text(config, limit_bytes=CONFIG_BYTES, what="tokenizer config")
    found = parse_json_object(text, where=path_text(config)).get("chat_template")
    if isinstance(found, list):
        return any(isinstance(each, dict) and each.get("name") == "default" for each in found)
    return isinstance(found, str)
