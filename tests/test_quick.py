"""What `make quick` runs of a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import ROOT, asked_by, chosen, main, touched

MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "fsdpplan").rglob("*.py"))


def test_a_module_asks_for_the_tests_of_its_name_and_of_those_that_import_it() -> None:
    found = asked_by(Path("fsdpplan/cost/network/collectives.py"))
    assert Path("tests/cost/network/test_collectives.py") in found
    assert Path("tests/test_imports.py") in found
    assert all(path.parts[1] in ("cost", "test_imports.py") for path in found)


def test_every_test_that_is_asked_for_exists() -> None:
    assert all((ROOT / test).is_file() for test in chosen(MODULES))


def test_a_removed_test_is_not_asked_for() -> None:
    assert asked_by(Path("tests/cost/test_nothing.py")) == set()


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("tests/cost/test_band.py", "tests/cost/test_band.py"),
        ("docs/explanation/memory.md", "tests/test_docs.py"),
        ("hardware_profiles/physics.toml", "tests/files/profiles/test_catalogue.py"),
    ],
)
def test_what_is_no_module_asks_for_its_own(path: str, test: str) -> None:
    assert asked_by(Path(path)) == {Path(test)}


def test_an_unknown_commit_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match="name a commit that is here"):
        touched("no-such-commit")


def test_nothing_touched_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.quick.touched", lambda base: [])
    assert main(["--base", "HEAD"]) == 0
    assert "nothing that is tested differs" in capsys.readouterr().out
