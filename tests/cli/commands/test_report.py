"""`report`: a saved plan as one page."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import answer, words
from tests.schemas import obeys

RECORDED = Path(__file__).parents[2] / "recordings" / "0.2.0" / "plans"


@pytest.fixture(autouse=True)
def in_a_folder_with_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(RECORDED / "pipeline.json", "fsdpplan.json")
    shutil.copy(RECORDED / "offload.json", "other.json")


def test_it_writes_one_page_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["report", "--quick"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "wrote report.html, 1." in err
    assert set(os.listdir()) == {"fsdpplan.json", "other.json", "report.html"}
    assert "from fsdpplan.json" in page
    document = answer(capsys, *words("report other.json --quick --out there.html"))
    obeys("report", document)
    assert document["bytes"] == Path("there.html").stat().st_size
    names = [one["name"] for one in document["sections"]]
    assert names[0] == "summary"
    assert "schedule" not in names
    assert document["out"] == "there.html"


def test_the_page_goes_to_stdout_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words("report --plan other.json --quick --out -")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("<!doctype html>")
    assert out.rstrip().endswith("</html>")
    assert err == ""
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("report nothing.json", "nothing.json"),
        ("report other.json --plan fsdpplan.json", "leave one of them out"),
        ("report --out - --json", "leave one of them out"),
        ("report --out .", "a folder, not a file"),
        ("report --out gone/report.html", "choose another --out"),
        ("report --format pdf", "there is no option --format"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    assert exit_code_of(words(given)) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert ("--json" in given) == out.startswith('{\n  "error"')
    assert set(os.listdir()) == {"fsdpplan.json", "other.json"}


def test_a_damaged_plan_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    Path("fsdpplan.json").write_text(json.dumps({"schema_version": 1}), encoding="utf-8")
    assert exit_code_of(["report"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("report.html").exists()
