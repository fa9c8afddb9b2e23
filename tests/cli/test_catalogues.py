"""The catalogues are listed whole, fit the screen, and every number shown has its source."""

from __future__ import annotations

import json

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.catalogue import model_names
from fsdpplan.files.profiles import profile_names


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """stdout of a command that succeeds."""
    assert exit_code_of(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 50])
@pytest.mark.parametrize("command", ["profiles", "models"])
def test_a_list_has_every_name_and_fits_the_screen(
    command: str,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = show(capsys, command)
    assert max(map(len, out.splitlines())) <= columns
    for name in profile_names() if command == "profiles" else model_names():
        assert f" {name}" in out
    listed = json.loads(show(capsys, command, "--json"))[command]
    assert len(listed) == len(profile_names() if command == "profiles" else model_names())


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_shows_the_source_of_each_number(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = show(capsys, "profiles", name)
    assert "Sources" in out
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads(show(capsys, "profiles", name, "--json"))
    assert document["name"] == name
    assert document["sources"]


@pytest.mark.parametrize("name", model_names())
def test_a_model_shows_where_it_is_published(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Source: " in show(capsys, "models", name)
    document = json.loads(show(capsys, "models", name, "--json"))
    assert document["name"] == name
    assert 0 < document["active_parameters"] <= document["parameters"]
    assert (document["active_parameters"] == document["parameters"]) is not bool(
        document["experts"]
    )
    assert "Hugging Face" in document["source"] or "arXiv" in document["source"]


def test_the_list_tells_total_and_active_parameters_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = {line.split()[0]: line for line in show(capsys, "models").splitlines()}
    assert "46.7 B  12.9 B" in lines["mixtral-8x7b"]
    assert "8.03 B     all" in lines["llama-3.1-8b"]
