"""A configuration as plain values, out of JSON, YAML or TOML of anybody's.

Nothing of it is executed: YAML is built from the parser's events here, without tags, anchors and
aliases, so that it holds what JSON can; depth and size are bounded.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.seems import seems
from fsdpplan.files.table import UNREADABLE, parse_json_object, path_text, read_text

LIMIT_BYTES = 256 * 2**10
MOST_DEPTH = 24
MOST_FIELDS = 5000
SHORTER = "keep those of one run"
PYTHON = (
    "it is a Python program, which is not run: export what it sets, such as a DeepSpeed JSON, the "
    "YAML of accelerate config, or a TOML, or type its values as options"
)

_TOML = re.compile(r"^\[{1,2}[\w.\" -]+\]{1,2}\s*(#.*)?$", re.MULTILINE)
_PROGRAM = re.compile(r"^(from [\w.]+ import |import \w|def \w+\(|class \w+|@\w+)", re.MULTILINE)


def configuration_fields(path: Path) -> dict[str, Any]:
    """Dotted name -> value of each field of the file; a list is one value.

    Raises SpecError, with file and line, for what cannot be read.
    """
    where = path_text(path)
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="configuration")
    if path.suffix == ".py" or _PROGRAM.search(text):
        raise SpecError(f"{where}: {PYTHON}")
    try:
        tree = _tree(text, where, suffix=path.suffix)
        return dict(_flat(tree, where))
    except RecursionError as error:
        raise SpecError(
            f"{where}: brackets in brackets without end, which is no setting: correct it there"
        ) from error


def _tree(text: str, where: str, *, suffix: str) -> Mapping[str, Any]:
    if text.lstrip()[:1] == "{":
        return parse_json_object(text, where=where)
    if suffix == ".toml" or (suffix not in (".yaml", ".yml") and _TOML.search(text)):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{where} is not TOML: {error}; correct it there") from error
        except ValueError as error:
            raise SpecError(f"{where} cannot be read: {UNREADABLE}; correct it there") from error
    if suffix in (".yaml", ".yml") or re.search(r"^[\w.-]+:(\s|$)", text, re.MULTILINE):
        return _yaml(text, where)
    raise SpecError(
        f"{where}: {seems(text)}, which is no configuration in JSON, YAML or TOML: give one, or "
        "type its values as options"
    )


def _flat(tree: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    """Leaves by dotted name."""
    found: list[tuple[str, Any]] = []
    waiting: list[tuple[str, int, Mapping[str, Any]]] = [("", 1, tree)]
    while waiting:
        above, depth, table = waiting.pop(0)
        if depth > MOST_DEPTH:
            raise SpecError(
                f"{where} nests more than {MOST_DEPTH} tables, as no configuration does: give what "
                "a program reads"
            )
        for name, value in table.items():
            dotted = f"{above}{name}"
            if isinstance(value, Mapping) and value:
                waiting.append((f"{dotted}.", depth + 1, value))
            else:
                found.append((dotted, value))
            if len(found) + len(waiting) > MOST_FIELDS:
                raise SpecError(f"{where} has more than {MOST_FIELDS} fields: {SHORTER}")
    return found


def _yaml(text: str, where: str) -> Mapping[str, Any]:
    import yaml

    stack: list[tuple[Any, str | None]] = []
    roots: list[Any] = []

    def put(value: Any, line: int) -> None:
        if not stack:
            roots.append(value)
            return
        holder, key = stack[-1]
        if isinstance(holder, list):
            holder.append(value)
        elif key is None:
            if not isinstance(value, str | int | float) or str(value) in holder:
                raise SpecError(
                    f"{where}: line {line}: a key of YAML must be a word, and only once"
                )
            stack[-1] = (holder, str(value))
        else:
            holder[key] = value
            stack[-1] = (holder, None)

    count = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line, count = event.start_mark.line + 1, count + 1
            if count > 4 * MOST_FIELDS:
                raise SpecError(f"{where} has more than {MOST_FIELDS} fields: {SHORTER}")
            if getattr(event, "anchor", None) is not None:
                raise SpecError(
                    f"{where}: line {line}: anchors and aliases of YAML are not read: write out "
                    "what they stand for"
                )
            if getattr(event, "tag", None) is not None:
                raise SpecError(
                    f"{where}: line {line}: the tag {str(event.tag)[:60]!r} of YAML is not read: "
                    "write the value plainly"
                )
            match event:
                case yaml.ScalarEvent():
                    plain = event.style is None
                    is_key = bool(stack) and isinstance(stack[-1][0], dict) and stack[-1][1] is None
                    put(_scalar(event.value) if plain and not is_key else event.value, line)
                case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                    if len(stack) >= MOST_DEPTH:
                        raise SpecError(
                            f"{where}: line {line}: nests more than {MOST_DEPTH} deep, as no "
                            "configuration does: give what a program reads"
                        )
                    inner: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
                    put(inner, line)
                    stack.append((inner, None))
                case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                    stack.pop()
                case _:
                    pass
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f": line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "broken"
        raise SpecError(f"{where}{place}: it is not YAML ({problem}); correct it there") from error
    if len(roots) != 1 or not isinstance(roots[0], dict):
        raise SpecError(
            f"{where}: a configuration in YAML is one document of named fields: keep one"
        )
    return roots[0]


def _scalar(text: str) -> Any:
    """A plain word, by the rules of YAML 1.1 as far as configurations use them."""
    lowered = text.lower() if text in (text.lower(), text.title(), text.upper()) else text
    if lowered in ("true", "yes", "on"):
        return True
    if lowered in ("false", "no", "off"):
        return False
    if lowered in ("null", "~", ""):
        return None
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?[0-9]{1,18}\.[0-9]{0,18}(e[+-][0-9]{1,3})?", lowered):
        return float(text)
    return text
