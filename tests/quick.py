"""Quick: the tests of what a change touched; `make quick`.

    python -m tests.quick                  # what differs from main, committed or not
    python -m tests.quick --base HEAD~3

Of a module those of its own name, and those of its room that import it; of a test itself; of a page
what all pages have in common. Of each matrix five cases are taken, and none that starts processes:
`make test` has them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = "a_page_is or block_says or bash_blocks_are or commands_and or json_and"
"""Tests of pages that run nothing."""


def touched(base: str, *, root: Path = ROOT) -> list[Path]:
    """Files, from the root, that differ from `base` or are new."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(
                f"quick: git {' '.join(arguments)}: {done.stderr.strip()}; name a commit that is "
                "here: python -m tests.quick --base HEAD~1"
            )
        return done.stdout.splitlines()

    names = git("diff", "--name-only", base, "--")
    names += git("ls-files", "--others", "--exclude-standard")
    return [Path(name) for name in dict.fromkeys(names)]


def asked_by(path: Path, *, root: Path = ROOT) -> set[Path]:
    """Files of tests, from the root, that a change of `path` asks for."""
    parts = path.parts
    if parts[0] == "tests":
        is_test = path.name.startswith("test_") and path.suffix == ".py"
        return {path} if is_test and (root / path).exists() else set()
    if parts[0] == "hardware_profiles":
        return {Path("tests/files/profiles/test_catalogue.py")}
    if path.suffix == ".md":
        return {Path("tests/test_docs.py")}
    if parts[0] != "fsdpplan" or path.suffix != ".py":
        return set()
    room = root / "tests" / (parts[1] if len(parts) > 2 else "")
    module = re.escape(".".join(path.with_suffix("").parts))
    imports = re.compile(rf"^(from {module} import|import {module}\b)", re.MULTILINE)
    beside = room.rglob("test_*.py") if len(parts) > 2 else room.glob("test_*.py")
    found = {
        test.relative_to(root)
        for test in beside
        if test.stem == f"test_{path.stem}" or imports.search(test.read_text())
    }
    return found | {Path("tests/test_imports.py")}


def chosen(paths: Iterable[Path], *, root: Path = ROOT) -> list[str]:
    """Files of tests for all of `paths`, in a fixed order."""
    found = {test for path in paths for test in asked_by(path, root=root)}
    return sorted(str(test) for test in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; the exit status is pytest's."""
    parser = argparse.ArgumentParser(description="Run the tests of what a change touched.")
    parser.add_argument("--base", default="main", help="the commit to compare with")
    parser.add_argument("--list", action="store_true", help="print the files only")
    options = parser.parse_args(arguments)
    tests = chosen(touched(options.base))
    print(
        "\n".join(tests) if tests else f"quick: nothing that is tested differs from {options.base}"
    )
    if options.list or not tests:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--few"]
    only = f"not test_docs or {PAGES}"
    return subprocess.run(
        [*command, "-m", "not gloo and not slurm and not gpu", "-k", only, *tests],
        cwd=ROOT,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
