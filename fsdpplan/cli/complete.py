"""What a shell offers while a command is typed.

The shell asks with each press of Tab, so nothing of the commands is imported: their options are in
`completion.json` beside this, which `make docs` writes from the program. `fsdpplan completion` has
the other half, what is put into the shell.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASKS = "_FSDPPLAN_COMPLETE"
"""The variable by which a shell asks; its value is the shell's name."""

TABLE = Path(__file__).with_name("completion.json")

Offer = tuple[str, str]
"""A word, and what it means."""

_KIND = re.compile(r'^kind = "(\w+)"', re.M)


def main(words: Sequence[str]) -> None:
    """Print what can stand in the place of the last of `words`, each on a line as the shell that
    asks reads it."""
    shell = os.environ[ASKS]
    if shell == "bash":
        words = _joined(words)
    found = offers(words, json.loads(TABLE.read_text(encoding="utf-8")))
    print("\n".join(_line(offer, shell, words[-1] if words else "") for offer in found))
    sys.stdout.flush()


def offers(words: Sequence[str], table: dict[str, Any]) -> list[Offer]:
    """What can stand in the place of the last word, which may be a part of one."""
    *before, current = words or [""]
    commands = table["commands"]
    name, *typed = before or [""]
    if not before or name not in commands:
        if before not in ([], ["help"]):
            return []
        others = {"help": "Options and examples of a command.", "--help": "", "--version": ""}
        known = {one: of["summary"] for one, of in commands.items()} | ({} if before else others)
        return _beginning(current, known.items())
    return _of_command(_Command(commands[name], table), typed, current)


@dataclass(frozen=True, slots=True)
class _Command:
    """A command, and the table of all."""

    of: dict[str, Any]
    table: dict[str, Any]

    @property
    def options(self) -> dict[str, list[str]]:
        """Option -> what it takes, and what it means."""
        found: dict[str, list[str]] = self.of["options"]
        return found


def _of_command(command: _Command, typed: Sequence[str], current: str) -> list[Offer]:
    option, is_value, value = current.partition("=")
    if is_value and option in command.options:
        joined = _values(command.options[option][0], value, command.table)
        return [(f"{option}={one}", said) for one, said in joined]
    if typed and (kind := command.options.get(typed[-1], [""])[0]):
        return _values(kind, current, command.table)
    if current.startswith("-"):
        left = {one: said for one, (_, said) in command.options.items() if one not in typed}
        return _beginning(current, left.items())
    kinds = command.of["arguments"]
    number = len(_arguments(command, typed))
    if not kinds or (number >= len(kinds) and not command.of["many"]):
        left = {one: said for one, (_, said) in command.options.items() if one not in typed}
        return _beginning(current, left.items())
    return _values(kinds[min(number, len(kinds) - 1)], current, command.table)


def _arguments(command: _Command, typed: Sequence[str]) -> list[str]:
    """The words that are neither options nor their values."""
    found, takes = [], False
    for word in typed:
        if not takes and not word.startswith("-"):
            found.append(word)
        takes = not takes and bool(command.options.get(word, [""])[0])
    return found


def _values(kind: str, current: str, table: dict[str, Any]) -> list[Offer]:
    """What an option or argument of that kind takes."""
    name, _, more = kind.partition(":")
    if name == "files":
        return _files(current, more)
    if name == "layout":
        return _last(current, " ", [(word, "") for word in table["layout"]])
    if name == "words":
        return _last(current, ",", [(word, "") for word in more.split("|")])
    if name == "runs":
        return _beginning(current, ((one, "") for one in _names_in("fsdpplan-runs")))
    found = _named(name)
    # a path is one whatever stands before its last comma
    here = _files(current, ".toml") if name in ("machines", "devices") and current else []
    return [*_last(current, ",", found), *here]


def _named(kind: str) -> list[Offer]:
    """Names of the catalogues."""
    if kind == "models":
        from fsdpplan.files.catalogue import model_names

        return [(name, "") for name in model_names()]
    if kind in ("machines", "devices", "profiles"):
        from fsdpplan.files.profiles.catalogue import profiles_folder

        wanted = {"machines": ("node", "cluster"), "devices": ("device",)}.get(kind)
        return [
            (path.stem, "")
            for path in sorted(profiles_folder().glob("*.toml"))
            if wanted is None or _kind_of(path) in wanted
        ]
    return []


def _kind_of(path: Path) -> str:
    found = _KIND.search(path.read_text(encoding="utf-8"))
    return found[1] if found else ""


def _last(current: str, between: str, known: Iterable[Offer]) -> list[Offer]:
    """Words in the place of the last of several."""
    head, sign, tail = current.lstrip("'\"").rpartition(between)
    return [(f"{head}{sign}{word}", said) for word, said in _beginning(tail, known)]


def _beginning(current: str, known: Iterable[Offer]) -> list[Offer]:
    return [(word, said) for word, said in known if word.startswith(current)]


def _files(current: str, ending: str) -> list[Offer]:
    """Folders, and files with that ending."""
    current = current.lstrip("'\"")
    folder, begins = os.path.split(current)
    found = []
    for name in _names_in(os.path.expanduser(folder) or "."):
        if not name.startswith(begins) or (name.startswith(".") and not begins):
            continue
        path = os.path.join(folder, name)
        if os.path.isdir(os.path.expanduser(path)):
            found.append((f"{path}/", ""))
        elif name.endswith(ending):
            found.append((path, ""))
    return found


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.isprintable())
    except OSError:
        return []


def _joined(words: Sequence[str]) -> list[str]:
    """Bash takes `--tp=4` for three words."""
    found: list[str] = []
    for word in words:
        if found and (word == "=" or (found[-1].endswith("=") and found[-1].startswith("--"))):
            found[-1] += word
        else:
            found.append(word)
    return found


def _line(offer: Offer, shell: str, current: str) -> str:
    word, said = offer
    if shell == "bash":
        option, is_value, value = word.partition("=")
        if is_value and option.startswith("--"):
            word = value  # bash writes over what stands behind the sign
        return (
            word
            if current[:1] in ("'", '"')
            else re.sub(r"([\s'\"\\$`&|;<>()*?\[\]!#])", r"\\\1", word)
        )
    return f"{word}\t{said}"
