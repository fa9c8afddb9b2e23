"""Notes of a release are its section of the changelog, and fit its version and date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.packages import ROOT, project

CHANGELOG = """# Changelog

Head.

## Unreleased

- later

## 1.1.0 (2026-03-02)

- new ([guide](docs/guides/x.md)), [site](https://semver.org)

## 1.0.0 (2026-01-01)

- old
"""


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / "docs/release_notes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notes(version: str, changelog: str = CHANGELOG, **more: str) -> str:
    text: str = tool().release_notes(changelog, version, **{"declared": version, **more})
    return text


def test_they_are_the_section_with_links_that_lead_somewhere() -> None:
    assert notes("1.1.0") == (
        "# fsdpplan 1.1.0\n\nReleased 2026-03-02.\n\n- new (guide), [site](https://semver.org)\n"
    )
    assert "[guide](https://host/me/x/docs/guides/x.md)" in notes(
        "1.1.0", base="https://host/me/x/"
    )
    assert notes("1.0.0").endswith("- old\n")


@pytest.mark.parametrize(
    ("version", "changed", "said"),
    [
        ("1.2.0", {}, "has no section 1.2.0: name the unreleased one so"),
        ("1.1.0", {"declared": "1.2.0"}, "pyproject.toml says version 1.2.0, not 1.1.0"),
        ("1.1.0", {"changelog": CHANGELOG.replace(" (2026-03-02)", "")}, "has no date"),
        ("1.1.0", {"changelog": CHANGELOG.replace("2026-03-02", "2025-03-02")}, "a later release"),
        ("1.0.0", {"changelog": CHANGELOG.replace("- old", "")}, "is empty: say what is new"),
    ],
)
def test_what_does_not_fit_is_refused(version: str, changed: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        notes(version, **changed)


def test_the_newest_release_of_this_changelog_has_its_notes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\d\S*)", changelog, re.M)[0]
    assert newest == project()["version"], "a released version is the declared one"
    tool().main([newest])
    assert capsys.readouterr().out.startswith(f"# fsdpplan {newest}\n\nReleased 20")
    with pytest.raises(SystemExit, match=r"release notes: pyproject\.toml says"):
        tool().main(["0.0.1"])
    assert Path(ROOT / "docs/release_notes.py").is_file()
