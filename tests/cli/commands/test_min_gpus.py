"""`recommend --min-gpus`: the fewest on which anything fits, as a scan by `--gpus` finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import answer, on_a_machine_without_gpus, words


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)


@pytest.mark.parametrize(
    ("question", "counts"),
    [
        ("--model llama-3.2-1b --hardware dgx-h100 --pp 1 --cp 1", (1, 2)),
        ("--model llama-3.1-8b --hardware dgx-h100 --tp 8 --micro-batch 1", (1, 2, 4, 8, 16)),
        (
            "--model llama-3.1-8b --hardware oci-bm-gpu-a10-4 --pp 1 --cp 1 --offload none",
            (1, 2, 4, 8, 12, 16),
        ),
    ],
)
def test_it_is_the_first_of_a_scan(
    question: str, counts: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, *words(f"recommend {question} --min-gpus --no-ledger --no-save"))
    fewest = found["cluster"]["gpus"]
    assert fewest in counts
    for gpus in counts[: counts.index(fewest)]:
        given = words(f"recommend {question} --gpus {gpus} --no-ledger --no-save")
        assert exit_code_of(given) in (2, 3), gpus
    capsys.readouterr()
    direct = answer(capsys, *words(f"recommend {question} --gpus {fewest} --no-ledger --no-save"))
    assert found["plans"] == direct["plans"]
    assert f"{fewest} GPUs, the fewest" in found["assumptions"][-1]


def test_the_fewest_of_a_large_model_fit_with_rare_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words(
        "recommend --model llama-3.1-405b --hardware dgx-h100 --min-gpus --no-save --offload none"
    )
    found = answer(capsys, *given, "--no-ledger")
    assert found["cluster"]["gpus"] == 112
    assert "nothing fits on 1, 2, 4, 8 to 104" in found["assumptions"][-1]


@pytest.mark.parametrize(
    ("question", "code", "said"),
    [
        ("--model llama-3.2-1b --gpus 8 --hardware dgx-h100", 2, "leave one of them out"),
        ("--model llama-3.2-1b --hardware nothing", 2, "nothing"),
        ("--model llama-3.1-8b --hardware dgx-h100 --sharding ddp --tp 1 --pp 1", 3, "4,096 GPUs"),
    ],
)
def test_what_cannot_be_is_one_error(
    question: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(f"recommend {question} --min-gpus --no-ledger --no-save")
    assert exit_code_of(given) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
