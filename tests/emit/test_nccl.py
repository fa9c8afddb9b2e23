from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl import RULES, environment, left_unset
from fsdpplan.emit.nccl_rules import Variable
from fsdpplan.emit.nccl_unset import NEVER_SET
from fsdpplan.spec.network import Network
from fsdpplan.spec.plan import Plan
from tests.emit.networks import INFINIBAND, ROCE, networks, on
from tests.emit.plans import make_plan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "nccl.md"
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


def test_devices_of_amd_get_nothing_of_nvidias() -> None:
    cluster = TWO_NODES.cluster
    amd = replace(cluster, device=replace(cluster.device, vendor="amd"), network=ROCE)
    names = set(variables(replace(TWO_NODES, cluster=amd), Job(nccl_debug="INFO")))
    assert names == {"OMP_NUM_THREADS", "NCCL_DEBUG"}


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
        where = f" ({', '.join(unset.transports)})" if unset.transports else ""
        names = ", ".join(f"`{name}`" for name in unset.names)
        expected.add(f"| {names}{where} | {unset.why} | {unset.source} |")
    scripts = {row for row in rows if re.match(r"\| `(gib|tcpxo)` ", row)}
    assert len(scripts) == 2
    assert rows - scripts == expected
