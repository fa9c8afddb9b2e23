from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdpplan.emit.job import Job
from tests.emit.bench import ALLOCATION, emit, run
from tests.emit.networks import GIB, INFINIBAND, on
from tests.emit.plans import make_plan

SET = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE")


def test_all_ranks_get_the_same_variables(bench: Path) -> None:
    ran = run(bench, emit(on(INFINIBAND, make_plan("cuda", nodes=2))), **ALLOCATION)
    assert ran.code == 0, ran.said
    first, second = ran.environments
    assert [first[name] for name in SET] == [
        "=mlx5_0,mlx5_1,mlx5_4:1",
        "=eno1",
        "eno1",
        "2000",
    ]
    assert [second[name] for name in SET] == [first[name] for name in SET]
    assert first["TORCH_FR_DUMP_TEMP_FILE"] == f"{bench}/run/metrics.jsonl.nccl-rank-"
    assert (
        "ready n1 1.2.3 2 n1 n1,n2 torch=2.8, NCCL_SOCKET_IFNAME==eno1 NCCL_IB_HCA==mlx5_0"
        in ran.said
    )


def test_a_value_that_the_user_exported_wins(bench: Path) -> None:
    mine = {name: f"my {name}" for name in SET}
    plan = on(INFINIBAND, make_plan("cuda", nodes=2))
    for ran in (
        run(bench, emit(plan), **ALLOCATION, **mine),
        run(bench, emit(plan, Job(env=tuple(mine.items()))), **ALLOCATION),
    ):
        assert all(ran.environments[0][name] == value for name, value in mine.items())


def test_records_of_collectives_go_beside_the_metrics(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda"), Job(metrics="runs/m.jsonl")))
    assert ran.environments[0]["TORCH_FR_DUMP_TEMP_FILE"] == "runs/m.jsonl.nccl-rank-"


CLOUD_SCRIPT = """\
export NCCL_NET=gIB NCCL_IB_TC="52" NCCL_LIBS="${NCCL_LIB_DIR:-none}" SEEN="$NOT_SET_ANYWHERE"
"""


def test_the_clouds_script_runs_on_each_node_and_gives_way_to_the_user(bench: Path) -> None:
    script = bench / "it's $set.sh"
    script.write_text(CLOUD_SCRIPT)
    plan = on(replace(GIB, env_profiles=(str(script),)), make_plan("cuda", nodes=2))
    ran = run(bench, emit(plan), **ALLOCATION, NCCL_IB_TC="106 or 'so'")
    assert ran.code == 0, ran.said
    for environment in ran.environments:
        assert environment["NCCL_NET"] == "gIB"
        assert environment["NCCL_IB_TC"] == "106 or 'so'"


def test_the_clouds_libraries_come_first(bench: Path) -> None:
    folder = bench / "tcpxo"
    folder.mkdir()
    script = folder / "nccl-env-profile.sh"
    script.write_text(CLOUD_SCRIPT)
    plan = on(replace(GIB, env_profiles=(str(script),)), make_plan("cuda", nodes=2))
    ran = run(bench, emit(plan), **ALLOCATION, LD_LIBRARY_PATH="/mine")
    assert ran.environments[0]["LD_LIBRARY_PATH"] == f"{folder}:/mine"
    assert ran.environments[0]["NCCL_LIBS"] == str(folder)


def test_a_clouds_script_that_is_not_there_is_missed_aloud(bench: Path) -> None:
    ran = run(bench, emit(on(GIB, make_plan("cuda", nodes=2))), **ALLOCATION)
    assert ran.code == 0
    assert f"fsdpplan: n2: {GIB.env_profiles[0]} is missing" in ran.said
