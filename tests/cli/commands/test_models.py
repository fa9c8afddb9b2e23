"""Models are listed whole, fit the screen, and each says where it is published."""

from __future__ import annotations

import json

import pytest

from fsdpplan.files.catalogue import model_names
from tests.cli.small import show


@pytest.mark.parametrize("columns", [80, 60, 50])
def test_the_list_has_every_name_and_fits_the_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = show(capsys, "models")
    assert max(map(len, out.splitlines())) <= columns
    for name in model_names():
        assert f" {name}" in out
    listed = json.loads(show(capsys, "models", "--json"))["models"]
    assert len(listed) == len(model_names())


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


def test_words_list_what_has_them_all_and_show_the_only_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = show(capsys, "models", "qwen3", "moe")
    assert [line.split()[0] for line in out.splitlines()[2:5]] == [
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "qwen3-coder-480b-a35b",
    ]
    listed = json.loads(show(capsys, "models", "qwen3", "moe", "--json"))["models"]
    assert [model["name"] for model in listed][:2] == ["qwen3-30b-a3b", "qwen3-235b-a22b"]
    assert "Source: " in show(capsys, "models", "megatron", "310b")
