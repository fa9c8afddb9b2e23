"""The shape of the house, counted.

    python tests/benchmarks/shape.py [CHECKOUT]

Files and lines of each room; folders with the most files; signatures that are given three or more
of the nouns (model, cluster, training, layout, stage) by hand; `type: ignore`; imports of our own
modules inside functions; the modules of ours outside `cli/` that one `estimate` executes; the
fields of a layout that many modules of `cost/` and `search/` read; the places where an option of
the trainer is declared; and names that several classes have.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
NOUNS = {"model", "cluster", "training", "layout", "stage"}
CROWDED = 16
"""A folder of more files than this is shown."""

MOST_READERS = 12
"""A field of a layout that more modules read is shown."""

ESTIMATE = """\
import sys
sys.argv = ["fsdpplan", "estimate", "--params", "7e9", "--gpus", "8", "--dp-shard", "8",
            "--no-ledger", "--json"]
from fsdpplan.cli import app
try:
    app.main()
except SystemExit:
    pass
print(*(name for name in sys.modules if name.startswith("fsdpplan")), file=sys.stderr)
"""


def sources(package: Path) -> Iterator[tuple[Path, str]]:
    """Each module, as a path below the package, with its text."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package), path.read_text(encoding="utf-8")


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of the parameters of a function."""
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def crowded_signatures(text: str) -> int:
    """Functions that are given three or more of the nouns by hand."""
    return sum(
        len(arguments(node) & NOUNS) >= 3
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def lazy_imports(text: str) -> int:
    """Import statements inside functions that name our own modules."""
    found = set()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").startswith("fsdpplan")
            ):
                found.add(node.lineno)
    return len(found)


def layout_readers(package: Path) -> Counter[str]:
    """Modules of `cost/` and `search/` that read each field of what they call a layout."""
    (layout,) = (
        node
        for node in ast.parse((package / "spec/layout.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "Layout"
    )
    fields = {
        node.target.id
        for node in layout.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    readers = Counter[str]()
    for path, text in sources(package):
        if path.parts[0] in ("cost", "search"):
            readers.update(
                {
                    node.attr
                    for node in ast.walk(ast.parse(text))
                    if isinstance(node, ast.Attribute)
                    and node.attr in fields
                    and ast.unparse(node.value).split(".")[-1] == "layout"
                }
            )
    return readers


def option_places(package: Path) -> Counter[str]:
    """Where the trainer's options are declared: fields of classes, and calls that add a flag."""
    parsed = {
        path: ast.parse(text)
        for path, text in sources(package)
        if path.parts[0] in ("emit", "trainer") or path.name == "trainer_options.py"
    }
    fields = {
        path: [
            node.target.id
            for each in ast.walk(tree)
            if isinstance(each, ast.ClassDef)
            for node in each.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        for path, tree in parsed.items()
    }
    options = set(fields[Path("trainer/options.py")]) | set(fields[Path("trainer/optimizer.py")])
    declared = [
        path
        for path in fields
        if Path("trainer/options.py") == path
        or path.name in ("trainer_options.py", "trainer_program.py", "optimizer.py")
    ]
    places = Counter(name for path in declared for name in fields[path] if name in options)
    flags = (
        str(node.args[0].value)
        for node in ast.walk(parsed[Path("trainer/options.py")])
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    )
    places.update(name for flag in flags if (name := flag.strip("-").replace("-", "_")) in options)
    return places


def shared_class_names(package: Path) -> list[str]:
    """Public names that classes of several modules have."""
    names = Counter(
        node.name
        for _, text in sources(package)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


def executed(root: Path) -> list[str]:
    """Modules of ours outside `cli/` that one `estimate` executes; those of a package's own text
    alone are not counted."""
    told = subprocess.run(
        [sys.executable, "-c", ESTIMATE],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    names = told.stderr.splitlines()[-1].split()
    packages = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name not in packages and ".cli." not in name]


def main() -> None:
    """Print the counts of a checkout, this one if none is named."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    files, lines, folders = Counter[str](), Counter[str](), Counter[str]()
    signatures, ignores, lazy = Counter[str](), Counter[str](), Counter[str]()
    for path, text in sources(root / "fsdpplan"):
        room = path.parts[0]
        files[room] += 1
        lines[room] += text.count("\n")
        folders[path.parent.as_posix()] += path.name != "__init__.py"
        signatures[room] += crowded_signatures(text)
        ignores[room] += text.count("type: ignore")
        lazy[room] += lazy_imports(text)
    columns = ("files", "lines", "3 nouns", "ignores", "lazy")
    print(f"{'room':<14}" + "".join(f"{column:>9}" for column in columns))
    for room in sorted(files, key=lambda room: -lines[room]):
        counts = (files[room], lines[room], signatures[room], ignores[room], lazy[room])
        print(f"{room:<14}" + "".join(f"{count:>9,}" for count in counts))
    sums = [each.total() for each in (files, lines, signatures, ignores, lazy)]
    print(f"{'all':<14}" + "".join(f"{total:>9,}" for total in sums))
    print("\nfolders of more than", CROWDED, "modules:", end=" ")
    print(", ".join(f"{f} {n}" for f, n in folders.most_common() if n > CROWDED) or "none")
    print("modules outside cli/ that one estimate executes:", len(executed(root)))
    print("fields of a layout read in more than", MOST_READERS, "modules of cost/ and search/:")
    many = layout_readers(root / "fsdpplan").most_common()
    print("  " + (", ".join(f"{f} {n}" for f, n in many if n > MOST_READERS) or "none"))
    places = option_places(root / "fsdpplan")
    most = ", ".join(f"{name} {count}" for name, count in places.most_common(3))
    print(f"declarations of the trainer's {len(places)} options: {places.total()}; most: {most}")
    shared = shared_class_names(root / "fsdpplan")
    print(f"names that several public classes have: {len(shared)}: {', '.join(shared)}")


if __name__ == "__main__":
    main()
