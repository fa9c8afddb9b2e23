from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.environment import NEVER_SET, RULES, environment, left_unset
from fsdpplan.emit.nccl.rules import Variable
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.plan import Plan
from tests.emit.networks import INFINIBAND, ROCE, networks, on
from tests.emit.plans import make_plan

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "nccl.md"
NETWORK_KINDS = ("sockets", "fabric")
TWO_NODES = make_plan("cuda", nodes=2, per_node=8)


def variables(plan: Plan, job: Job | None = None) -> dict[str, Variable]:
    """Variables of the plan's job by name."""
    return {variable.name: variable for variable in environment(plan=plan, job=job or Job())}


@given(network=networks())
def test_every_variable_has_a_reason_versions_and_a_source(network: Network) -> None:
    for plan in (make_plan("cpu", nodes=2), make_plan("cuda"), TWO_NODES):
        for variable in variables(on(network, plan), Job(nccl_debug="WARN")).values():
            assert len(variable.reason) > 20
            assert variable.versions
            assert variable.source
            assert variable.value


@given(network=networks())
def test_each_rule_sets_its_variable_or_says_why_not(network: Network) -> None:
    plan = on(network, TWO_NODES)
    unset = [name for item in left_unset(plan=plan, job=Job()) for name in item.names]
    assert len(unset) == len(set(unset))
    for rule in RULES:
        assert (rule.name in variables(plan)) != (rule.name in unset)


@pytest.mark.parametrize(
    "plan",
    [
        make_plan("cpu", nodes=2),
        make_plan("cuda"),
        TWO_NODES,
        on(INFINIBAND, make_plan("cuda", per_node=8)),
        on(ROCE, make_plan("cpu", nodes=2)),
    ],
    ids=["cpu", "one node", "unknown network", "known network, one node", "cpu nodes"],
)
def test_without_a_network_between_nodes_nothing_of_it_is_set(plan: Plan) -> None:
    for variable in variables(plan).values():
        assert variable.kind not in NETWORK_KINDS or variable.on_node, variable.name


def test_gpus_of_amd_get_what_rccl_reads_in_its_own_name() -> None:
    found = variables(of_amd(on(ROCE, TWO_NODES)), Job(nccl_debug="INFO"))
    assert set(found) == {
        *("OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
        *("NCCL_IB_HCA", "NCCL_IB_TC", "NCCL_DEBUG"),
        *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"),
    }
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_TC", "NCCL_DEBUG"):
        assert "RCCL" in found[name].reason
        assert " NCCL" not in found[name].reason


def test_what_is_left_alone_for_gpus_of_amd_is_not_told_of_nvlink() -> None:
    def unset(plan: Plan) -> set[str]:
        return {name for item in left_unset(plan=plan, job=Job()) for name in item.names}

    nvlink = {"NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE"}
    assert nvlink <= unset(TWO_NODES)
    assert not nvlink & unset(of_amd(TWO_NODES))
    assert "HIP_VISIBLE_DEVICES" in unset(of_amd(TWO_NODES)) - unset(TWO_NODES)
    (item,) = [
        item
        for item in left_unset(plan=of_amd(TWO_NODES), job=Job())
        if "PYTORCH_ALLOC_CONF" in item.names
    ]
    assert "PYTORCH_HIP_ALLOC_CONF" in item.why


def of_amd(plan: Plan) -> Plan:
    """The plan on GPUs of AMD."""
    device = replace(plan.cluster.device, vendor="amd")
    return replace(plan, cluster=replace(plan.cluster, device=device))


def test_no_variable_is_both_set_by_a_rule_and_never_set() -> None:
    ruled = [rule.name for rule in RULES]
    never = [name for unset in NEVER_SET for name in unset.names]
    assert len(set(ruled + never)) == len(ruled) + len(never)


def test_what_is_for_one_cloud_is_spoken_of_only_there() -> None:
    def names(plan: Plan) -> set[str]:
        return {name for item in left_unset(plan=plan, job=Job()) for name in item.names}

    assert "FI_PROVIDER" not in names(on(INFINIBAND, TWO_NODES)) | names(TWO_NODES)
    assert "FI_PROVIDER" in names(on(replace(INFINIBAND, transport="efa"), TWO_NODES))


def test_the_reference_page_has_every_rule_and_no_other() -> None:
    rows = {row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `")}
    expected = {f"| `{r.name}` | {r.when} | {r.versions} | {r.source} |" for r in RULES}
    for unset in NEVER_SET:
        about = (*unset.transports, *unset.vendors)
        where = f" ({', '.join(about)})" if about else ""
        names = ", ".join(f"`{name}`" for name in unset.names)
        expected.add(f"| {names}{where} | {unset.why} | {unset.source} |")
    scripts = {row for row in rows if re.match(r"\| `(gib|tcpxo)` ", row)}
    assert len(scripts) == 2
    assert rows - scripts == expected
