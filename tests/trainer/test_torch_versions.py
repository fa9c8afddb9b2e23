"""Releases of torch: what one lacks is refused in words, and nothing is imported that one lacks."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from fsdpplan.trainer import torch_versions
from fsdpplan.trainer.checkpoint.storage import IndexUnpickler
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.shards import local
from fsdpplan.trainer.parallel.support import require_runnable
from fsdpplan.trainer.parallel.tensor_parallel import split
from fsdpplan.trainer.rehearse.fake_world import fake_world
from tests.trainer import plans
from tests.trainer.expert_layouts import MODELS
from tests.trainer.pipeline_layouts import piped

TRAINER = Path(torch_versions.__file__).parent

IN_ALL_RELEASES = {
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
}
"""Private modules that torch 2.8 to 2.15 have: `make test-torch` imports them under each."""


def private_imports(path: Path) -> set[str]:
    """Modules of torch that importing `path` imports, and that torch does not document."""
    named: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = str(node.module)
            named.add(module)
            named |= {f"{module}.{a.name}" for a in node.names if a.name.startswith("_")}
    return {name for name in named if name.startswith("torch") and "._" in name}


@pytest.mark.parametrize("path", sorted(TRAINER.rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_needs_a_private_one_that_a_release_lacks(path: Path) -> None:
    assert private_imports(path) <= IN_ALL_RELEASES


def plan_of(kind: str = "cpu", **layout: Any) -> PlanConfig:
    document = plans.plan_document(**layout)
    document["cluster"]["device"]["kind"] = kind
    return parse_plan(json.dumps(document))


EXPERTS = {"model": MODELS["mixtral"], "ep": 2, "dp_shard": 2}
SPLIT = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}

LACKED: dict[str, tuple[tuple[int, int], PlanConfig]] = {
    "2.9": ((2, 8), plan_of(**EXPERTS, **SPLIT)),
    "2.12": ((2, 11), plan_of(**piped("zbv", pp=3, stage_blocks=[0, 2, 1, 0, 0, 1]))),
}
"""Release that ended it -> (the last one without, a plan that asks for it)."""


@pytest.mark.parametrize("since", LACKED)
def test_what_a_release_lacks_is_refused_with_the_one_that_has_it(
    since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_without, plan = LACKED[since]
    monkeypatch.setattr(torch_versions, "RELEASE", last_without)
    with pytest.raises(TrainerError, match=rf"it came with {since}: pip install 'torch>={since}'"):
        require_runnable(plan)
    first_with = tuple(int(number) for number in since.split("."))
    monkeypatch.setattr(torch_versions, "RELEASE", first_with)
    assert list(torch_versions.lacking(plan)) == []


def test_a_missing_schedule_and_a_missing_ring_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pipelining, "ScheduleDualPipeV", raising=False)
    monkeypatch.setattr(torch_versions, "has_ring_attention", lambda: False)
    with pytest.raises(TrainerError, match=r"dualpipev with torch .* plan with --schedule zbv"):
        require_runnable(plan_of(**piped("dualpipev")))
    with pytest.raises(TrainerError, match=r"ring attention \(cp 2\) with torch .*2\.10.*--cp 1"):
        require_runnable(plan_of("cuda", cp=2))
    assert list(torch_versions.lacking(plan_of(cp=2))) == []  # on CPUs ranks trade heads


@pytest.mark.skipif(torch_versions.RELEASE < (2, 12), reason="older releases lack something")
def test_new_releases_lack_nothing() -> None:
    asked = [plan for _, plan in LACKED.values()]
    asked += [plan_of(**piped("dualpipev", num_microbatches=4)), plan_of("cuda", cp=2)]
    assert [problem for plan in asked for problem in torch_versions.lacking(plan)] == []


class Unit:
    """What is told to an FSDP unit."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def set_force_sum_reduction_for_comms(self, value: bool) -> None:
        self.told["sums"] = value

    def set_gradient_divide_factor(self, value: float) -> None:
        self.told["divisor"] = value


@pytest.mark.parametrize(
    ("release", "backend", "sums"),
    [((2, 8), "gloo", True), ((2, 8), "nccl", False), ((2, 9), "gloo", False)],
)
def test_only_gloo_before_2_9_gives_sums_for_means(
    release: tuple[int, int], backend: str, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_versions, "RELEASE", release)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    unit = Unit()
    torch_versions.take_means(unit)
    assert unit.told == ({"sums": True} if sums else {})


@pytest.mark.parametrize(
    ("release", "ranks", "sums"), [((2, 9), 1, True), ((2, 10), 1, False), ((2, 10), 2, True)]
)
def test_one_rank_alone_divides_once(
    release: tuple[int, int], ranks: int, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_versions, "RELEASE", release)
    unit = Unit()
    torch_versions.divide_by(unit, 4.0, shard_ranks=ranks)
    assert unit.told == {"divisor": 4.0, "sums": sums}


def test_embeddings_of_one_shape_and_two_dtypes_have_masks_of_their_own() -> None:
    rows, here = 8, 4
    numbers = torch.arange(rows).unsqueeze(0)
    rank_0s = (numbers < here).unsqueeze(-1)
    torch_versions.tell_masks_apart()
    with fake_world(2):  # whose sums are what this rank adds to them
        mesh = init_device_mesh("cpu", (2,))
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            table = nn.Embedding(rows, 3, dtype=dtype)
            whole = table.weight.detach().clone()
            style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            split(nn.ModuleDict({"table": table}), mesh, {"table": style})
            with torch.no_grad():
                local(table.weight).copy_(whole[:here])  # nobody sent it
                found = table(numbers)
            assert torch.equal(found, torch.where(rank_0s, whole, 0))


@pytest.mark.parametrize("more", [(), ((2, 1),)], ids=["five fields", "six fields"])
def test_properties_of_any_release_are_read(more: tuple[Any, ...], tmp_path: Path) -> None:
    state = TensorProperties(dtype=torch.bfloat16).__getstate__()
    path = tmp_path / "properties"
    properties = torch_versions.ReadableProperties.__new__(torch_versions.ReadableProperties)
    properties.__setstate__((*state[:5], *more))
    assert properties.dtype == torch.bfloat16
    assert properties.layout == torch.strided
    path.write_bytes(pickle.dumps(TensorProperties(dtype=torch.float16)))
    with path.open("rb") as file:
        found = IndexUnpickler(file).load()
    assert isinstance(found, TensorProperties)
    assert found.dtype == torch.float16


def test_a_stage_keeps_no_outputs() -> None:
    kept = torch_versions.NothingKept()
    kept.append(torch.ones(2))
    assert list(kept) == []
