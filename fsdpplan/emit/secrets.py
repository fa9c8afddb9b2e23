"""Secrets: known by their names and by how they look, and kept out of all that is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise

from fsdpplan.errors import SpecError

MASK = "***"
"""Stands where a secret stood."""

SHORTEST_VALUE = 8
"""Characters of the shortest value that is looked for in texts: a shorter one would also mask
ordinary words."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET = re.compile(
    r"_(?:SECRETS?|PASSPHRASE|CREDENTIALS?|APIKEY|AUTHORIZATION|BEARER|JWT|COOKIE|WEBHOOK|"
    r"[A-Z]*PASSWO?R?D|(?:API|ACCESS|PRIVATE|SECRET|SIGNING|ENCRYPTION|STORAGE|ACCOUNT)_KEY)_|"
    r"_(?:TOKEN|AUTH)_$"
)
"""In the words of a name, each between underlines."""
_NOT_SECRET = re.compile(
    r"_(?:PATH|FILE|DIR|FOLDER|NAME|TYPE|MODE)_$|^_(?:USE|NO)_|"
    r"_(?:PAD|BOS|EOS|UNK|SEP|CLS|MASK|IMAGE|VIDEO|AUDIO|STOP|START|BEGIN|END|SPECIAL|NEXT|PER|MAX|"
    r"MIN|NUM|EXTRA|IGNORE|PREFIX|SUFFIX|MIDDLE|DECODER|NEW|ADD|DROP)_TOKEN_$"
)
"""Where a secret is or of which kind, whether one is used, and tokens of text."""

_NO_SECRET = re.compile(r"(?:\$|`|true|false|yes|no|none|null|auto|[01]$|$)", re.IGNORECASE)
"""Beginnings of values that are a reference of a shell, yes, no or nothing."""

_SHAPES = (
    r"hf_[A-Za-z0-9]{20,}",
    r"sk-[A-Za-z0-9_-]{20,}",
    r"gh[a-z]_[A-Za-z0-9]{20,}",
    r"github_pat_[A-Za-z0-9_]{20,}",
    r"glpat-[A-Za-z0-9_-]{20,}",
    r"xox[a-z]-[A-Za-z0-9-]{10,}",
    r"nvapi-[A-Za-z0-9_-]{20,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
)
"""Tokens of the Hugging Face Hub, of language model services, GitHub, GitLab, Slack, NVIDIA and
AWS, and JSON Web Tokens."""
_TOKEN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES)})")
_KEY_FILE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]+)(?P<between>[\"']?\s*(?:=|:\s)\s*(?:Bearer\s+)?[\"']?)"
    r"(?P<value>[^\s\"',;&}]+)"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or option of this name holds a secret.

    By whole words, which an underline, another sign or a change of case ends: HF_TOKEN and
    --api-key do, TOKENIZER_PATH, KEYBOARD, pad_token and SECRET_FILE do not.
    """
    words = f"_{'_'.join(_WORD.findall(name)).upper()}_"
    return _SECRET.search(words) is not None and not _NOT_SECRET.search(words)


def looks_secret(text: str) -> bool:
    """Whether `text` has something in it of the form that tokens and keys have."""
    return any(shape.search(text) for shape in (_TOKEN, _KEY_FILE, _IN_URL))


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of the variables whose name says that they are secret, the longest first."""
    found = {
        value
        for name, value in environment.items()
        if is_secret_name(name) and len(value) >= SHORTEST_VALUE
    }
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def redacted(text: str) -> str:
    """`text` without what looks secret, and without what is assigned to a secret's name."""
    return _ASSIGNED.sub(_without_value, without_values(text))


def without_values(text: str, *, known: Iterable[str] = ()) -> str:
    """`text` without what looks secret, and without the values `known` to be."""
    for value in known:
        text = text.replace(value, MASK)
    for shape in (_KEY_FILE, _TOKEN, _IN_URL):
        text = shape.sub(MASK, text)
    return text


def require_public_variable(name: str, value: str) -> None:
    """Raise SpecError for a variable that would put a secret into what is written."""
    if not value or not (is_secret_name(name) or looks_secret(value)):
        return
    raise SpecError(
        f"--env {name} looks like a secret, and whoever reads the script would read it: leave it "
        f"out and export {name} where the job is submitted, whose environment the ranks get; on "
        f"Kubernetes name a Secret by --secret-env {name}=SECRET:KEY"
    )


def require_public_words(option: str, words: tuple[str, ...]) -> None:
    """Raise SpecError where a word is a secret, or follows the name of one: `--api-key X`."""
    for word in words:
        require_public_text(option, word)
    for word, following in pairwise(words):
        is_flag = word.startswith("--") and "=" not in word
        if is_flag and is_secret_name(word) and _is_value(following):
            raise _refusal(option, word.lstrip("-"))


def require_public_text(option: str, text: str) -> None:
    """Raise SpecError where `text` assigns something to a secret's name, or looks like one."""
    require_no_token(option, text)
    for match in _ASSIGNED.finditer(text):
        if _assigns_secret(match):
            raise _refusal(option, match["name"])


def require_no_tokens(value: object) -> None:
    """`require_no_token` for each text in the fields of a dataclass, under the field's option."""
    assert is_dataclass(value)
    for field in fields(value):
        given = getattr(value, field.name)
        for text in given if isinstance(given, tuple) else (given,):
            if isinstance(text, str):
                require_no_token("--" + field.name.replace("_", "-"), text)


def require_no_token(option: str, text: str) -> None:
    """Raise SpecError where `text` has something in it of the form that tokens and keys have."""
    if looks_secret(text):
        raise _refusal(option, None)


def _is_value(word: str) -> bool:
    return not word.startswith("-") and not _NO_SECRET.match(word)


def _assigns_secret(match: re.Match[str]) -> bool:
    return is_secret_name(match["name"]) and not _NO_SECRET.match(match["value"])


def _without_value(match: re.Match[str]) -> str:
    if not _assigns_secret(match):
        return match[0]
    return f"{match['name']}{match['between']}{MASK}"


def _refusal(option: str, name: str | None) -> SpecError:
    what = "holds a token or password" if name is None else f"gives {name}, which looks secret"
    return SpecError(
        f"{option} {what}, and whoever reads the script or the list of processes would read it: "
        "export it where the job is submitted, and let the program take it from its environment"
    )
