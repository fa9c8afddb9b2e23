"""What people type without having read a list: names of GPUs, no degrees, a script that is not
there. Each is answered, and what was taken for it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.profiles.catalogue import load_machines, profile_names, usual_node
from tests.cli.small import on_a_machine_without_gpus

SHORT = ("estimate", "--model", "llama-3.2-1b", "--gpus", "8")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("typed", "node"),
    [
        ("a100", "dgx-a100-80g-hdr"),
        ("h100", "dgx-h100"),
        ("H200", "dgx-h200"),
        ("b200", "dgx-b200"),
        ("mi300x", "azure-nd-mi300x-v5"),
    ],
)
def test_a_gpu_means_its_usual_node(
    typed: str, node: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usual_node(typed) == node
    assert load_machines(typed)[0].name == node
    assert exit_code_of([*SHORT, "--hardware", typed, "--dp-shard", "8"]) == 0
    assert f"{typed} is {node}, its usual node" in capsys.readouterr().out


def test_other_names_stay_what_they_were() -> None:
    assert {name for name in profile_names("node") if usual_node(name)} == set()
    with pytest.raises(SpecError, match="is a device, not a node type"):
        load_machines("h100-sxm-80g")
    with pytest.raises(ProfileNotFound):
        load_machines("x100")


def test_degrees_that_nobody_gave_shard_over_all_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [*SHORT, "--hardware", "dgx-h100", "--json"]
    layouts = []
    for degrees in ([], ["--dp-shard", "8"]):
        assert exit_code_of([*named, *degrees]) == 0
        layouts.append(json.loads(capsys.readouterr().out)["layout"])
    assert layouts[0] == layouts[1]
    assert exit_code_of([*named, "--tp", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layout"]["dp_shard"] == 4
    assert any("dp_shard 4: all GPUs" in one for one in document["assumptions"])


def test_that_no_gpu_was_found_stands_in_the_first_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(SHORT) == 0
    assert "dgx-h100; no GPU was found here)" in capsys.readouterr().out.splitlines()[0]
    assert exit_code_of([*SHORT, "--hardware", "dgx-h100"]) == 0
    assert "was found" not in capsys.readouterr().out.splitlines()[0]


def saved(*more: str) -> None:
    words = ["recommend", *SHORT[1:], "--hardware", "azure-nd-h100-v5", "--dp-shard", "8"]
    assert exit_code_of([*words, "--micro-batch", "1", *more]) == 0


def test_a_script_that_is_not_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved()
    for command in (["emit-launch"], ["run", "--dry-run"], ["emit-launch", "--target", "ssh"]):
        for script in ("none.py", str(tmp_path / "none.py")):
            capsys.readouterr()
            assert exit_code_of([*command, "--script", script]) == 2
            assert "there is no such file here" in capsys.readouterr().err
    # another host may have what this one cannot see
    assert exit_code_of(["emit-launch", "--script", "/shared-by-none/train.py"]) == 0
    assert exit_code_of(["emit-launch", "--container", "image", "--script", "none.py"]) == 0
    image = ["emit-launch", "--target", "kubernetes", "--image", "image"]
    assert exit_code_of([*image, "--script", "none.py"]) == 0


def test_a_price_of_another_cloud_is_questioned(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ("--tokens", "1B", "--provider")
    saved(*tokens, "aws")
    assert "azure-nd-h100-v5 is a machine of azure, and the price is one of aws" in (
        " ".join(capsys.readouterr().out.split())
    )
    saved(*tokens, "azure")
    assert "is a machine of" not in capsys.readouterr().out


def test_conditions_know_goodput_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    saved("--tokens", "1B")
    held = ["check", "--assert", "goodput > 0.5", "--json"]
    assert exit_code_of([*held, "--assert", "cost < 1e6", "--price", "2"]) == 0
    assert exit_code_of([*held, "--assert", "cost < 0.01", "--price", "2"]) == 6
    assert exit_code_of([*held, "--assert", "cost < 1e6", "--provider", "azure"]) == 0
    assert exit_code_of([*held, "--assert", "cost < 1e6"]) == 2
    assert exit_code_of([*held, "--provider", "azure", "--price", "2"]) == 2
    capsys.readouterr()


def test_the_list_says_how_many_adapters_a_node_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["profiles", "hdr", "--kind", "node"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["dgx-a100-80g-hdr"][-3:] == ["8", "x", "25"]
    assert rows["dgx-a100-80g-hdr1"][-3:] == ["1", "x", "25"]
    assert "adapters" in rows["name"]
