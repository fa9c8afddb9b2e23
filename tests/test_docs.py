"""Every page: links lead somewhere, blocks run or parse, generated parts are up to date.

A comment above a block, unseen by the reader, says more than its language does:

    <!-- output: COMMAND -->            a text block: what COMMAND prints (docs/generate.py)
    <!-- run -->                        a bash block: run it in an empty folder, expect exit 0
    <!-- compile only: REASON -->       a python block that cannot run here
    <!-- program: torchrun ... -->      once a page: its python blocks are one program for torchrun

Other python blocks of a page run in order in one namespace; other bash blocks must be valid bash
whose `fsdpplan` commands the program's own parser takes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GENERATED = {ROOT / "docs" / "reference" / name for name in ("cli.md", "python-api.md")}

FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
PROGRAM = re.compile(r"^<!-- program: (?P<command>torchrun .+) -->$", re.M)
LANGUAGES = {"python", "bash", "text", "json", "toml"}
NOTES = ("output: ", "run", "compile only: ")


@dataclass(frozen=True)
class Block:
    language: str
    note: str
    text: str
    line: int


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, *languages: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text_of(path)):
        line = text_of(path)[: match.start()].count("\n") + 1
        block = Block(match["language"], match["note"] or "", match["text"], line)
        if not languages or block.language in languages:
            found.append(block)
    return found


def pages_with(*languages: str) -> list[Path]:
    return [path for path in PAGES if blocks(path, *languages)]


@cache
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(path: Path) -> set[str]:
    """Names that a link may give after `#`, as GitHub makes them of headings."""
    prose = FENCE.sub("", text_of(path))
    headings = re.findall(r"^#+ (.+)$", prose, re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def commands(script: str) -> list[list[str]]:
    """The words of each `fsdpplan` command in `script`, redirections and pipes cut off; what is in
    single quotes stays whole."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        code = re.sub(r"\s#\s.*", "", line)
        for part in re.split(r"(?:[;|>]|&&|\$\(|\))(?=(?:[^']*'[^']*')*[^']*$)", code):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words[:1] == ["fsdpplan"]:
                found.append(words[1:])
    return found


def expand_variables(script: str) -> str:
    """`script` with the variables that it sets itself put in: `flags="--gpus 8"; ... $flags`."""
    for name, value in re.findall(r'^(\w+)="([^"$]*)"$', script, re.M):
        script = re.sub(rf'"?\$\{{?{name}\b\}}?"?', value, script)
    return script


@cache
def program() -> Any:
    """The command line, made once."""
    from typer.main import get_command

    from fsdpplan.cli.app import app

    return get_command(app)


def parse(words: list[str]) -> None:
    """Let the program's own parser read `words`; nothing is executed."""
    if not words or words[0].startswith("-"):
        return
    command = program().commands[words[0]]
    if "--help" not in words:
        with command.make_context(words[0], words[1:]):
            pass


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_a_page_is_short_and_its_links_lead_somewhere(path: Path) -> None:
    text = text_of(path)
    if path not in GENERATED and path.name != "CHANGELOG.md":  # which only grows
        assert text.count("\n") <= 300, "a page past 300 lines is two pages"
    assert re.match(r"# \S", text), "a page starts with its title"
    for match in LINK.finditer(FENCE.sub("", text)):
        target, _, anchor = match["target"].partition("#")
        if target.startswith(("https://", "http://")):
            continue
        goal = (path.parent / target).resolve() if target else path
        assert goal.exists(), f"{match[0]} leads nowhere"
        if anchor:
            assert anchor in anchors(goal), f"{match[0]}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_block_says_what_it_is(path: Path) -> None:
    for block in blocks(path):
        where = f"{page_id(path)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: language {block.language!r}"
        if block.note and not block.note.startswith("program: "):
            assert block.note.startswith(NOTES), f"{where}: note {block.note!r}"


@pytest.mark.parametrize("path", pages_with("bash"), ids=page_id)
def test_bash_blocks_are_valid_and_their_commands_parse(path: Path) -> None:
    for block in blocks(path, "bash"):
        check = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert check.returncode == 0, f"{page_id(path)}:{block.line}: {check.stderr}"
        for words in commands(expand_variables(block.text)):
            try:
                parse(words)
            except Exception as error:
                message = getattr(error, "format_message", lambda e=error: repr(e))()
                pytest.fail(f"{page_id(path)}:{block.line}: fsdpplan {words}: {message}")


