"""Who may import whom: imports point down, and torch stays where it may cost its seconds."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdpplan"

MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "terminal": set(),
    "spec": {"errors", "units"},
    "cost": {"spec"},
    "search": {"cost"},
    "node": set(),
    "emit": {"spec", "node"},
    "files": {"spec"},
    "topology": {"spec"},
    "trainer": set(),
    "validate": {"cost", "search", "files"},
    "run": {"search", "emit", "files", "topology", "trainer", "validate", "terminal"},
    "cli": {"run"},
    "__main__": {"cli"},
}
"""Room -> rooms it may import. It may also import what those may import."""

THIRD_PARTY = {
    "files": {"pydantic"},
    "topology": {"pynvml"},
    "trainer": {"torch"},
    "run": {"rich"},
    "cli": {"typer", "click", "rich", "tabulate"},
}
"""Room -> distributions that it may import at module level."""

LAZY = {
    "node": {"torch"},
    "emit": {"yaml"},
    "topology": {"torch"},
    "trainer": {"torchao"},
    "run": {"torch"},
    "validate": {"numpy", "scipy"},
}
"""Room -> distributions that it may import inside functions only (yaml: where a manifest or such
is asked for; numpy: where there is something to learn from; scipy: in its fitting programs, which
need the development environment; torchao: where a plan asks for it)."""

WORLDLY = {"os", "subprocess", "socket", "shutil", "tempfile", "time", "logging", "random"}
PURE_ROOMS = ("errors", "units", "terminal", "spec", "cost", "search", "emit", "validate")
"""Rooms that touch nothing: no process, file, clock or log."""


def closure(room: str) -> set[str]:
    """`room`, and all rooms below it."""
    below = {room}
    for neighbour in MAY_IMPORT[room]:
        below |= closure(neighbour)
    return below


def room_of(path: Path) -> str:
    """`fsdpplan/cost/memory.py` is in `cost`, `fsdpplan/errors.py` in `errors`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def type_checking_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST, path: Path, *, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """(absolute module name, whether the import waits for a call) under `node`."""
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.Import):
            yield from ((alias.name, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts
            above = package[: len(package) - child.level + 1] if child.level else ()
            base = ".".join([*above, *([child.module] if child.module else [])])
            if base == "fsdpplan":
                yield from ((f"fsdpplan.{alias.name}", in_function) for alias in child.names)
            else:
                yield base, in_function
        else:
            lazy = inside or type_checking_only(child)
            yield from imports(child, path, in_function=lazy)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(), ids=name)
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is not a room: add it to the table or move the module"
    third_party = THIRD_PARTY.get(room, set())
    for module, lazy in imports(ast.parse(path.read_text(encoding="utf-8")), path):
        top, *rest = module.split(".")
        if top == "fsdpplan":
            if rest and rest[0] != "__version__":
                assert rest[0] in closure(room), f"{room} may not import {module}"
                assert room == "trainer" or rest[0] != "trainer" or lazy, (
                    f"{name(path)} imports torch by {module}: move it into a function"
                )
        elif top not in sys.stdlib_module_names:
            allowed = third_party | (LAZY.get(room, set()) if lazy else set())
            assert top in allowed, f"{room} may not import {module}" + (
                "" if lazy else " at module level"
            )


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_touches_nothing(room: str) -> None:
    for path in (path for path in modules() if room_of(path) == room):
        found = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()), path)}
        assert not found & WORLDLY, f"{name(path)} imports {sorted(found & WORLDLY)}"


def test_the_trainer_names_nothing_of_ours_but_by_relative_import() -> None:
    # It is copied into a job folder, where there need not be an `fsdpplan`.
    for path in (PACKAGE / "trainer").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("fsdpplan") for alias in node.names)
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not (node.module or "").startswith("fsdpplan"), name(path)


def test_nothing_imports_tests_or_docs() -> None:
    for path in modules():
        tops = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()), path)}
        assert not tops & {"tests", "docs"}, name(path)
