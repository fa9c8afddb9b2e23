"""Text that a person gave, made safe for a shell script, an #SBATCH line or a comment."""

from __future__ import annotations

import re
import shlex
import textwrap

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
