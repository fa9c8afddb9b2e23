"""Write `docs/reference/python-api.md`: every name of `fsdpplan.__all__`, from its signature, its
docstring and the docstrings of its fields."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

HEAD = """# Python, name by name

<!-- about: Each function and class of `import fsdpplan`: what it takes, gives and raises. -->

Generated from the docstrings by `make docs`; [a page of examples](python.md) is beside it. Names
carry their units: `_bytes`, `_seconds`, `_bytes_per_second` (one direction of one device);
fractions go from 0 to 1. Values are frozen: `dataclasses.replace` makes another. What is raised is
a `FsdpPlanError` ([kinds and exit codes](errors.md)): `SpecError` for a value that cannot be,
`NoFeasibleLayout` where nothing fits.
"""


def api_page() -> str:
    """The page."""
    import fsdpplan

    public = {name: getattr(fsdpplan, name) for name in fsdpplan.__all__}
    functions = {name: one for name, one in public.items() if not isinstance(one, type)}
    classes = {name: one for name, one in public.items() if isinstance(one, type)}
    parts = [HEAD, "## Functions\n", *map(_function, functions.values())]
    return "\n".join([*parts, "## Classes\n", *map(_class, classes.values())])


def _function(one: Any) -> str:
    signature = inspect.signature(one)
    arguments = [_argument(argument) for argument in signature.parameters.values()]
    marks = [argument.kind for argument in signature.parameters.values()]
    for index, kind in enumerate(marks):
        if kind is inspect.Parameter.KEYWORD_ONLY and inspect.Parameter.VAR_POSITIONAL not in marks:
            arguments.insert(index, "*")
            break
    gives = str(signature.return_annotation).replace("'", "")
    line = f"{one.__name__}({', '.join(arguments)}) -> {gives}"
    if len(line) > 90:
        inside = "".join(f"    {argument},\n" for argument in arguments)
        line = f"{one.__name__}(\n{inside}) -> {gives}"
    return f"### `{one.__name__}`\n\n```text\n{line}\n```\n\n{_prose(one)}\n"


def _argument(argument: inspect.Parameter) -> str:
    """`plan: Plan`, whose type is text where annotations are not evaluated."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    words = f"{stars.get(argument.kind, '')}{argument.name}: {argument.annotation}"
    given = argument.default is not inspect.Parameter.empty
    return f"{words} = {argument.default!r}" if given else words


def _class(one: type) -> str:
    """A class: what it is, its fields, what follows from them."""
    lines = [f"### `{one.__name__}`\n", f"{_prose(one)}\n"]
    rows = list(_fields(one)) if dataclasses.is_dataclass(one) else []
    if rows:
        lines += ["| field | type | meaning |", "|---|---|---|"]
        lines += [_row(name, kind, told) for name, kind, told in rows] + [""]
    derived = list(_derived(one))
    if derived:
        lines += ["| property or method | gives | meaning |", "|---|---|---|"]
        lines += [_row(name, kind, told) for name, kind, told in derived] + [""]
    return "\n".join(lines)


def _row(name: str, kind: str, told: str) -> str:
    shown = f"`{kind}`" if kind else ""
    cells = (f"`{name}`", shown, told)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _fields(one: type) -> Iterator[tuple[str, str, str]]:
    """Fields, inherited ones where they are declared first."""
    told = {}
    for base in reversed(one.__mro__):
        if dataclasses.is_dataclass(base):
            told |= _documented(base)
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        default = "" if _is_needed(field) else f" Default: `{_default(field)}`."
        yield field.name, str(field.type), f"{told.get(field.name, '')}{default}".strip()


def _documented(base: type) -> dict[str, str]:
    from docs.generate import documented_fields

    module = base.__module__.removeprefix("fsdpplan.").replace(".", "/")
    rows = documented_fields(module, base.__name__, [])
    return {name: " ".join(text.split()) for name, _, text in rows}


def _is_needed(field: Any) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _default(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return f"{getattr(field.default_factory, '__name__', 'made anew')}()"
    return repr(field.default)


def _derived(one: type) -> Iterator[tuple[str, str, str]]:
    """Properties and methods that are declared by the class itself or by what it is made of."""
    seen = set()
    for base in one.__mro__:
        if not base.__module__.startswith("fsdpplan."):
            continue
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else member
            if name.startswith("_") or name in seen or not inspect.isfunction(function):
                continue
            if not function.__doc__ or name == "shown":  # what a screen needs
                continue
            seen.add(name)
            call = name if isinstance(member, property) else f"{name}()"
            gives = str(inspect.signature(function).return_annotation).replace("'", "")
            yield call, gives, " ".join(function.__doc__.split("\n\n")[0].split())


def _prose(one: Any) -> str:
    """A docstring as paragraphs."""
    text = inspect.getdoc(one) or ""
    return "\n\n".join(textwrap.fill(part, 110) for part in text.split("\n\n"))
