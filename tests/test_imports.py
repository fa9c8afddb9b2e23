"""Who may import whom: imports point down, and torch stays where it may cost its seconds."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fsdpplan.run.folder import trainer_sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdpplan"

MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "spec": {"errors", "units"},
    "cost": {"spec"},
    "search": {"cost"},
    "node": set(),
    "emit": {"spec", "node"},
    "files": {"spec"},
    "topology": {"spec"},
    "trainer": {"spec"},
    "validate": {"cost", "search", "files"},
    "run": {"search", "emit", "files", "topology", "trainer", "validate"},
    "report": {"run"},
    "answers": {"run"},
    "api": {"answers"},
    "cli": {"run", "report"},
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
    "files": {"yaml"},
    "topology": {"torch"},
    "trainer": {"torchao", "jinja2"},
    "run": {"torch"},
    "validate": {"numpy", "scipy"},
}
"""Room -> distributions that it may import inside functions only (yaml: where a manifest or such
is asked for, or a configuration is read; numpy: where there is something to learn from; scipy: in
its fitting programs, which need the development environment; torchao: where a plan asks for it;
jinja2, which torch brings: where there are chats)."""

CLI_MAY_IMPORT = {
    "process": set(),
    "working": {"process"},
    "options": set(),
    "resolve": {"options", "working"},
    "views": {"options", "resolve", "working"},
    "commands": {"options", "resolve", "views", "working"},
    "app": {"process", "commands", "views"},
}
"""Part of the command line -> others that it may import; a command imports no other command."""

WAITS = {
    "cli/options/offered.py": {
        "files.catalogue": "where a shell asks for models",
        "files.prices": "the same of providers",
        "files.profiles.catalogue": "the same of machines",
    },
    "cli/app.py": {
        "files.table": "for an error only: it would delay every command",
        "run.crash": "the same",
        "topology.probe": "the same",
    },
    "cli/process.py": {"emit.safe_text": "its patterns take longer than all else before signals"},
    "cli/commands/estimate.py": {
        "cli.resolve.configuration": "where a configuration of another tool is read",
        "cli.views.configuration": "the same",
        "cli.resolve.goal": "where time, money or energy is asked for, as what follows",
        "cli.views.goal": "the same",
        "cli.views.unfit": "a search, where the layout does not fit",
        "cost.bill": "the same",
    },
    "cli/commands/profiles.py": {
        "cli.views.findings": "with --check only",
        "files.profiles.check": "with --check only",
    },
    "cli/commands/validate.py": {
        "cli.views.findings": "with --check only",
        "files.runs.check": "with --check only",
        "validate.compare.doubts": "with --check only",
    },
    "cli/commands/recommend.py": {
        "cli.resolve.goal": "where an objective, time, money or energy is asked for",
        "cli.resolve.idle": "where Slurm is asked what is idle",
        "cli.views.goal": "the same",
    },
    "cli/resolve/cluster.py": {
        "files.profiles.catalogue": "for an error only",
        "run.detect": "a survey is made where there are GPUs",
    },
    "cli/resolve/job.py": {
        "trainer.checkpoint.progress": "torch, where a checkpoint is resumed, as what follows",
        "trainer.config": "torch",
        "trainer.errors": "torch",
        "trainer.huggingface.export": "torch, where the end is exported",
        "trainer.huggingface.load": "torch, where published weights are at hand",
        "trainer.options": "torch",
    },
    "cli/resolve/model.py": {
        "files.huggingface.config": "three of four ways to name a model do without"
    },
    "cli/resolve/evidence.py": {
        "files.ledger": "sqlite, where there is a ledger",
        "files.learning": "where there are measured runs, as all that follows",
        "run.evidence": "most of run",
        "validate.learn.evidence": "most of validate",
        "validate.learn.features": "most of validate",
        "validate.learn.learner": "numpy",
        "validate.learn.peaks": "numpy",
    },
    "cli/resolve/failures.py": {
        "cli.resolve.evidence": "where there is a ledger, as what follows",
        "validate.learn.saves": "most of validate",
    },
    "cli/views/answer.py": {
        "cli.resolve.failures": "what failures leave, where that is asked, as what follows",
        "cli.views.failures": "where that is asked",
    },
    "cli/views/first_screen.py": {
        "topology.measure.settings": "where this machine has GPUs that were never measured",
        "validate.calibrate.calibrated": "the same",
    },
}
"""Module of the command line -> module of ours that it imports in a function -> why. A command is
itself imported when it is asked for, so what it needs stands at its top."""

SHARED = [name for name in trainer_sources() if name.startswith("spec/")]
"""Files of the package that a copy of the trainer has; they import nothing of ours."""

WORLDLY = {"os", "subprocess", "socket", "shutil", "tempfile", "time", "logging", "random"}
PURE_ROOMS = ("errors", "units", "spec", "cost", "search", "emit", "validate")
"""Rooms that touch nothing: no process, file, clock or log."""


def closure(room: str) -> set[str]:
    """`room`, and all rooms below it."""
    below = {room}
    for neighbour in MAY_IMPORT[room]:
        below |= closure(neighbour)
    return below


def room_of(path: Path) -> str:
    """`fsdpplan/cost/memory/peak.py` is in `cost`, `fsdpplan/errors.py` in `errors`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def type_checking_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def is_module(name: str) -> bool:
    """Whether `fsdpplan.cost.memory.peak` or `fsdpplan.cost` is a file or a folder of ours."""
    place = ROOT.joinpath(*name.split("."))
    return name.startswith("fsdpplan.") and (place.with_suffix(".py").exists() or place.is_dir())


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
            for alias in child.names:
                inner = f"{base}.{alias.name}"
                is_ours = base == "fsdpplan" or is_module(inner)
                yield (inner if is_ours else base), in_function
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
    for path in (PACKAGE / "trainer").rglob("*.py"):
        above = {m for m, _ in imports(ast.parse(path.read_text(encoding="utf-8")), path)}
        shared = {m for m in above if m.startswith("fsdpplan.") and ".trainer." not in f"{m}."}
        copied = {m.replace(".", "/") + ".py" for m in shared}
        assert copied <= {f"fsdpplan/{file}" for file in SHARED}, name(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("fsdpplan") for alias in node.names)
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not (node.module or "").startswith("fsdpplan"), name(path)


