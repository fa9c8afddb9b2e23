"""Text that a person gave, made safe for a shell script, an #SBATCH line or a comment."""

from __future__ import annotations

import re
import shlex
import textwrap

from fsdpplan.errors import SpecError

_SHORT_ESCAPES = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\t": r"\t", "\r": r"\r"}

_UNESCAPED = {escape: character for character, escape in _SHORT_ESCAPES.items()}
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")


def shell_word(text: str) -> str:
    """`text` as one literal word of bash.

    Control characters become escapes inside $'...': sbatch refuses a script with a carriage
    return in it, and a word then stays on its line.
    """
    if "\0" in text:
        raise SpecError(f"{text!r} has a NUL character, which no program can be given")
    _require_unicode(text)
    if not _has_control(text):
        # A bare = at the beginning means something to a shell, which shlex does not say.
        word = shlex.quote(text)
        return f"'{text}'" if word == text and text.startswith("=") else word
    return "$'" + "".join(_ansi_c(character) for character in text) + "'"


def literal_word(word: str) -> str:
    """The text that `shell_word` wrote as `word`."""
    if not word.startswith("$'"):
        return "".join(shlex.split(word))
    return _ESCAPE.sub(lambda match: _UNESCAPED.get(match[0]) or chr(int(match[1], 16)), word[2:-1])


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
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SpecError(
            f"{text!r} is not valid UTF-8 text, so it cannot stand in a script: rename it"
        ) from None


def _ansi_c(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if _has_control(character):
        return f"\\x{ord(character):02x}"
    return character
