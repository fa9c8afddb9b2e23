"""What `fsdpplan/cli/completion.json` should hold: commands, their options, and what each takes."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

from fsdpplan.cli.commands import SUMMARIES, Commands
from fsdpplan.cli.options.expand import choices_of
from fsdpplan.cli.options.wanted import layout_words
from fsdpplan.files.prices import prices

OF_OPTIONS = {
    "--model": "models",
    "--hardware": "machines",
    "--gpu": "devices",
    "--why": "layout",
    "--job": "runs",
    "--config": "files:.json",
    "--plan": "files:.json",
    "--export": "files:.jsonl",
}
OF_METAVARS = {
    "PLAN": "files:.json",
    "BEFORE": "files:.json",
    "AFTER": "files:.json",
    "RUNS.csv": "files:.csv",
    "TABLE.csv": "files:.csv",
    "NAME|PATH|WORD": "profiles",
    "bash|zsh|fish": "words:bash|zsh|fish",
    "RUN": "files",
    "FILE": "files",
    "PATH": "files",
    "NAME|PATH": "files",
    "PATH[=WEIGHT]": "files",
    "DIR": "files:/",
}
LITERAL = re.compile(r"[a-z][a-z_-]+")


def completion_json() -> str:
    """One option a line, so that two changes of it seldom meet."""
    lines = ['{"layout": ' + json.dumps([word for word in layout_words() if len(word) > 1]) + ","]
    lines.append('"commands": {')
    for name in SUMMARIES:
        of = _command(name)
        options = ",\n".join(
            f"  {json.dumps(flag)}: {json.dumps(of['options'][flag])}" for flag in of["options"]
        )
        head = json.dumps({key: value for key, value in of.items() if key != "options"})[:-1]
        lines.append(f'{json.dumps(name)}: {head}, "options": {{\n{options}\n}}}},')
    lines[-1] = lines[-1].removesuffix(",")
    return "\n".join([*lines, "}}", ""])


def _command(name: str) -> dict[str, Any]:
    command = Commands()[name]
    word = name.replace("-", "_")
    choices = choices_of(getattr(import_module(f"fsdpplan.cli.commands.{word}"), word))
    options: dict[str, list[str]] = {}
    arguments, many = [], False
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append(_argument(name, parameter))
            many = many or parameter.nargs == -1
            continue
        for flag in (*parameter.opts, *parameter.secondary_opts):
            options[flag] = [_kind(flag, parameter, choices), _first(parameter.help or "")]
    options["--help"] = ["", "Show this message and exit."]
    return {
        "summary": SUMMARIES[name],
        "arguments": arguments,
        "many": many,
        "options": options,
    }


def _argument(command: str, parameter: Any) -> str:
    if command == "models":
        return "models"
    return OF_METAVARS.get(parameter.metavar or parameter.name.upper(), "any")


def _kind(flag: str, parameter: Any, choices: dict[str, tuple[str, ...]]) -> str:
    """What an option takes; empty: nothing."""
    if parameter.is_flag:
        return ""
    if flag in OF_OPTIONS:
        return OF_OPTIONS[flag]
    if flag == "--provider":
        return "words:" + "|".join(sorted({row.provider for row in prices()}))
    words = choices.get(flag) or LITERAL.findall(_literals(parameter.metavar or ""))
    if words:
        return "words:" + "|".join(words)
    return OF_METAVARS.get(parameter.metavar or "", "any")


def _literals(metavar: str) -> str:
    """The words of `always|never|N` that can be typed as they are."""
    parts = metavar.split("|")
    return " ".join(one for one in parts if len(parts) > 1 and LITERAL.fullmatch(one))


def _first(text: str) -> str:
    """The first sentence, or as much of it as fits beside the option."""
    sentence = re.split(r"(?<=\.) |; |: ", text)[0].removesuffix(".")
    return sentence if len(sentence) <= 70 else f"{sentence[:67].rsplit(' ', 1)[0]} ..."
