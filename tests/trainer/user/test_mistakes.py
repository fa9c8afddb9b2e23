"""Mistakes with models of one's own: each ends in one sentence."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdpplan.trainer import TrainerError, check_optimizer, load_plan, parallelize
from fsdpplan.trainer.config import PlanConfig, RuleConfig, parse_plan
from fsdpplan.trainer.user.mistakes import require_islands, require_same_model, warn_of_rules
from tests.trainer import plans

CPU = torch.device("cpu")


class Stack(nn.Module):
    """Blocks, and a head."""

    def __init__(self, *, head: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, head)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


@pytest.fixture
def group(alone: None) -> None:
    """A process group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def in_ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def root_only(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def blocks_too(model: nn.Module) -> nn.Module:
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (1,)))
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)


def both(model: nn.Module) -> nn.Module:
    model.head = fsdp1(model.head)
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (1,)))
    return model


def distributed(model: nn.Module) -> nn.Module:
    return distribute_module(model, init_device_mesh("cpu", (1,)))


def one_frozen(model: nn.Module) -> nn.Module:
    model.head.bias.requires_grad_(False)
    return in_ddp(model, find_unused_parameters=True)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (root_only, "only the root of this model is wrapped"),
        (blocks_too, "fully_shard was called on this model already"),
        (fsdp1, r"wrapped in FullyShardedDataParallel \(FSDP1\)"),
        (both, "FSDP1 and FSDP2 are mixed"),
        (distributed, "DTensors already"),
        (in_ddp, "wrapped in DistributedDataParallel already: .*model.module"),
        (
            lambda model: in_ddp(model, find_unused_parameters=True),
            "find_unused_parameters=True .* where none is unused .* for nothing",
        ),
        (one_frozen, r"find_unused_parameters=True .* frozen \(such as head.bias\)"),
    ],
)
def test_a_model_that_is_wrapped_already_is_refused(group: None, wrap: Any, words: str) -> None:
    with pytest.raises(TrainerError, match=words):
        parallelize(wrap(Stack()), load_plan(plans.plan_text()))


def test_blocks_that_leave_nearly_all_to_the_root_are_refused() -> None:
    with pytest.raises(TrainerError, match=r"the 3 blocks found hold .* of the parameters"):
        parallelize(Stack(head=1000), load_plan(plans.plan_text()))


@pytest.mark.parametrize("blocks", [lambda model: [model], lambda _: [nn.Linear(2, 2)]])
def test_blocks_must_be_inside_the_model(blocks: Any) -> None:
    model = Stack()
    with pytest.raises(TrainerError, match="modules inside the model"):
        parallelize(model, load_plan(plans.plan_text()), blocks=blocks(model))


@pytest.mark.gloo
def test_an_optimizer_made_before_sharding_may_not_step(group: None) -> None:
    model = Stack()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(Stack().parameters(), lr=0.1)
    parallelize(model, load_plan(plans.plan_text()))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(TrainerError, match="made before the model was sharded"):
        early.step()
    late.step()
    other.step()


@pytest.mark.gloo
def test_an_optimizer_can_be_checked_before_it_steps(group: None) -> None:
    model = Stack()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    check_optimizer(model, early)
    parallelize(model, load_plan(plans.plan_text()))
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TrainerError, match="make it after parallelize"):
        check_optimizer(model, early)


@pytest.mark.gloo
def test_ddp_keeps_the_parameters_so_an_early_optimizer_works(group: None) -> None:
    model = Stack()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = parallelize(model, load_plan(plans.plan_text(sharding="ddp")))
    wrapped(torch.ones(1, 8)).sum().backward()
    early.step()
    check_optimizer(wrapped, early)


def test_ranks_that_built_other_models_are_told(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_same_model(Stack(), CPU)

    def with_another_rank(extremes: Tensor, **_: Any) -> None:
        extremes += torch.tensor([1, 0])

    monkeypatch.setattr(dist, "all_reduce", with_another_rank)
    with pytest.raises(TrainerError, match="built different models"):
        require_same_model(Stack(), CPU)


def planned(gpus_per_node: int, *, training: dict[str, Any] | None = None, **layout: Any) -> Any:
    document = plans.plan_document(training=training, micro_batch=1, **layout)
    document["cluster"]["gpus_per_node"] = gpus_per_node
    document["training"]["global_batch"] = (
        document["layout"]["dp_replicate"] * document["layout"]["dp_shard"]
    )
    return parse_plan(json.dumps(document))


def environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


TWO_NODES = {"dp_replicate": 2, "dp_shard": 8}


@pytest.mark.parametrize(
    ("plan", "variables", "words"),
    [
        (planned(8, **TWO_NODES), {"LOCAL_WORLD_SIZE": "4"}, "4 processes were started on a node"),
        (
            planned(8, **TWO_NODES),
            {"LOCAL_WORLD_SIZE": "8", "RANK": "1", "LOCAL_RANK": "0"},
            "rank 1 is local rank 0 of 8",
        ),
    ],
)
def test_a_shard_group_across_two_islands_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: PlanConfig, variables: dict[str, str], words: str
) -> None:
    environment(monkeypatch, **variables)
    with pytest.raises(TrainerError, match=words):
        require_islands(plan)


def test_a_plan_whose_shard_groups_lie_across_islands_is_not_refused() -> None:
    require_islands(planned(4, dp_replicate=4, dp_shard=3))


@pytest.mark.parametrize(
    ("plan", "variables"),
    [
        (planned(8, **TWO_NODES), {"LOCAL_WORLD_SIZE": "8", "RANK": "9", "LOCAL_RANK": "1"}),
        (planned(8, **TWO_NODES), {"LOCAL_WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "9"}),
        (planned(8, **TWO_NODES), {}),
        (planned(8, dp_shard=16), {"LOCAL_WORLD_SIZE": "8"}),
        (planned(4, **TWO_NODES), {"LOCAL_WORLD_SIZE": "4"}),
    ],
)
def test_a_placement_as_planned_passes(
    monkeypatch: pytest.MonkeyPatch, plan: PlanConfig, variables: dict[str, str]
) -> None:
    environment(monkeypatch, **variables)
    require_islands(plan)


def test_a_plan_warns_of_each_rule_that_it_says_it_breaks() -> None:
    plan = planned(4, dp_shard=4)
    warn_of_rules(plan)
    rule = RuleConfig(rule="bf16-reduction", says="sums in bf16", advice="--reduce-dtype fp32")
    with pytest.warns(UserWarning, match="breaks bf16-reduction: sums in bf16; --reduce-dtype"):
        warn_of_rules(replace(plan, rules=(rule,)))
