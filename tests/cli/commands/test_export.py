"""`fsdpplan export`: what is typed; what is written is tests/trainer/huggingface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface.config import DENSE_FAMILIES, parse_hf_config
from fsdpplan.trainer.huggingface.families import FAMILIES
from tests.schemas import obeys


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--checkpoint-dir is missing: fsdpplan export --checkpoint-dir ckpt --out model"),
        (["--checkpoint-dir", "here"], "--out is missing"),
        (["--checkpoint-dir", "here", "--out", "model"], "here has no checkpoint: name the folder"),
    ],
)
def test_what_is_missing_is_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["export", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_was_written_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "fsdpplan.cli.commands.export.export_checkpoint", lambda *_, **__: "wrote it"
    )
    given = ["export", "--checkpoint-dir", str(tmp_path), "--out", "model", "--json"]
    assert exit_code_of(given) == 0
    document = json.loads(capsys.readouterr().out)
    obeys("export", document)
    assert document == {"out": "model", "said": "wrote it"}


def test_weights_of_another_model_are_told_before_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    }
    for name, changes in (("same", {}), ("other", {"rope_theta": 5e5})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape | changes))
    words = ["--hardware", "cpu", "--gpus", "1", "--seq-len", "32", "--global-batch", "2"]
    assert exit_code_of(["recommend", "--config", "same", *words]) == 0
    assert exit_code_of(["emit-launch", "--init-from", "same"]) == 0
    assert "--init-from=same" in capsys.readouterr().out
    assert exit_code_of(["emit-launch", "--init-from", "/not/on/this/host"]) == 0
    capsys.readouterr()
    assert exit_code_of(["emit-launch", "--init-from", "other"]) == 2
    assert "its rope_theta is 500000.0, the plan's 10000.0" in capsys.readouterr().err


def test_weights_that_the_trainer_does_not_compute_are_told_before_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is priced: the job's own list of families refuses at `emit-launch`."""
    monkeypatch.chdir(tmp_path)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    }
    words = ["--hardware", "cpu", "--gpus", "1", "--seq-len", "32", "--global-batch", "2"]
    for family in (*DENSE_FAMILIES, "gpt_oss"):
        config = shape | {"model_type": family}
        if family == "gpt_oss":
            config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        try:
            parse_hf_config(json.dumps(config), where="config.json", name=family)
        except SpecError:
            continue  # of other keys
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps(config))
        assert exit_code_of(["estimate", "--config", family, *words]) == 0, family
        assert exit_code_of(["recommend", "--config", family, *words]) == 0, family
        expected = 0 if family in FAMILIES else 2
        capsys.readouterr()
        assert exit_code_of(["emit-launch", "--init-from", family]) == expected, family
        if expected:
            assert "does not compute exactly" in capsys.readouterr().err
