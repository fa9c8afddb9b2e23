from __future__ import annotations

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl import environment
from tests.emit.plans import make_plan


def test_nothing_of_nccl_is_set_without_a_reason() -> None:
    for plan in (make_plan("cpu"), make_plan("cuda"), make_plan("cuda", nodes=4)):
        names = [variable.name for variable in environment(plan=plan, job=Job())]
        assert not any(name.startswith(("NCCL_", "TORCH_NCCL_")) for name in names)


def test_the_log_of_nccl_is_set_when_asked_for() -> None:
    (variable,) = [
        variable
        for variable in environment(plan=make_plan("cuda"), job=Job(nccl_debug="INFO"))
        if variable.name == "NCCL_DEBUG"
    ]
    assert variable.default == "INFO"


def test_every_variable_has_a_reason() -> None:
    for plan in (make_plan("cpu"), make_plan("cuda")):
        for variable in environment(plan=plan, job=Job(nccl_debug="WARN")):
            assert len(variable.reason) > 20
