"""Write the parts of the documentation that come from the program itself.

    python docs/generate.py            # or: make docs

* `docs/reference/cli.md`: all commands and options, from the Typer app.
* Every fenced block under a comment `<!-- output: COMMAND -->`: what COMMAND prints on stdout. The
  commands of one page run in order in one empty folder, at 80 columns.
* Every table under a comment `<!-- fields: MODULE CLASS [PROPERTY ...] -->`: the fields of a
  dataclass with their types and docstrings, and the properties named.
* Every table under a comment `<!-- torch: NAME -->`: see `docs/torch_table.py`.
* Every table under a comment `<!-- held out: NAME -->`: see `docs/held_out_table.py`.
* Every table under a comment `<!-- field rules: NAME -->`: see `docs/field_rules_table.py`.
* Every table under a comment `<!-- configs: NAME -->`: see `docs/configs_table.py`.
* `docs/reference/schemas/`: JSON Schemas, see `docs/json_schemas.py`.
* `docs/reference/python-api.md`: all public names, see `docs/python_api.py`.
* Every list under a comment `<!-- pages: NAME ... -->`: see `docs/page_index.py`.

`tests/test_docs.py` fails when a page differs from what this writes.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
API_PAGE = ROOT / "docs" / "reference" / "python-api.md"
OUTPUT = re.compile(
    r"^<!-- output: (?P<command>[^\n]+) -->\n```text\n(?P<text>.*?)^```$", re.M | re.S
)

FIELDS = re.compile(r"^<!-- fields: (?P<arguments>.+) -->\n(?P<table>(?:^\|.*\n)*)", re.M)

TABLE = re.compile(
    r"^<!-- (?P<of>torch|held out|field rules|configs): (?P<name>\w+) -->\n"
    r"(?P<table>(?:^\|.*\n)*)",
    re.M,
)

CLI_HEAD = """# Commands

<!-- about: The help of every command. -->

Generated from the program by `make docs`. What `--json` prints is in [the JSON page](json.md), exit
codes are in [the errors page](errors.md).
"""


PLANNING = ("recommend", "estimate", "explain", "what-if", "compare", "sweep", "replan", "check")
PLANNING += ("diff", "emit-launch", "models", "profiles", "validate", "learn", "ledger")
"""Commands that start no processes and keep nothing: they may share one."""

PLAIN = re.compile(
    r"fsdpplan (?P<command>[a-z-]+)[^|&;<>$`#\n]*(?P<told>2>&1)? *"
    r"(?:> ?(?P<file>[\w.-]+)|\| (?P<filter>(?:sed|head|tail|grep) (?:(?!fsdpplan ).)+))? *"
    r"(?P<may_fail>\|\| true)?"
)
"""A command that is the same with a shell and without; what comes behind a pipe is the shell's."""


QUIET_SECONDS = 3600.0
"""What a slow machine was at is no part of an answer."""