@pytest.mark.parametrize("file", SHARED)
def test_what_a_copy_of_the_trainer_shares_needs_the_standard_library_only(file: str) -> None:
    path = PACKAGE / file
    found = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()), path)}
    assert found <= sys.stdlib_module_names


def cli_imports(path: Path) -> set[tuple[str, bool]]:
    """(module of ours without `fsdpplan.`, whether the import waits) in a file."""
    found = imports(ast.parse(path.read_text(encoding="utf-8")), path)
    return {(m.removeprefix("fsdpplan."), lazy) for m, lazy in found if m.startswith("fsdpplan.")}


def cli_modules() -> list[Path]:
    return [path for path in modules() if room_of(path) == "cli" and path.parent != PACKAGE]


def dotted(path: Path) -> str:
    """`cli.views.render`, and `cli.commands` of its `__init__.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", cli_modules(), ids=name)
def test_the_command_line_imports_down(path: Path) -> None:
    part = dotted(path).split(".")[1] if path.parent.name != "cli" else path.stem
    if part == "__init__":
        assert not cli_imports(path)
        return
    for module, _ in cli_imports(path):
        room, *rest = module.split(".")
        if room != "cli" or not rest:
            continue
        among = rest[0] == part and part != "commands"
        assert among or rest[0] in CLI_MAY_IMPORT[part], f"{name(path)} may not import {module}"


def test_the_command_line_has_no_circle_of_imports_not_even_a_lazy_one() -> None:
    # Raises CycleError, which names the circle.
    order = TopologicalSorter(
        {
            dotted(path): {module for module, _ in cli_imports(path) if module.startswith("cli.")}
            for path in cli_modules()
        }
    ).static_order()
    assert "cli.app" in order


def test_the_command_line_imports_ours_at_the_top_but_where_it_says_why() -> None:
    waits = {
        str(path.relative_to(PACKAGE)): {module for module, lazy in cli_imports(path) if lazy}
        for path in cli_modules()
    }
    assert {path: found for path, found in waits.items() if found} == {
        path: reasons.keys() for path, reasons in WAITS.items()
    }


MUTUAL = {
    "run": {("engines", "follow")},
    "trainer": {
        ("model", "parallel"),
        ("numbers", "preflight"),
        ("parallel", "preflight"),
        ("parallel", "text"),
        ("parallel", "user"),
    },
    "validate": {("calibrate", "compare"), ("compare", "fit"), ("fit", "learn")},
}
"""Folders of a room that import each other; none is added."""


@pytest.mark.parametrize("room", sorted({room_of(path) for path in modules()} - {"cli"}))
def test_folders_of_a_room_import_one_way(room: str) -> None:
    pairs = set[tuple[str, str]]()
    for path in modules():
        here = path.relative_to(PACKAGE).parts
        if here[0] != room or len(here) < 3:
            continue
        for module, _ in imports(ast.parse(path.read_text(encoding="utf-8")), path):
            there = module.split(".")[1:]
            if there[:1] == [room] and (PACKAGE / room / "/".join(there[1:2])).is_dir():
                pairs.add((here[1], there[1] if len(there) > 1 else here[1]))
    both = {(one, other) for one, other in pairs if one < other and (other, one) in pairs}
    assert both == MUTUAL.get(room, set())


def test_nothing_imports_tests_or_docs() -> None:
    for path in modules():
        tops = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()), path)}
        assert not tops & {"tests", "docs"}, name(path)
