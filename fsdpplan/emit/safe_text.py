"""Safe text: what a person gave, for a shell script, an"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise

from fsdpplan.errors import SpecError

_SHORT_ESCAPES = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\t": r"\t", "\r": r"\r"}

_UNESCAPED = {escape.encode(): character.encode() for character, escape in _SHORT_ESCAPES.items()}
_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|.)")


def shell_word(text: str) -> str:
    """`text` as one literal word of bash.

    What is not printable becomes escapes inside $'...': sbatch refuses a script with a carriage
    return in it, a word then stays on its line for whatever reads it (YAML breaks lines at U+2028
    too), and no one who reads the script is shown another text than bash. The escapes are those of
    bytes, since what \\u gives depends on the locale.
    """
    if "\0" in text:
        raise SpecError(
            f"{text!r} has a NUL character, which no program can be given: leave it out"
        )
    _require_unicode(text)
    if text.isprintable():
        # A bare = at the beginning means something to a shell, which shlex does not say.
        word = shlex.quote(text)
        return f"'{text}'" if word == text and text.startswith("=") else word
    return "$'" + "".join(_ansi_c(character) for character in text) + "'"


def require_passable(name: str, text: str) -> None:
    """Raise SpecError for a value that no program can be given; the message does not show it."""
    if "\0" in text or not _is_unicode(text):
        raise SpecError(f"{name} has a NUL character or is not valid UTF-8 text: write it as text")


def literal_word(word: str) -> str:
    """The text that `shell_word` wrote as `word`."""
    if not word.startswith("$'"):
        return "".join(shlex.split(word))
    return _ESCAPE.sub(_unescaped, word[2:-1].encode()).decode()


def shell_words(words: tuple[str, ...]) -> str:
    """Words with spaces between them."""
    return " ".join(shell_word(word) for word in words)


def sbatch_value(name: str, text: str) -> str:
    """`text` as the value of an option on an #SBATCH line.

    sbatch reads these lines itself: it knows both quotes, takes a backslash as an escape inside
    them too, and a bare # as a comment. A line break ends the line, whatever stands around it.
    """
    if not text:
        raise SpecError(f"{name} is empty: give a value, or leave the option out")
    if _has_control(text) or "\x85" in text or "\u2028" in text or "\u2029" in text:
        raise SpecError(
            f"{name} {text!r} has a control character or line break, which an #SBATCH line "
            "cannot hold: use printable characters"
        )
    _require_unicode(text)
    if shlex.quote(text) == text:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def comment(text: str) -> str:
    """`text` as one comment line: what would end the line is replaced by a blank."""
    return "# " + "".join(c if c.isprintable() else " " for c in text)


def paragraph(text: str) -> list[str]:
    """`text` as comment lines of the script's width."""
    return [comment(line) for line in textwrap.wrap(text, width=96, break_on_hyphens=False)]


def _has_control(text: str) -> bool:
    return any(ord(character) < 0x20 or ord(character) == 0x7F for character in text)


def _require_unicode(text: str) -> None:
    if not _is_unicode(text):
        raise SpecError(
            f"{text!r} is not valid UTF-8 text, so it cannot stand in a script: rename it"
        )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _ansi_c(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if not character.isprintable():
        return "".join(f"\\x{byte:02x}" for byte in character.encode())
    return character


def _unescaped(match: re.Match[bytes]) -> bytes:
    return _UNESCAPED.get(match[0]) or bytes([int(match[1], 16)])


_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, moves of the cursor
    # strings: titles, links, the clipboard
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*(?![\[\]PX^_])[0-~]"  # two characters, as to choose an alphabet
)
"""Source: ECMA-48, sections 5.4 and 5.6."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All but line breaks and tabs, and what turns the direction of text."""


def printable(text: str) -> str:
    """`text` with whatever does not show written as an escape: `\\x1b`."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """`text` with control characters written as escapes, and all else as it is; quick."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def may_move(is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Whether lines may be written over, and bars drawn: on a terminal that can, where nobody asks
    for plain text (https://no-color.org)."""
    is_dumb = environment.get("TERM") in ("dumb", "unknown")
    return is_terminal and not is_dumb and not environment.get("NO_COLOR")


def log_line(line: str) -> str:
    """A line of a log as it would stand on a terminal: what carriage returns overwrote is gone, and
    so are colours; what else could move the terminal is written as an escape."""
    return harmless(_SEQUENCE.sub("", line.rstrip("\r").rpartition("\r")[2]))


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
