"""Profiles are listed whole, fit the screen, and every number shown has its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.profiles.catalogue import load_device, profile_names
from tests.cli.small import show
from tests.schemas import obeys

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("columns", [80, 50])
def test_the_list_has_every_name_and_fits_the_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = show(capsys, "profiles")
    assert max(map(len, out.splitlines())) <= columns
    for name in profile_names():
        assert f" {name}" in out
    document = json.loads(show(capsys, "profiles", "--json"))
    obeys("profiles", document)
    listed = document["profiles"]
    assert len(listed) == len(profile_names())


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


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> set[str]:
    """Names of the profiles that a search lists, which has more than one."""
    document = json.loads(show(capsys, "profiles", *words, "--json"))
    return {profile["name"] for profile in document["profiles"]}


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (["H100"], {"h100-sxm-80g", "dgx-h100", "azure-nd-h100-v5", "p5-48xlarge"}, {"dgx-h200"}),
        (["h100", "azure"], {"azure-nd-h100-v5"}, {"dgx-h100", "azure-nd-h200-v5"}),
        (["google cloud", "A100"], {"gcp-a2-highgpu-8g"}, {"gcp-a3-highgpu-8g"}),
        (["GeForce RTX"], {"rtx-4090-24g", "pcie-8xrtx4090"}, {"rtx-6000-ada-48g"}),
        (["HBM3 h100"], {"h100-sxm-80g", "lambda-2xh100"}, {"h100-pcie-80g"}),
        (["nvl72"], {"gb200-nvl72", "gb300-nvl72-rack"}, {"gb200-186g"}),
        (["declared"], set(), {"physics"}),
    ],
)
def test_a_search_finds_words_in_names_descriptions_and_devices(
    words: list[str], some: set[str], none: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if not some:  # words of sources are not searched
        assert exit_code_of(["profiles", *words]) == 2
        return
    code = exit_code_of(["profiles", *words, "--json"])
    document = json.loads(capsys.readouterr().out)
    found = {p["name"] for p in document.get("profiles", [document])}
    assert code == 0
    assert some <= found
    assert not none & found


def test_more_words_find_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, "h100", "400") < listed(capsys, "h100") < listed(capsys)


def test_the_only_match_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, "profiles", "coreweave")
    assert out.startswith("coreweave-hgx-h100: ")
    assert "Sources" in out


def test_a_rack_of_nvl72_is_shown_with_the_size_of_its_domain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "levels.nvlink.domain_gpus                          72\n" in show(
        capsys, "profiles", "gb200-nvl72"
    )


def test_ports_that_follow_from_the_level_below_are_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    guide = (ROOT / "docs" / "guides" / "declare-a-cluster.md").read_text(encoding="utf-8")
    declared = tmp_path / "ours.toml"
    declared.write_text(guide.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    page = show(capsys, "profiles", str(declared))
    assert "levels.leaf.ports " in page
    assert "levels.spine.ports" not in page
    document = json.loads(show(capsys, "profiles", str(declared), "--json"))
    assert [level["level"]["ports"] for level in document["levels"]] == [8, None]


def test_what_a_relative_lends_names_its_source_and_a_source_stands_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = show(capsys, "profiles", "pcie-4xa100-80g-bridged")
    assert "  - levels.pcie.low_latency\n      taken over from pcie-8xl40s:pcie" in page
    assert "network.evidence" not in show(capsys, "profiles", "azure-nd-h100-v5")


def test_an_exact_name_is_shown_though_others_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(capsys, "profiles", "DGX-H100").startswith("dgx-h100: NVIDIA DGX H100")
    assert "dgx-h100-superpod-unit" in listed(capsys, "dgx", "h100")


@pytest.mark.parametrize("kind", ["device", "node", "cluster"])
def test_a_kind_lists_its_profiles_alone(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(show(capsys, "profiles", "--kind", kind, "--json"))
    assert {profile["kind"] for profile in document["profiles"]} == {kind}
    assert len(document["profiles"]) == len(profile_names(kind))  # type: ignore[arg-type]
    narrowed = json.loads(show(capsys, "profiles", "gb", "--kind", kind, "--json"))
    assert {profile["kind"] for profile in narrowed["profiles"]} == {kind}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["h10000"], "no hardware profile matches 'h10000'; nearest: "),
        (["dgx-h1000"], "`fsdpplan profiles` lists all"),
        (["h100", "mi300x"], "no hardware profile matches 'h100 mi300x'"),
        (["\0"], "no hardware profile matches"),
        (["x" * 5000], "no hardware profile matches"),
        (["--kind", "gpu"], "--kind: 'gpu' is not known; type device, node, cluster or physics"),
        (["dgx-h100", "--kind", "device"], "such as dgx-h100, a profile of the kind node"),
        (["./none.toml"], "does not exist"),
    ],
)
def test_a_search_for_nothing_is_one_clear_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["profiles", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert len(captured.err) < 500
    assert message in captured.err


def test_a_device_shows_what_it_achieves_beside_its_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = {
        line.split("  ")[1]: line
        for line in show(capsys, "profiles", "h100-sxm-80g").split("\n")
        if line.startswith("  ")
    }
    fit = load_device("h100-sxm-80g").device.fit
    assert lines["bf16 matmul"].split() == [
        "bf16",
        "matmul",
        "989.4",
        "TFLOP/s",
        "832.1",
        "TFLOP/s",
        f"{989.4 * fit.matmul_fraction * fit.sustained_fraction:.1f}",
        "TFLOP/s",
    ]
    reached = [f"{3.35 * fit.memory_fraction:.2f}", "TB/s"]
    assert lines["memory"].split() == ["memory", "3.35", "TB/s", *reached, *reached]
    achieved = json.loads(show(capsys, "profiles", "h100-sxm-80g", "--json"))["achieved"]
    assert [rate["what"] for rate in achieved][:3] == ["bf16 matmul", "fp16 matmul", "fp8 matmul"]


def test_the_list_says_where_nvlink_leads_to_other_gpus_than_the_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = {
        line.split()[0]: line.split()
        for line in show(capsys, "profiles", "--kind", "node").splitlines()
    }
    assert rows["gb200-nvl72"][1:] == ["4", "gb200-186g", "900", "to", "72", "4", "x", "50"]
    assert rows["pcie-4xa100-80g-bridged"][3:] == ["300", "to", "2", "none"]
    assert rows["dgx-h100"][3:] == ["450", "8", "x", "50"]


@pytest.mark.parametrize("columns", [80, 50])
def test_search_results_fit_the_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["a100"], ["--kind", "device"], ["gb300-288g"], ["pcie-8xl40s"]):
        out = show(capsys, "profiles", *words)
        assert max(map(len, out.splitlines())) <= columns
        assert "\x1b" not in out


@pytest.mark.parametrize("name", ["h100-sxm-80g", "dgx-h100"])
def test_the_file_of_a_profile_is_where_ones_own_begins(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(show(capsys, "profiles", name, "--toml"), encoding="utf-8")
    theirs = json.loads(show(capsys, "profiles", name, "--json"))
    assert json.loads(show(capsys, "profiles", str(mine), "--json")) == theirs


@pytest.mark.parametrize(
    ("words", "said"), [(["h200"], "name one, such as"), (["dgx-h100", "--json"], "--json")]
)
def test_a_file_is_of_one_profile(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["profiles", *words, "--toml"]) == 2
    assert said in "".join(capsys.readouterr())
