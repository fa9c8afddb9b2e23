"""ZeRO-1 and ZeRO-2 of the runtime that has none: priced, and run by nothing here."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import words

QUESTION = (
    "recommend --model gpt2 --gpus 4 --hardware dgx-h100 --seq-len 1024 --global-batch 16 "
    "--dp-shard 4 --micro-batch 4 --activation-checkpointing none --loss-chunks 1 --no-ledger"
)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_what_only_the_trainer_cannot_do_is_priced_and_not_emitted(
    sharding: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert exit_code_of(words(f"{QUESTION} --sharding {sharding}")) == 0
    said = capsys.readouterr().err
    assert f"sharding {sharding} is priced" in said
    assert "--script" not in said
    for launch in ("emit-launch", "emit-launch --script train.py"):
        assert exit_code_of(words(launch)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "use --sharding fsdp" in err
        assert "--runtime fsdp2" not in err  # which it has
