from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.slurm.node_check import IMEX_CHANNELS, assumptions, binds, near_check, node_check
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.spec.plan import TORCH_SOURCE
from tests.emit.networks import EFA, GIB, INFINIBAND, on
from tests.emit.plans import make_plan

NEED = "torch=2.8,"
"""Nothing of these plans needs more than the oldest release."""


@pytest.mark.parametrize("several", [False, True])
def test_the_program_of_a_node_is_whole_and_stands_between_apostrophes(several: bool) -> None:
    text = node_check(several=several)
    compile(text, "node", "exec")
    assert "'" not in text
    assert "from fsdpplan" not in text
    assert text.count("if __name__") == 1


def test_the_program_that_asks_for_cores_stands_between_apostrophes_too() -> None:
    compile(near_check(), "near", "exec")
    assert "from fsdpplan" not in near_check()


@pytest.mark.parametrize(
    ("torch", "expected"), [(None, True), ("2.8", False), ("2.9", True), ("2.13", True)]
)
def test_ranks_stay_near_their_gpus_unless_torch_is_known_to_lack_it(
    torch: str | None, expected: bool
) -> None:
    plan = make_plan("cuda", nodes=2, per_node=8)
    if torch is not None:
        training = replace(plan.training, torch=torch)
        sources = (*plan.sources, (TORCH_SOURCE, "flag --torch"))
        plan = replace(plan, training=training, sources=sources)
    assert binds(plan) is expected


def test_ranks_that_have_no_cores_to_choose_from_are_not_bound() -> None:
    plan = make_plan("cuda", nodes=2, per_node=8)
    device = replace(plan.cluster.device, vendor="amd")
    assert not binds(replace(plan, cluster=replace(plan.cluster, device=device)))
    assert not binds(make_plan("cuda", nodes=2, per_node=1))
    assert not binds(make_plan("cpu", nodes=2, per_node=8))


def test_every_node_must_read_the_program_and_write_checkpoints() -> None:
    plan = make_plan("cpu", nodes=2)
    trainer = Trainer(data="d.bin", checkpoint_dir="saved")
    assert assumptions(plan=plan, job=Job(program=trainer)) == (NEED, "read=d.bin", "save=saved")
    own = Job(program=UserProgram(script="it's.py"))
    assert assumptions(plan=plan, job=own) == ("read=it's.py",)


def test_gpus_of_amd_need_a_torch_that_was_built_for_them() -> None:
    plan = make_plan("cuda", nodes=2, per_node=8)
    device = replace(plan.cluster.device, vendor="amd")
    amd = replace(plan, cluster=replace(plan.cluster, device=device))
    assert assumptions(plan=amd, job=Job()) == (NEED, "build=rocm")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("name", "domain_gpus", "needed"), [("nvlink", 8, True), ("infiniband", 8, False)]
)
def test_imex_is_looked_for_where_nvlink_joins_nodes(
    nodes: int, name: str, domain_gpus: int, needed: bool
) -> None:
    plan = make_plan("cuda", nodes=nodes, per_node=4)
    outer = replace(plan.cluster.levels[-1], name=name, domain_gpus=domain_gpus)
    levels = (*plan.cluster.levels[:-1], outer)
    wide = replace(plan, cluster=replace(plan.cluster, levels=levels))
    expected = (f"imex={IMEX_CHANNELS}",) if needed and nodes > 1 else ()
    assert assumptions(plan=wide, job=Job()) == (NEED, *expected)


def test_only_what_the_plan_rests_on_is_looked_for() -> None:
    plan = make_plan("cuda", nodes=2, per_node=8)
    assert assumptions(plan=plan, job=Job()) == (NEED,)
    assert assumptions(plan=on(INFINIBAND, plan), job=Job()) == (
        NEED,
        "NCCL_SOCKET_IFNAME==eno1",
        "NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_4:1",
    )
    assert assumptions(plan=on(EFA, plan), job=Job()) == (
        NEED,
        f"file={EFA.net_plugins[0]}",
    )
    assert assumptions(plan=on(GIB, plan), job=Job()) == (
        NEED,
        f"file={GIB.env_profiles[0]}",
    )
