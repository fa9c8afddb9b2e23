"""`explain`: the terms of a saved plan, and its environment."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.commands.explain import nccl_json
from fsdpplan.cli.options.job import JobOptions
from fsdpplan.cli.resolve import launch
from fsdpplan.cli.views.render import columns
from fsdpplan.cost.network.placement import group_placement
from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.slurm.header import read_plan_json
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.plans import plan_from_json, read_plan, write_plan
from fsdpplan.files.profiles.catalogue import profile_names
from fsdpplan.run.launch import resolve_launch
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.plan import Plan
from tests.cli.small import on_a_machine_without_gpus, words
from tests.cost.test_explained import worked_out
from tests.emit.networks import GIB, INFINIBAND, on
from tests.search.weak import with_a_weak_node

RECOMMEND = words(
    "recommend --model llama-3.2-1b --gpus 16 --hardware dgx-h100 --tp 1 --pp 1 --micro-batch 1"
)
PLAN = "fsdpplan.json"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two nodes, searched for once."""
    path = tmp_path_factory.mktemp("plan") / PLAN
    with pytest.MonkeyPatch.context() as patch:
        on_a_machine_without_gpus(patch)
        assert exit_code_of([*RECOMMEND, "--save", str(path)]) == 0
    return path


@pytest.fixture(autouse=True)
def _beside_the_plan(
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    shutil.copy(plan_file, PLAN)
    capsys.readouterr()


def known(*, network: Network | None = INFINIBAND) -> None:
    """Save the plan again, with a network between its nodes."""
    write_plan(on(network, read_plan(PLAN)), PLAN)


def said(capsys: pytest.CaptureFixture[str], text: str) -> str:
    assert exit_code_of(words(text)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "--json" in text or max(map(len, out.splitlines())) <= columns()
    return out


def test_it_says_what_the_prediction_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "explain")
    for part in (
        "Time of a step",
        "Memory of the fullest GPU",
        "Collectives of a step, each rank",
        "Assumed",
        "Where the inputs came from",
        "cluster: flag --hardware",
    ):
        assert part in out


def test_each_term_is_printed_with_its_formula_and_what_lost_the_next_layouts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = said(capsys, "explain")
    for part in (
        "= s * m * b * d * 2 * t * W / (P * c * u * q)",
        "= N * e",
        "How the peak of the fullest device is made up",
        "The next layouts, and the terms that lost or won them time in a step",
    ):
        assert part in out
    document = json.loads(said(capsys, "explain --json"))
    step = sum(term["value"] for term in document["step_terms"])
    assert step == pytest.approx(document["step_seconds"]["expected"], rel=1e-12)
    peak = sum(term["value"] for term in document["memory_terms"])
    assert peak == read_plan(PLAN).estimate.memory.peak_device_bytes
    assert document["runners_up"][0]["rank"] == 2


@pytest.mark.parametrize("width", [60, 120])
def test_it_keeps_to_the_width_of_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = said(capsys, "explain")
    terms = out[out.index("How the step is made up") : out.index("Where the inputs")]
    assert max(map(len, terms.splitlines())) <= width


INPUT = re.compile(
    r"(?P<symbol>\b[A-Za-z]\b) = (?P<number>-?[0-9.,e+-]+)(?: (?P<unit>[A-Za-z/]+))?, "
)
UNITS = {
    "million": 1e6,
    "billion": 1e9,
    "TFLOP/s": 1e12,
    "GFLOP": 1e9,
    "MFLOP": 1e6,
    "TB/s": 1e12,
    "GB/s": 1e9,
    "GiB": 2**30,
    "MiB": 2**20,
    "KiB": 2**10,
    "ms": 1e-3,
    "us": 1e-6,
}


def test_what_is_printed_is_enough_to_work_a_term_out(capsys: pytest.CaptureFixture[str]) -> None:
    """From the page alone, to the digits that the term is printed with."""
    page = said(capsys, "explain")
    page = page[page.index("  in several: ") : page.index("Derived in")]
    terms = [" ".join(term.split()) for term in re.split(r"^  (?=\S)", page, flags=re.M)[1:]]
    shared = given(terms[0])
    worked = 0
    for term in terms[1:]:
        head = re.match(r"(?P<name>[^:]+): (?P<number>[0-9.,]+) (?P<unit>\w+), ", term)
        formula = re.search(r"= (?P<formula>[^=]+?) \((?:cost|validate)/", term)
        assert head is not None
        assert formula is not None, term
        value = float(head["number"].replace(",", "")) * UNITS.get(head["unit"], 1.0)
        found = worked_out(formula["formula"], {**shared, **given(term)})
        shown = 0.5 * 10 ** -len(head["number"].partition(".")[2]) * UNITS.get(head["unit"], 1.0)
        assert found == pytest.approx(value, abs=1.1 * shown, rel=1e-3), term
        worked += 1
    assert worked > 12


def given(text: str) -> dict[str, float]:
    """Symbols of a part of the page, and their values."""
    return {
        one["symbol"]: float(one["number"].replace(",", "")) * UNITS.get(one["unit"] or "", 1.0)
        for one in INPUT.finditer(text)
    }


def test_why_not_another_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """On one GPU no link is turned, and layouts are few."""
    question = "--model llama-3.2-1b --gpus 1 --hardware dgx-h100 --global-batch 8 --loss-chunks 1"
    assert exit_code_of(words(f"recommend {question} --save one.json --no-ledger")) == 0
    capsys.readouterr()
    assert (
        exit_code_of([*words("explain one.json --no-ledger --json --why"), "full recompute"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] in ("slower", "tie", "first")
    assert document["with_it"]["layout"]["activation_checkpointing"] == "full"
    assert {"GPU memory", "sequence length", "GPUs"} <= {one["input"] for one in document["inputs"]}


@pytest.mark.parametrize(
    ("options", "said_of"),
    [
        (["--why", "tp 4", "--rank", "2"], "--rank 2"),
        (["--why", "tp 4", "--nccl"], "--nccl"),
        (["--no-ledger"], "--no-ledger is for --why"),
        (["--why", "bananas"], "bananas"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], said_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["explain", *options]) == 2
    assert said_of in capsys.readouterr().err


def test_another_layout_of_the_list_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "explain --rank 2") != said(capsys, "explain")


def test_its_json_is_that_of_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(said(capsys, "explain --json"))
    assert document["fits"] is True
    assert document["layout"]["micro_batch"] == 1


def test_nccl_shows_value_reason_versions_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    known()
    out = said(capsys, "explain --nccl")
    block = out[out.index("NCCL_IB_HCA\n") :].split("\n\n")[0]
    assert "value     =mlx5_0,mlx5_1,mlx5_4:1" in block
    assert "3 of 5 adapters" in block
    assert "NCCL >= 2.5.6" in block
    assert "https://docs.nvidia.com" in block
    unset = out.partition("Left alone on purpose")[2]
    assert "NCCL_NVLS_ENABLE" in unset
    assert "NCCL_IB_HCA" not in unset


def test_nccl_says_when_nothing_is_known_of_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    known(network=None)
    out = said(capsys, "explain --nccl")
    assert "nothing known of their network" in " ".join(out.split())
    assert "NCCL_IB_HCA\n" not in out


def test_nccl_names_the_clouds_script(capsys: pytest.CaptureFixture[str]) -> None:
    known(network=GIB)
    assert "/usr/local/gib/scripts/set_nccl_env.sh (each node" in said(capsys, "explain --nccl")


def test_what_tcpx_lacks_is_said_by_explain_emit_and_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "choose_target", lambda **_: "slurm")
    known(network=replace(GIB, transport="tcpx", env_profiles=()))
    shown = " ".join(said(capsys, "explain --nccl").split())
    assert "Not runnable as emitted: the nodes are joined by GPUDirect-TCPX" in shown
    assert json.loads(said(capsys, "explain --nccl --json"))["lacks"]["needs"]
    for command in ("emit-launch", "run --dry-run"):
        assert exit_code_of(words(command)) == 0
        out, err = capsys.readouterr()
        assert "# Not runnable as emitted" in out
        assert "not runnable as emitted" in err
    assert exit_code_of(words("emit-launch --env-setup tcpx.sh")) == 0
    assert "not runnable" not in capsys.readouterr().err


def test_nccl_as_json_has_what_the_screen_has(capsys: pytest.CaptureFixture[str]) -> None:
    known(network=replace(INFINIBAND, env_profiles=GIB.env_profiles))
    document = json.loads(said(capsys, "explain --nccl --json"))
    by_name = {variable["name"]: variable for variable in document["variables"]}
    assert by_name["NCCL_IB_HCA"]["value"] == "=mlx5_0,mlx5_1,mlx5_4:1"
    assert all(v["reason"] and v["versions"] and v["source"] for v in by_name.values())
    assert [script["required"] for script in document["scripts"]] == [True]
    assert all(item["names"] and item["why"] for item in document["left_unset"])


def test_nccl_says_whether_gpudirect_was_priced(capsys: pytest.CaptureFixture[str]) -> None:
    assert "priced with GPUDirect" in " ".join(said(capsys, "explain --nccl").split())
    write_plan(with_gpudirect(read_plan(PLAN), False), PLAN)
    assert "priced without GPUDirect" in " ".join(said(capsys, "explain --nccl").split())
    assert json.loads(said(capsys, "explain --nccl --json"))["gpudirect"] is False


def test_nccl_names_the_levels_that_are_priced_through_host_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = read_plan(PLAN)
    inside, between = plan.cluster.levels
    levels = (
        replace(inside, domain_gpus=4),
        replace(inside, name="leaf", domain_gpus=12),
        replace(between, name="wan", gpudirect=False),
    )
    write_plan(replace(plan, cluster=replace(plan.cluster, levels=levels)), PLAN)
    assert "priced without GPUDirect over wan" in " ".join(said(capsys, "explain --nccl").split())


@pytest.mark.parametrize("name", [*profile_names("node"), *profile_names("cluster")])
def test_nccl_says_of_gpudirect_what_is_priced(name: str) -> None:
    """Without it, and only then, a slower link to host memory makes the way to another node
    slower; so do those of a profile with `gpudirect` turned."""
    saved, nodes = read_plan(PLAN), two_nodes(name)
    layout = replace(saved.layout, dp_replicate=nodes.gpus)
    training = replace(saved.training, global_batch=layout.global_batch)
    plan = replace(saved, cluster=nodes, layout=layout, training=training)
    for one in (plan, with_gpudirect(plan, True), with_gpudirect(plan, False)):
        cluster = one.cluster
        slow = replace(cluster, device=replace(cluster.device, host_link_bytes_per_second=1.0))
        through_host = priced(slow) < priced(cluster)
        said = json.loads(nccl_json(one))["gpudirect"]
        assert said is (None if cluster.nodes == 1 or name == "cpu" else not through_host)


def two_nodes(name: str) -> Cluster:
    """Two nodes of a bundled profile, or one where it joins no more."""
    one = load_cluster(name, gpus=4 if name == "cpu" else None).cluster
    try:
        return load_cluster(name, gpus=2 * one.gpus_per_node).cluster
    except SpecError:
        return one


def with_gpudirect(plan: Plan, works: bool) -> Plan:
    """The plan with GPUDirect on all levels between nodes, or on none."""
    cluster = plan.cluster
    levels = tuple(
        replace(level, gpudirect=works) if cluster.joins_nodes(level) else level
        for level in cluster.levels
    )
    return replace(plan, cluster=replace(cluster, levels=levels))


def priced(cluster: Cluster) -> float:
    """The least bandwidth at which a group over all GPUs leaves its nodes, as it is priced."""
    placement = group_placement(cluster=cluster, ranks=cluster.gpus, stride=1)
    return min(
        (
            placed.bandwidth_bytes_per_second
            for placed in placement.levels
            if cluster.joins_nodes(placed.level)
        ),
        default=inf,
    )


def test_without_a_plan_it_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PLAN).unlink()
    assert exit_code_of(["explain", "--nccl"]) == 2
    assert "fsdpplan recommend" in capsys.readouterr().err


def test_excluded_nodes_reach_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    out = said_of_launch(capsys, "emit-launch --exclude n03 --exclude n[17-19]")
    assert '#SBATCH --exclude="n03,n[17-19]"' in out


def said_of_launch(capsys: pytest.CaptureFixture[str], text: str) -> str:
    assert exit_code_of(words(text)) == 0
    return capsys.readouterr().out


def test_a_list_of_nodes_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["emit-launch", "--exclude", "n[3-1]"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fsdpplan: --exclude: 'n[3-1]' is no list of nodes")
    assert "n[01-04,7]" in said


def test_a_script_without_the_weak_node_is_predicted_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `run` takes it for the plan's own script."""
    plan = read_plan(PLAN)
    slow = with_a_weak_node(plan)
    write_plan(slow, PLAN)
    script = said_of_launch(capsys, "emit-launch --exclude n03")
    carried = plan_from_json(read_plan_json(script) or "", where="script")
    assert carried.cluster.weak == ()
    assert carried.estimate.step_seconds.expected < slow.estimate.step_seconds.expected
    assert carried.estimate.step_seconds.expected == pytest.approx(
        plan.estimate.step_seconds.expected
    )
    (tmp_path / SCRIPT_NAME).write_text(script)
    launch = resolve_launch(tmp_path)
    assert launch.plan == carried


def test_options_of_a_job_have_no_excluded_node_by_default() -> None:
    assert JobOptions().exclude == ()
