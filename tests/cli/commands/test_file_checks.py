"""`profiles --check` and `validate --check` as somebody types them: codes, next step, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.generate import shell
from fsdpplan.files.profiles.catalogue import profile_text
from tests.files.runs.test_check import HEADER, ROW
from tests.schemas import obeys

FILES = {
    "good.toml": profile_text("dgx-h100"),
    "doubtful.toml": profile_text("dgx-h100").replace("50.0e9", "400.0e9"),
    "bad.toml": profile_text("dgx-h100").replace("joins", "join"),
    "good.csv": f"{HEADER}\n{ROW}\n",
    "doubtful.csv": f"{HEADER}\n{ROW.replace('2026-11', '')}\n",
    "bad.csv": f"{HEADER}\n{ROW.replace('8192', '8k')}\n",
}


@pytest.mark.parametrize("command", ["profiles --check {}.toml", "validate {}.csv --check"])
@pytest.mark.parametrize(("name", "code"), [("good", 0), ("doubtful", 6), ("bad", 2)])
def test_the_code_says_whether_it_is_whole(
    tmp_path: Path, command: str, name: str, code: int
) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    plain = shell(f"fsdpplan {command.format(name)}", tmp_path)
    assert plain.returncode == code, plain.stderr
    assert plain.stderr.count("\n") == 1
    assert ("next: fsdpplan" in plain.stderr) is (code == 0)
    answer = json.loads(shell(f"fsdpplan {command.format(name)} --json", tmp_path).stdout)
    obeys(f"{command.split()[0]}_check", answer)
    assert answer["whole"] is (code == 0)
    assert bool(answer["findings"]) is (code != 0)
    assert answer.get("error", {}).get("exit_code", 0) == code
    for one in answer["findings"]:
        assert one["where"] in plain.stdout


def test_it_is_of_one_file(tmp_path: Path) -> None:
    for words in ("profiles --check", "profiles --check a b", "validate --check"):
        refused = shell(f"fsdpplan {words}", tmp_path)
        assert refused.returncode == 2
        assert "type fsdpplan" in refused.stderr
