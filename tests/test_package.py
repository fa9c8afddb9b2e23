"""The wheel, the editable install and the source archive carry what they must."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROFILES = {path.name for path in (ROOT / "hardware_profiles").glob("*.toml")}

LIST_PROFILES = """
import fsdpplan
from fsdpplan.files.profiles.catalogue import profiles_folder
print(fsdpplan.__file__)
print(profiles_folder())
print(*sorted(path.name for path in profiles_folder().glob("*.toml")))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that the project is built from, so that a build dirties nothing."""
    folder = tmp_path_factory.mktemp("source")
    names = ("fsdpplan", "hardware_profiles", "pyproject.toml", "README.md", "LICENSE")
    run("cp", "-r", *names, folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def build(source: Path) -> Callable[[str, Path], Path]:
    def build(hook: str, folder: Path) -> Path:
        code = f"from hatchling import build; print(build.{hook}({str(folder)!r}))"
        return folder / run(sys.executable, "-c", code, cwd=source).split()[-1]

    return build


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A Python that sees this one's packages, and a wheel installed in front of them."""

    def install(wheel: Path) -> Path:
        folder = tmp_path_factory.mktemp("venv")
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", python)
        run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
        site = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder)
        packages = [path for path in sys.path if path.endswith("-packages")]
        # After the wheel's own .pth file, which sorts before this one's name.
        Path(site.strip(), "zz_shared.pth").write_text("\n".join(packages) + "\n")
        return python

    return install


def test_the_wheel_finds_its_own_profiles(
    build: Callable[[str, Path], Path],
    bare_python: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    python = bare_python(build("build_wheel", tmp_path))
    where, folder, names = run(python, "-c", LIST_PROFILES, cwd=tmp_path).splitlines()
    assert Path(folder) == Path(where).parent / "hardware_profiles"
    assert Path(where).is_relative_to(python.parent.parent)
    assert set(names.split()) == PROFILES


def test_the_editable_install_finds_the_profiles_beside_the_package(
    build: Callable[[str, Path], Path],
    bare_python: Callable[[Path], Path],
    source: Path,
    tmp_path: Path,
) -> None:
    python = bare_python(build("build_editable", tmp_path))
    where, folder, names = run(python, "-c", LIST_PROFILES, cwd=tmp_path).splitlines()
    assert Path(where) == source / "fsdpplan" / "__init__.py"
    assert Path(folder) == source / "hardware_profiles"
    assert set(names.split()) == PROFILES


def test_the_wheel_is_typed_licensed_and_brings_the_command(
    build: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(build("build_wheel", tmp_path)) as wheel:
        names = wheel.namelist()
        info = next(name for name in names if name.endswith("METADATA")).rpartition("/")[0]
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        scripts = wheel.read(f"{info}/entry_points.txt").decode()
    assert "fsdpplan/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "fsdpplan = fsdpplan.__main__:main" in scripts
    assert {name.split("/")[0] for name in names} == {"fsdpplan", info}


def test_the_source_archive_builds_the_same_wheel(
    build: Callable[[str, Path], Path], source: Path, tmp_path: Path
) -> None:
    run("tar", "-xzf", build("build_sdist", tmp_path), cwd=tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    code = f"from hatchling import build; print(build.build_wheel({str(tmp_path)!r}))"
    again = tmp_path / run(sys.executable, "-c", code, cwd=unpacked).split()[-1]
    (tmp_path / "first").mkdir()
    first = build("build_wheel", tmp_path / "first")
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_the_constraints_pin_every_dependency_and_no_local_build() -> None:
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            distribution, _, version = line.partition("==")
            pinned[distribution.lower().replace("_", "-")] = version
    assert all(version and "+" not in version for version in pinned.values())
    declared = run(
        sys.executable,
        "-c",
        "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project'];"
        "print(*p['dependencies'], *p['optional-dependencies']['dev'])",
        cwd=ROOT,
    )
    for requirement in declared.split():
        assert requirement.partition(">=")[0].lower() in pinned, requirement
