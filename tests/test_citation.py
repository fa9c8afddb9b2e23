"""Files that forges read: the citation and the templates say what is true of this project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_what_the_format_requires() -> None:
    """Citation File Format 1.2.0, schema.json: required keys, and the kinds of those that stand."""
    import fsdpplan

    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    known = {"cff-version", "message", "title", "authors", "abstract", "keywords", "license"}
    assert set(citation) <= known | {"references", "type", "version", "date-released", "url", "doi"}
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    assert citation["version"] == fsdpplan.__version__
    assert citation["license"] == "Apache-2.0"
    people = [
        *citation["authors"],
        *(one for each in citation["references"] for one in each["authors"]),
    ]
    for one in people:
        assert one
        assert set(one) <= {"name", "family-names", "given-names", "orcid", "email"}
    for each in citation["references"]:
        assert {"type", "title", "authors"} <= set(each)
        assert re.fullmatch(r"https://\S+", each["url"])


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_a_form_of_fields_with_names_of_their_own(path: Path) -> None:
    form = load(path)
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(form)
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert {part["type"] for part in form["body"]} <= kinds
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    names = [part["id"] for part in fields]
    assert names
    assert len(names) == len(set(names))
    for part in fields:
        assert part["attributes"]["label"]
        assert part["type"] != "checkboxes" or part["attributes"]["options"]


def test_commands_and_files_that_templates_name_are_there() -> None:
    from typer.main import get_command

    from fsdpplan.cli.app import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for path in (*TEMPLATES, ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"):
        text = path.read_text(encoding="utf-8")
        for command, words in re.findall(r"`fsdpplan ([a-z][a-z-]*)([^`]*)`", text):
            flags = {flag for each in commands[command].params for flag in each.opts}
            assert {word for word in words.split() if word.startswith("--")} <= flags
        for place in re.findall(r"\b(?:docs|tests|hardware_profiles)/[\w./-]+\.\w+", text):
            assert (ROOT / place).exists() or "NAME" in place, place
