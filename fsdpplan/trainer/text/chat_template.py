"""Chats as text: what a tokenizer's template makes of messages, and which part of that is answers.

Templates are Jinja, in `chat_template.jinja` or `tokenizer_config.json` beside a `tokenizer.json`.
They come from whoever published the tokenizer, so they run in Jinja's sandbox, as Transformers runs
them. jinja2 comes with torch.

An answer is what stands between `{% generation %}` and `{% endgeneration %}`. A template without
these is asked for beginnings of the chat: what it adds to the prompt for an answer when the answer
is there, is the answer. That holds where the chat begins as its beginnings do. Templates that
render earlier turns otherwise than the last (without their reasoning, say) break it for these, and
such an answer does not count, since it is not what the model would be asked for.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checkpoint.whole_file import read_small
from ..errors import TrainerError

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
LEAST_JINJA = (3, 1, 6)
"""Templates could leave the sandbox of those before."""

_MARKED = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")

Message = dict[str, Any]


class Said(NamedTuple):
    """A chat as text."""

    text: str
    answers: list[tuple[int, int]]
    """Where in it answers begin and end, in characters."""
    untold: int
    """Answers whose place could not be told."""


class Unrenderable(Exception):
    """The template refuses the messages, or fails on them."""


class ChatTemplate:
    """A tokenizer's template."""

    def __init__(self, source: str, names: dict[str, str], *, now: datetime) -> None:
        """`names` are the tokenizer's special tokens, `now` is when templates are told it is: a
        date of the data, for the same text in every run."""
        self.source, self.names = source, names
        self.marks = _MARKED.search(source) is not None
        nonce = secrets.token_hex(8)
        self._ends = begin, end = f"<{nonce}<", f">{nonce}>"
        self._template = _compiled(source, lambda text: f"{begin}{text}{end}", now)

    def __call__(
        self, messages: Sequence[Message], tools: list[Any] | None, *, first: int = 0
    ) -> Said:
        """The chat; only answers from message number `first` on."""
        if self.marks:
            return self._by_marks(messages, tools, first)
        whole, answers, untold = self._text(messages, tools), [], 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant" or number < first:
                continue
            bounds = self._answer(messages, tools, number, whole)
            if bounds is None:
                untold += 1
            else:
                answers.append(bounds)
        return Said(whole, answers, untold)

    def _answer(
        self, messages: Sequence[Message], tools: list[Any] | None, number: int, whole: str
    ) -> tuple[int, int] | None:
        """Where message `number` is in the `whole` chat; None: the chat does not begin so."""
        try:
            prompt = self._text(messages[:number], tools, asks=True)
            through = self._text(messages[: number + 1], tools)
        except Unrenderable:  # no chat begins with an answer, say
            return None
        agrees = whole.startswith(through) and through.startswith(prompt)
        return (len(prompt), len(through)) if agrees and len(through) > len(prompt) else None

    def _by_marks(self, messages: Sequence[Message], tools: list[Any] | None, first: int) -> Said:
        skipped = len(self._split(self._text(messages[:first], tools))[0]) if first else 0
        text, answers = self._split(self._text(messages, tools))
        return Said(text, [bounds for bounds in answers if bounds[0] >= skipped], 0)

    def _split(self, marked: str) -> tuple[str, list[tuple[int, int]]]:
        """(text without its marks, where the marked parts are in it)."""
        begin, end = self._ends
        plain, *parts = marked.split(begin)
        answers = []
        for part in parts:
            answer, _, behind = part.partition(end)
            answers.append((len(plain), len(plain) + len(answer)))
            plain += answer + behind
        return plain, answers

    def _text(
        self, messages: Sequence[Message], tools: list[Any] | None, *, asks: bool = False
    ) -> str:
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=asks,
                **self.names,
            )
        except Exception as error:  # a program of somebody else's, and raises what it likes
            raise Unrenderable(f"{type(error).__name__}: {error}") from error


def _with_reasoning(message: Message) -> Message:
    """`message` with its reasoning under each of the names that templates read (Transformers 5.23,
    chat_template_utils.py)."""
    names = ("reasoning_content", "thinking", "reasoning")
    found = next((message[name] for name in names if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _compiled(source: str, mark: Callable[[str], str], now: datetime) -> jinja2.Template:
    """`source` in the environment that Transformers gives templates, with answers marked."""
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise TrainerError(
            "a chat template needs the Python package jinja2, which is not installed: pip install "
            "jinja2"
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < LEAST_JINJA:
        raise TrainerError(
            f"jinja2 {jinja2.__version__} lets chat templates out of its sandbox: pip install "
            "'jinja2>=3.1.6'"
        )

    class Generation(Extension):
        """`{% generation %}`: what the assistant said."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return mark(caller())

    class Namespace(jinja2.utils.Namespace):
        """Without names that lead into the interpreter."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace takes no {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": now.strftime,
        "dict": lambda *args, **given: dict(*args, **given),
        "namespace": Namespace,
    }
    return environment.from_string(source)


def read_template(tokenizer: Path, own: Path | None) -> tuple[str | None, dict[str, str]]:
    """(the template of the tokenizer in a `tokenizer.json`, or the one in `own`; its special tokens
    by name). None: it has no template."""
    config = _config(tokenizer.parent / CONFIG_FILE)
    names = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    file = own or tokenizer.parent / TEMPLATE_FILE
    if own is not None or file.is_file():
        try:
            return read_small(file), names
        except (OSError, ValueError) as error:
            raise TrainerError(
                f"the chat template {file} cannot be read: {error}; give a Jinja file"
            ) from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {each.get("name"): each.get("template") for each in found}.get("default")
    return (found if isinstance(found, str) else None), names


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TrainerError(
            f"{path} cannot be read: {error}; download the tokenizer again"
        ) from error
    return config if isinstance(config, dict) else {}
