"""Builds the wheel and the source archive, checks what they say, and tries both where nothing else
is installed, without torch: its packages are large, and planning needs none.

    python -m tests.packages [--out dist] [--python PATH ...]     # make package
"""

from __future__ import annotations

import argparse
import email
import email.message
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAPTOP = ROOT / "tests/laptop.py"
TRIED = ("3.11", "3.12", "3.13", "3.14", "3.15")
"""Pythons that are looked for."""
NOT_IN_ARCHIVE = ("dist/", "build/")

ASK = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


def project() -> dict[str, Any]:
    """The `[project]` of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def claimed_pythons() -> list[str]:
    """Of the classifiers."""
    words = "Programming Language :: Python :: 3."
    return [f"3.{c.removeprefix(words)}" for c in project()["classifiers"] if c.startswith(words)]


def clean_environment(**more: str) -> dict[str, str]:
    """This one's, without what would let another fsdpplan be found."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | more


def run(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What a command prints. Raises RuntimeError with all that it said where it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def built(hook: str, *, source: Path, folder: Path) -> Path:
    """The wheel or archive that `build_wheel` or `build_sdist` makes of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = run(sys.executable, "-c", BUILD, hook, folder.resolve(), cwd=source).split()[-1]
    return folder / name


def unpacked(archive: Path, folder: Path) -> Path:
    """The one folder of a source archive, by tar: before 3.11.4 Python's own knows no filter, and
    later ones warn where none is given."""
    folder.mkdir(parents=True, exist_ok=True)
    run("tar", "-xzf", archive.resolve(), cwd=folder)
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


def contents(wheel: Path) -> dict[str, bytes]:
    """Path -> bytes of all files of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def metadata(wheel: Path) -> email.message.Message:
    """What a wheel says of itself."""
    found = contents(wheel)
    (name,) = (name for name in found if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(found[name])


def metadata_problems(said: email.message.Message) -> list[str]:
    """What an index would refuse or show wrongly, or is not so."""
    from markdown_it import MarkdownIt
    from trove_classifiers import classifiers

    wanted, problems = project(), []
    for name in set(said.get_all("Classifier") or []) - set(classifiers):
        problems.append(f"no such classifier: {name}")
    if said["Description-Content-Type"] != "text/markdown":
        problems.append("the description is not said to be Markdown")
    page = MarkdownIt("commonmark").enable("table").render(str(said.get_payload()))
    if "<h1>fsdpplan</h1>" not in page or "<table>" not in page:
        problems.append("the description does not render as README.md does")
    if said["License-Expression"] != "Apache-2.0" or said["License-File"] != "LICENSE":
        problems.append("the licence is missing")
    if said["Requires-Python"] != wanted["requires-python"]:
        problems.append(f"it is for Python {said['Requires-Python']}")
    needs = {need for need in said.get_all("Requires-Dist") or [] if "extra ==" not in need}
    if needs != set(wanted["dependencies"]):
        problems.append(f"it needs {sorted(needs)}")
    if set(said.get_all("Provides-Extra") or []) != set(wanted["optional-dependencies"]):
        problems.append("its extras are others")
    oldest = wanted["requires-python"].removeprefix(">=")
    if not claimed_pythons() or claimed_pythons()[0] != oldest:
        problems.append(f"the oldest Python is {oldest}, the classifiers say {claimed_pythons()}")
    return problems


def missing_from_wheel(wheel: Path, source: Path) -> list[str]:
    """Files of the package and the profiles that a wheel lacks, or has otherwise."""
    found, problems = contents(wheel), []
    folders = {"fsdpplan": "fsdpplan", "hardware_profiles": "fsdpplan/hardware_profiles"}
    for folder, inside in folders.items():
        for path in (source / folder).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            name = f"{inside}/{path.relative_to(source / folder).as_posix()}"
            if found.get(name) != path.read_bytes():
                problems.append(name)
    return problems


def tracked_files() -> list[str]:
    """Files of this checkout; none where it is no checkout."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0") if done.returncode == 0 else []
    return [name for name in names if name and (ROOT / name).exists()]


def missing_from_archive(archive: Path) -> list[str]:
    """Files of this checkout that a source archive lacks: its tests read all kinds of them."""
    with tarfile.open(archive) as opened:
        found = {name.partition("/")[2] for name in opened.getnames()}
    wanted = (name for name in tracked_files() if not name.startswith(NOT_IN_ARCHIVE))
    return [name for name in wanted if name not in found]


def pythons(given: Sequence[str] = ()) -> dict[str, Path]:
    """Version -> an interpreter that runs, of those given or those on this machine."""
    places = [Path(word) for word in given]
    if not given:
        managed = Path.home() / ".pyenv/versions"
        places = [
            *(Path(found) for v in TRIED if (found := shutil.which(f"python{v}"))),
            *sorted(managed.glob("3.*/bin/python"), reverse=True),
        ]
    found: dict[str, Path] = {}
    for place in places:
        words = [str(place), "-c", ASK]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        version = done.stdout.strip()
        if done.returncode == 0 and version in TRIED:
            found.setdefault(version, place)
    return dict(sorted(found.items(), key=lambda each: TRIED.index(each[0])))


def environment_of(python: Path, folder: Path) -> Path:
    """The interpreter of a clean environment."""
    run(python, "-m", "venv", "--clear", folder, cwd=folder.parent)
    return folder / "bin/python"


def installed(python: Path, package: Path) -> Path:
    """The program, after the one command that installs it for planning; another build of it that
    was there has made room."""
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "fsdpplan", cwd=python.parent)
    run(python, "-m", "pip", "install", "--quiet", package.resolve(), cwd=python.parent)
    return python.with_name("fsdpplan")


def as_a_laptop(python: Path, folder: Path, *words: str) -> Mapping[str, Any]:
    """What tests/laptop.py reports under this Python."""
    answer: dict[str, Any] = json.loads(
        run(python, "-P", LAPTOP, folder, *words, cwd=python.parent, COLUMNS="80")
    )
    return answer


def laptop_problems(answer: Mapping[str, Any], folder: Path) -> list[str]:
    """What planning without torch should have done otherwise."""
    problems = [f"{name} was imported" for name in answer["imported"]]
    for each in answer["commands"]:
        words, said = " ".join(each["words"]), each["err"]
        lines = [line for line in said.splitlines() if line.strip()]
        if "Traceback" in said:
            problems.append(f"{words}: {said}")
        elif each["code"] == 5 and "needs PyTorch" in said:
            # on a busy machine behind what it was at
            if "needs PyTorch" in "".join(lines[:-1]) or "pip install torch" not in lines[-1]:
                problems.append(f"{words}: not one line that says what to do: {said}")
        elif each["code"] != 0:
            problems.append(f"{words}: {each['code']}: {said}")
        if words.startswith("emit-launch --torch"):
            checked = subprocess.run(
                ["bash", "-n"], input=each["out"], capture_output=True, text=True, check=False
            )
            problems += [f"{words}: bash: {checked.stderr}"] if checked.returncode else []
    free = [each for each in answer["commands"] if each["words"][0] == "recommend"]
    if "as none is installed here" not in free[0]["out"]:
        problems.append("nobody says which torch is assumed")
    if not (folder / "fsdpplan.json").exists():
        problems.append("no plan was saved")
    return problems


def tried(version: str, python: Path, packages: Sequence[Path], folder: Path) -> list[str]:
    """Problems of these packages under one Python, each in the place of the one before."""
    inside = environment_of(python, folder / version)
    problems = []
    for package in packages:
        program = installed(inside, package)
        if "torch" in run(inside, "-m", "pip", "list", cwd=folder):
            problems.append(f"{package.name} brings torch, which planning does without")
        said = run(program, "--version", cwd=folder).strip()
        if said != f"fsdpplan {project()['version']}":
            problems.append(f"--version says {said}")
        where = folder / f"{version}-laptop"
        answer = as_a_laptop(inside, where, "--slow")
        problems += laptop_problems(answer, where)
        words = [str(program), "rehearse"]
        rehearsed = subprocess.run(
            words, cwd=where, env=clean_environment(), capture_output=True, text=True, check=False
        )
        if rehearsed.returncode != 5 or "pip install torch" not in rehearsed.stderr:
            problems.append(f"rehearse without torch: {rehearsed.stderr}")
    return problems


def type_problems(version: str) -> list[str]:
    """What mypy finds where the code is for this Python."""
    words = [sys.executable, "-m", "mypy", f"--python-version={version}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, try; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", default=[], help="in place of all found here")
    options = parser.parse_args(arguments)
    problems: list[str] = []

    def told(what: str, found: list[str]) -> None:
        print(f"{what}: {'well' if not found else ''}", flush=True)
        for problem in found:
            print(f"  - {problem}", flush=True)
        problems.extend(found)

    with tempfile.TemporaryDirectory(prefix="fsdpplan-packages-") as name:
        folder = Path(name)
        wheel = built("build_wheel", source=ROOT, folder=options.out)
        archive = built("build_sdist", source=ROOT, folder=options.out)
        again = built("build_wheel", source=unpacked(archive, folder / "source"), folder=folder)
        same = contents(wheel) == contents(again)
        told(f"{wheel.name}, metadata", metadata_problems(metadata(wheel)))
        told(f"{wheel.name}, files", missing_from_wheel(wheel, ROOT))
        told(f"{archive.name}, files", missing_from_archive(archive))
        told(f"{archive.name}, its wheel", [] if same else ["is another one"])
        found = pythons(options.python)
        for version, python in found.items():
            told(f"Python {version}", tried(version, python, (wheel, archive), folder))
        for version in claimed_pythons():
            told(f"types for Python {version}", type_problems(version))
            if version not in found and not options.python:
                print(f"Python {version} is claimed, and not here to be tried", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