RUN = f"""\
import runpy
from fsdpplan.cli import working
working.QUIET_SECONDS = {QUIET_SECONDS}
runpy.run_module('fsdpplan', run_name='__main__', alter_sys=True)"""


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder` by bash, where `fsdpplan` is this checkout's; what are commands of
    its own only run in this process, which has started it already."""
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    # What is printed must not depend on the GPUs of the machine that prints it, nor on past runs.
    same = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""}
    same["FSDPPLAN_LEDGER"] = str(tools / "ledger.sqlite")
    lines = [line for line in command.replace("\\\n", " ").splitlines() if line.strip()]
    plain = [PLAIN.fullmatch(line.strip()) for line in lines]
    if all(one is not None and (one["command"] in PLANNING or "--help" in one[0]) for one in plain):
        return _here([one for one in plain if one is not None], folder, same)
    program = tools / "fsdpplan"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -c "{RUN}" "$@"\n')
    program.chmod(0o755)
    search = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": search, **same},
        capture_output=True,
        text=True,
        timeout=600,
    )


def _here(
    commands: list[re.Match[str]], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run commands of fsdpplan one after another until one fails, as bash would."""
    from fsdpplan.cli import working
    from fsdpplan.cli.app import exit_code_of

    working.QUIET_SECONDS = QUIET_SECONDS
    said, told, code = io.StringIO(), io.StringIO(), 0
    before, place = dict(os.environ), Path.cwd()
    try:
        os.environ.update(environment)
        os.chdir(folder)
        for command in commands:
            out = io.StringIO()
            with redirect_stdout(out), redirect_stderr(out if command["told"] else told):
                code = exit_code_of(_words(command))
            if command["may_fail"] or (command["filter"] or "").endswith("|| true"):
                code = 0
            if command["file"]:
                Path(command["file"]).write_text(out.getvalue(), encoding="utf-8")
            elif command["filter"]:
                shown = ["bash", "-c", command["filter"]]
                said.write(subprocess.check_output(shown, input=out.getvalue(), text=True))
            else:
                said.write(out.getvalue())
            if code:
                break
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)
    return subprocess.CompletedProcess(
        [match[0] for match in commands], code, said.getvalue(), told.getvalue()
    )


def _words(command: re.Match[str]) -> list[str]:
    """The words behind `fsdpplan`, before what the shell does with its output."""
    ends = [command.start(name) for name in ("told", "file", "filter", "may_fail") if command[name]]
    text = command.string[command.start() : min(ends, default=command.end())]
    return shlex.split(text.rstrip("|> "))[1:]


def outputs(page: str, folder: Path) -> str:
    """`page` with the text of each output block as the program prints it now."""

    def block(match: re.Match[str]) -> str:
        result = shell(match["command"], folder)
        if result.returncode:
            raise SystemExit(f"{match['command']}: exit {result.returncode}\n{result.stderr}")
        text = "\n".join(line.rstrip() for line in result.stdout.rstrip("\n").splitlines())
        return f"<!-- output: {match['command']} -->\n```text\n{text}\n```"

    return OUTPUT.sub(block, page)


def cli_page() -> str:
    """The help of every command."""
    from fsdpplan.cli.commands import SUMMARIES

    with tempfile.TemporaryDirectory() as folder:
        top = shell("fsdpplan --help", Path(folder)).stdout
        names = list(SUMMARIES)
        sections = [f"```text\n{top.rstrip()}\n```\n"]
        for name in names:
            text = shell(f"fsdpplan {name} --help-all", Path(folder)).stdout.rstrip()
            sections.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join([CLI_HEAD, *sections])


@cache
def parsed(module: str) -> ast.Module:
    """The source of a module of fsdpplan, `spec/plan`."""
    return ast.parse((ROOT / "fsdpplan" / f"{module}.py").read_text(encoding="utf-8"))


def documented_fields(module: str, name: str, properties: list[str]) -> list[tuple[str, str, str]]:
    """(name, type, docstring) of the fields of class `name`, then of `properties`."""
    tree = parsed(module)
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    rows = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            told = str(text.value) if isinstance(text, ast.Constant) else ""
            rows.append((node.target.id, ast.unparse(node.annotation), told))
        elif isinstance(node, ast.FunctionDef) and node.name in properties:
            told, returns = ast.get_docstring(node) or "", ast.unparse(node.returns or ast.Tuple())
            rows.append((node.name, returns, told))
    return rows


def field_tables(page: str) -> str:
    """`page` with the tables of fields as the code has them now."""

    def table(match: re.Match[str]) -> str:
        module, name, *properties = match["arguments"].split()
        lines = ["| field | type | meaning |", "|---|---|---|"]
        for field, kind, told in documented_fields(module, name, properties):
            cells = (f"`{field}`", f"`{kind}`".replace("|", "\\|"), " ".join(told.split()))
            lines.append("| " + " | ".join(cells) + " |")
        return f"<!-- fields: {match['arguments']} -->\n" + "".join(f"{line}\n" for line in lines)

    return FIELDS.sub(table, page)


def tables(page: str) -> str:
    """`page` with the tables of what each release of torch has, and of errors, as they are now."""
    from docs.configs_table import configs_table
    from docs.field_rules_table import field_rules_table
    from docs.held_out_table import held_out_table
    from docs.torch_table import torch_table

    lines_of = {"torch": torch_table, "held out": held_out_table}
    lines_of |= {"field rules": field_rules_table, "configs": configs_table}

    def table(match: re.Match[str]) -> str:
        lines = [f"<!-- {match['of']}: {match['name']} -->", *lines_of[match["of"]](match["name"])]
        return "".join(f"{line}\n" for line in lines)

    return TABLE.sub(table, page)


def written_page(path: Path) -> str:
    """What `path` should hold."""
    if path == CLI_PAGE:
        return cli_page()
    if path == API_PAGE:
        from docs.python_api import api_page

        return api_page()
    from docs.page_index import page_lists

    page = tables(field_tables(path.read_text(encoding="utf-8")))
    page = page_lists(page, path.parent)
    with tempfile.TemporaryDirectory() as folder:
        return outputs(page, Path(folder))


def main() -> None:
    """Write every page and schema that differs."""
    from docs.json_schemas import schema_texts

    wanted = {path: written_page(path) for path in sorted({*PAGES, CLI_PAGE, API_PAGE})}
    for path, new in {**wanted, **schema_texts()}.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