LASTS = ("--checkpoint-dir", "--time", "--spares")
"""Options of jobs that are no trial."""
HOW_LONG = ("--steps", "--epochs", "--tokens", "--script")


@pytest.mark.parametrize("path", pages_with("bash"), ids=page_id)
def test_a_job_that_lasts_says_how_long_it_trains(path: Path) -> None:
    """Where neither the command nor a plan of the page says it, a job tries 20 steps."""
    planned: set[str] = set()
    for block in blocks(path, "bash"):
        for command, *words in filter(None, commands(expand_variables(block.text))):
            names = {word.partition("=")[0] for word in words}
            if command == "recommend":
                planned = names
            elif command in ("emit-launch", "run") and names.intersection(LASTS):
                where = f"{page_id(path)}:{block.line}"
                assert (names | planned).intersection(HOW_LONG), f"{where}: {command} {words}"


NAMED = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+)?|[\w-]+\.(?:py|toml|csv))`")
"""A path, or a file by its name alone."""

FILES_OF_OTHERS = {"my_runs.csv", "pretrain_gpt.py", "fsdpplan_torchtitan.py"}
"""Of users and of other programs."""


@cache
def places() -> frozenset[str]:
    """Files and folders of the repository that pages may name."""
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    inside = (path for top in tops if top.is_dir() for path in top.rglob("*"))
    found = (path.relative_to(ROOT).as_posix() for path in (*tops, *inside))
    return frozenset(path for path in found if "__pycache__" not in path)


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_file_that_a_page_names_exists(path: Path) -> None:
    """From the root, in the package, or in a folder that the paragraph or row names before it."""
    names = {place.rpartition("/")[2] for place in places()}
    tops = {place.removeprefix("fsdpplan/").split("/")[0] for place in places()}
    is_map = path.name == "architecture.md"
    for part in re.split(r"\n(?=\n|\||- |\d+\. )", FENCE.sub("", text_of(path))):
        here = ["", "fsdpplan"]
        for match in NAMED.findall(part):
            name, is_bare = match.rstrip("/"), "/" not in match
            if name in FILES_OF_OTHERS or not (is_map or is_bare or name.split("/")[0] in tops):
                continue
            found = [
                one
                for one in (f"{folder}/{name}".lstrip("/") for folder in here)
                if one in places() or f"{one}.py" in places()
            ]
            is_elsewhere = is_bare and not is_map and name in names
            assert found or is_elsewhere, f"{path.name}: there is no {name}"
            here += [one if (ROOT / one).is_dir() else one.rpartition("/")[0] for one in found]


@cache
def words_of_the_program() -> tuple[frozenset[str], frozenset[str]]:
    """(commands, flags of all of them)."""
    known = program().commands
    flags = {
        flag
        for command in (program(), *known.values())
        for each in command.params
        for flag in (*each.opts, *each.secondary_opts)
    }
    return frozenset(known), frozenset(flags)


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_commands_and_flags_named_in_the_text_exist(path: Path) -> None:
    known, flags = words_of_the_program()
    for code in re.findall(r"`(fsdpplan [^`]+)`", FENCE.sub("", text_of(path))):
        words = code.split()[1:]
        if re.fullmatch(r"[a-z-]+", words[0]) and not words[0].startswith("-"):
            assert words[0] in known, f"`{code}`: no such command"
        for word in words:
            if word.startswith("--") and word not in ("--help", "--help-all", "--version"):
                assert word.split("=")[0] in flags, f"`{code}`: no such flag"


@pytest.mark.parametrize("path", pages_with("json", "toml"), ids=page_id)
def test_json_and_toml_blocks_are_what_they_say(path: Path) -> None:
    from fsdpplan.files.profiles.catalogue import parse_profile

    for block in blocks(path, "json"):
        json.loads(block.text)
    for block in blocks(path, "toml"):
        parse_profile(block.text, where=f"{page_id(path)}:{block.line}")


TRAINS = re.compile(r"^(?:if )?fsdpplan run(?! --dry-run)", re.M)


def runnable_bash(*, trains: bool) -> list[Any]:
    """Marked blocks of pages that are no program; a program runs its own first."""
    return [
        pytest.param(path, block, id=f"{page_id(path)}:{block.line}")
        for path in PAGES
        if not PROGRAM.search(text_of(path))
        for block in blocks(path, "bash")
        if block.note == "run" and bool(TRAINS.search(block.text)) is trains
    ]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("path", "block"), runnable_bash(trains=False))
def test_a_marked_bash_block_runs(path: Path, block: Block, tmp_path: Path) -> None:
    result = generator().shell(block.text, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("path", "block"), runnable_bash(trains=True))
def test_a_marked_bash_block_trains(path: Path, block: Block, tmp_path: Path) -> None:
    result = generator().shell(block.text, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def programs() -> list[Path]:
    return [path for path in pages_with("python") if PROGRAM.search(text_of(path))]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "path", [path for path in pages_with("python") if path not in programs()], ids=page_id
)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    source = []
    for block in blocks(path, "python"):
        compile(block.text, f"{page_id(path)}:{block.line}", "exec")
        if not block.note.startswith("compile only: "):
            source.append(block.text)
    script = tmp_path / "page.py"
    script.write_text("\n".join(source), encoding="utf-8")
    run_python([str(script)], tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("path", programs(), ids=page_id)
def test_a_page_that_is_one_program_runs_under_torchrun(path: Path, tmp_path: Path) -> None:
    for block in blocks(path, "bash"):
        if block.note == "run":
            prepared = generator().shell(block.text, tmp_path)
            assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    script = tmp_path / "page.py"
    script.write_text("\n".join(b.text for b in blocks(path, "python")), encoding="utf-8")
    match = PROGRAM.search(text_of(path))
    assert match is not None
    words = shlex.split(match["command"])[1:]
    run_python(["-m", "torch.distributed.run", "--standalone", *words, str(script)], tmp_path)


def run_python(arguments: list[str], folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_the_json_pages_name_every_key_that_recommend_prints(tmp_path: Path) -> None:
    command = "fsdpplan recommend --params 1e9 --gpus 16 --hardware dgx-h100 --json"
    answer = json.loads(generator().shell(command, tmp_path).stdout)
    reference = ROOT / "docs" / "reference"
    page = "".join(text_of(reference / name) for name in ("json.md", "nouns-json.md"))
    estimate = answer["plans"][0]["estimate"]
    for document in (
        *(answer, answer["search"], answer["plans"][0], answer["plans"][0]["layout"]),
        *(estimate, estimate["step_seconds"], estimate["time"], estimate["memory"]),
        *(*estimate["communication"][:1], answer["model"], answer["training"], answer["cluster"]),
    ):
        for key in document:
            assert re.search(rf"[`\"{{ ]{key}[`\",}}]", page), f"no page names {key}"


def test_the_page_on_the_jobs_script_leaves_no_line_out(tmp_path: Path) -> None:
    page = ROOT / "docs/explanation/job-script.md"
    first, *pieces = (block for block in blocks(page, "text") if block.note.startswith("output: "))
    assert generator().shell(first.note.removeprefix("output: "), tmp_path).returncode == 0
    script = (tmp_path / "script").read_text(encoding="utf-8")
    shown = "".join(piece.text for piece in pieces if piece.note.endswith(" script"))
    assert list(filter(None, shown.split("\n"))) == list(filter(None, script.split("\n")))


def test_the_guide_to_fitting_types_what_make_does() -> None:
    makefile = text_of(ROOT / "Makefile")
    recipes = [
        re.search(rf"^{name}: .*\n((?:\t.*\n)+)", makefile, re.M) for name in ("fit", "docs")
    ]
    made = "".join(recipe[1] for recipe in recipes if recipe).replace("\t$(BIN)/", "")
    made = re.sub(r"^\ttest -z .*\n", "", made, flags=re.M)  # rows of one's own join before
    typed = next(
        block.text
        for block in blocks(ROOT / "docs" / "guides" / "refit.md", "bash")
        if "validate.fit.kernels" in block.text
    )
    assert [line.partition("#")[0].strip() for line in typed.splitlines()] == made.splitlines()


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if re.search(r"^<!-- (output|fields|configs): ", text_of(path), re.M)]
    + sorted(GENERATED),
    ids=page_id,
)
def test_generated_parts_are_up_to_date(path: Path) -> None:
    assert generator().written_page(path) == text_of(path), "stale: run `make docs`"
