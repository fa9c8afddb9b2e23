"""The wheel, the editable install and the source archive carry what they must."""

from __future__ import annotations

import re
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packages import (
    ROOT,
    as_a_laptop,
    built,
    claimed_pythons,
    contents,
    laptop_problems,
    metadata,
    metadata_problems,
    missing_from_archive,
    missing_from_wheel,
    project,
    run,
    unpacked,
)

PROFILES = {path.name for path in (ROOT / "hardware_profiles").glob("*.toml")}

LIST_PROFILES = """
import fsdpplan
from fsdpplan.files.profiles.catalogue import profiles_folder
print(fsdpplan.__file__)
print(profiles_folder())
print(*sorted(path.name for path in profiles_folder().glob("*.toml")))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that the project is built from, so that a build dirties nothing."""
    folder = tmp_path_factory.mktemp("source")
    names = ("fsdpplan", "hardware_profiles", "pyproject.toml", "README.md", "LICENSE")
    run("cp", "-r", *names, folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("build_wheel", source=source, folder=tmp_path_factory.mktemp("wheel"))


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


def test_the_wheel_finds_its_own_profiles_and_plans_where_torch_is_not(
    wheel: Path, bare_python: Callable[[Path], Path], tmp_path: Path
) -> None:
    python = bare_python(wheel)
    where, folder, names = run(python, "-c", LIST_PROFILES, cwd=tmp_path).splitlines()
    assert Path(folder) == Path(where).parent / "hardware_profiles"
    assert Path(where).is_relative_to(python.parent.parent)
    assert set(names.split()) == PROFILES
    # As on a Mac; the torch of this environment is hidden.
    laptop = as_a_laptop(python, tmp_path / "laptop", "--without", "torch", "--mac")
    assert laptop_problems(laptop, tmp_path / "laptop") == []
    assert {each["code"] for each in laptop["commands"]} == {0, 5}, "some plan, some need torch"


def test_the_editable_install_finds_the_profiles_beside_the_package(
    bare_python: Callable[[Path], Path], source: Path, tmp_path: Path
) -> None:
    python = bare_python(built("build_editable", source=source, folder=tmp_path))
    where, folder, names = run(python, "-c", LIST_PROFILES, cwd=tmp_path).splitlines()
    assert Path(where) == source / "fsdpplan" / "__init__.py"
    assert Path(folder) == source / "hardware_profiles"
    assert set(names.split()) == PROFILES


def test_the_wheel_says_what_it_is_and_has_all_of_the_package(wheel: Path, source: Path) -> None:
    found = contents(wheel)
    info = next(name for name in found if name.endswith("METADATA")).rpartition("/")[0]
    assert "fsdpplan/py.typed" in found
    assert f"{info}/licenses/LICENSE" in found
    assert "fsdpplan = fsdpplan.__main__:main" in found[f"{info}/entry_points.txt"].decode()
    assert {name.split("/")[0] for name in found} == {"fsdpplan", info}
    assert metadata_problems(metadata(wheel)) == []
    assert missing_from_wheel(wheel, source) == []
    assert not [name for name in found if "__pycache__" in name]
    assert len({name.lower() for name in found}) == len(found), "a Mac takes these for one"


def test_the_source_archive_builds_the_same_wheel_and_has_what_its_tests_read(
    wheel: Path, tmp_path: Path
) -> None:
    archive = built("build_sdist", source=ROOT, folder=tmp_path)
    there = unpacked(archive, tmp_path / "source")
    again = built("build_wheel", source=there, folder=tmp_path / "again")
    assert contents(again) == contents(wheel)
    assert missing_from_archive(archive) == []


def test_torch_comes_with_the_extra_that_trains_and_with_no_other_word() -> None:
    extras, page = project()["optional-dependencies"], ROOT / "docs/guides/install.md"
    needs = [re.split(r"[<>=]", name)[0] for name in project()["dependencies"]]
    assert "torch" not in needs
    assert [re.split(r"[<>=]", name)[0] for name in extras["train"]] == ["torch"]
    assert all("fsdpplan[train]" in extras[name] for name in ("dev", "float8"))
    commands = re.findall(r"^pip install (\S+)$", page.read_text(encoding="utf-8"), re.M)
    assert {".", "'.[train]'"} <= set(commands)
    assert claimed_pythons() == ["3.11", "3.12", "3.13"]


def test_the_constraints_pin_every_dependency_and_no_local_build() -> None:
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            distribution, _, version = line.partition("==")
            pinned[distribution.lower().replace("_", "-")] = version
    assert all(version and "+" not in version for version in pinned.values())
    extras = project()["optional-dependencies"]
    for requirement in (*project()["dependencies"], *extras["train"], *extras["dev"]):
        if requirement == "fsdpplan[train]":
            continue
        assert requirement.partition(">=")[0].lower() in pinned, requirement
