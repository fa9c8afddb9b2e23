"""Faults of collectives, of gradients and of single ranks, which the numerical preflight names."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdpplan.trainer import clip, muon
from fsdpplan.trainer import step as train_step
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import RankError
from fsdpplan.trainer.numbers import trial as numbers_trial
from fsdpplan.trainer.optimizer import ShardOptimizer
from fsdpplan.trainer.parallel import context_parallel, expert_parallel
from fsdpplan.trainer.parallel.parallelize import parallelize
from fsdpplan.trainer.parallel.pipeline import Pipeline
from fsdpplan.trainer.parallel.shards import local
from fsdpplan.trainer.parallel.tied_tables import TiedTables
from fsdpplan.trainer.preflight.program import main
from fsdpplan.trainer.torch_versions import RELEASE
from tests.trainer import jobs, losses, plans
from tests.trainer.numbers_layouts import tried

Spoiled = Callable[[], AbstractContextManager[Any]]

FSDP = {"dp_shard": 4}
COPIES = {"dp_replicate": 4}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
DDP = {"dp_replicate": 4, "sharding": "ddp"}
SPLIT = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
PIPED = {
    "schedule": "1f1b",
    "num_microbatches": 4,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
DENSE = {"vocab": 64}
MIXTURE = {**DENSE, "experts": {"experts": 8, "active": 2, "hidden": 32}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is broken, under which layout, and what must be said of it."""

    layout: dict[str, Any]
    spoiled: Spoiled
    words: tuple[str, ...]
    """All of them in the sentence."""
    model: dict[str, Any] | None = None
    training: dict[str, Any] | None = None


data_parallel = import_module("fsdpplan.trainer.parallel.data_parallel")
_FSDP = inspect.getsource(import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives"))
_SPLIT = inspect.getsource(import_module("torch.distributed.tensor.placement_types"))
PARTIAL_SUM = next(
    name
    for name in ("reduce_scatter_single", "reduce_scatter_tensor")
    if f"funcol.{name}(" in _SPLIT
)
ALL_GATHER, REDUCE_SCATTER = (
    new if f"dist.{new}(" in _FSDP else old
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
"""What DTensor and FSDP call: torch has renamed them."""


def patched(where: Any, name: str, make: Callable[[Any], Any]) -> Spoiled:
    """A context in which `make(original)` stands in the place of `where.name`."""

    @contextmanager
    def context() -> Iterator[None]:
        with mock.patch.object(where, name, make(getattr(where, name))):
            yield

    return context


def is_rank(rank: int) -> bool:
    return dist.get_rank() == rank


def after(change: Callable[[Tensor, dist.ProcessGroup], None], *, key: str, group: int = 4) -> Any:
    """A collective after which `change` is done to its tensor, in groups of so many ranks."""

    def make(real: Any) -> Any:
        def collective(*args: Any, **given: Any) -> Any:
            work = real(*args, **given)
            tensor = given[key] if key in given else args[0]
            of = given.get("group")
            if of is not None and of.size() == group:
                if work is not None:
                    work.wait()
                change(tensor, of)
            return work

        return collective

    return make


def before(change: Callable[[Tensor, dist.ProcessGroup], None]) -> Any:
    """A reduce-scatter before which `change` is done to what goes in."""

    def make(real: Any) -> Any:
        def collective(*args: Any, **given: Any) -> Any:
            tensor = given["input"] if "input" in given else args[1]
            change(tensor, given["group"])
            return real(*args, **given)

        return collective

    return make


def times(factor: float) -> Callable[[Tensor, dist.ProcessGroup], None]:
    def change(tensor: Tensor, _: dist.ProcessGroup) -> None:
        tensor.mul_(factor)

    return change


def flip_a_bit(tensor: Tensor, _: dist.ProcessGroup | None = None) -> None:
    """The lowest bit of the first number, on rank 3."""
    if is_rank(3) and tensor.numel():
        tensor.view(torch.int32).flatten()[0] ^= 1


def drop(tensor: Tensor, _: dist.ProcessGroup) -> None:
    if is_rank(2):
        tensor.zero_()


def roll(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Each rank's part becomes its neighbour's."""
    parts = tensor.view(group.size(), -1)
    parts.copy_(parts.roll(1, 0).clone())


@contextmanager
def stale() -> Iterator[None]:
    """All-gathers that bring, after the optimizer's step, what they brought before."""
    gather, update = getattr(dist, ALL_GATHER), ShardOptimizer.step
    brought: list[Tensor] = []
    places: list[int] = []

    def gathering(*args: Any, **given: Any) -> Any:
        work = gather(*args, **given)
        out = given["output_tensor"] if "output_tensor" in given else args[0]
        if work is not None:
            work.wait()
        if not places:
            brought.append(out.clone())
        elif places[0] < len(brought):
            out.copy_(brought[places[0]])
            places[0] += 1
        return work

    def stepped(optimizer: Any, *args: Any, **given: Any) -> None:
        update(optimizer, *args, **given)
        if is_distributed(optimizer):
            places[:] = [0]

    with (
        mock.patch.object(dist, ALL_GATHER, gathering),
        mock.patch.object(ShardOptimizer, "step", stepped),
    ):
        yield


def is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    """Not that of the one process that all is compared with."""
    group, *_ = optimizer.param_groups
    return isinstance(group["params"][0], DTensor)


def no_sum_over(axis: str) -> Callable[[Any], Any]:
    def make(real: Any) -> Any:
        return lambda values, meshes, *axes: real(values, meshes, *(a for a in axes if a != axis))

    return make


def after_optimizer(
    change: Callable[[list[Tensor]], None], *, spares_one_process: bool = True
) -> Callable[[Any], Any]:
    """An update after which `change` is done to the parameters; under DDP those of the one process
    that all is compared with look the same."""

    def make(real: Any) -> Any:
        def stepped(optimizer: Any, *args: Any, **given: Any) -> None:
            real(optimizer, *args, **given)
            if spares_one_process and not is_distributed(optimizer):
                return
            with torch.no_grad():
                change([local(p) for group in optimizer.param_groups for p in group["params"]])

        return stepped

    return make


def move_on_rank_1(parameters: list[Tensor]) -> None:
    if is_rank(1):
        for parameter in parameters:
            parameter.mul_(0.99)


def without_gradients_of_rank(rank: int) -> Callable[[Any], Any]:
    """The stages of a pipeline rank get gradients that are 0."""

    def make(real: Any) -> Any:
        def run(pipeline: Any, *args: Any, **given: Any) -> Any:
            out = real(pipeline, *args, **given)
            if dist.get_rank() // 2 == rank:
                for stage in pipeline._stages.values():
                    for parameter in stage.parameters():
                        local(parameter.grad).zero_()
            return out

        return run

    return make


def forgetful(real: Any) -> Any:
    """Every second backward pass, from the first on, adds nothing."""
    calls: list[int] = []

    def scaled(loss: Tensor, scaler: Any) -> Tensor:
        calls.append(1)
        return real(loss * (0 if len(calls) % 2 else 1), scaler)

    return scaled


def unsummed(real: Any) -> Any:
    """A reduce-scatter that gives each rank its own part."""
    named = inspect.signature(real)

    def collective(*args: Any, **given: Any) -> Tensor:
        tensor, _, dim, group, *_ = named.bind(*args, **given).arguments.values()
        mesh, axis = group if isinstance(group, tuple) else (group, 0)
        mine: Tensor = tensor.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)]
        return mine.contiguous() + 0 * real(*args, **given)

    return collective


def one_rank_missing(real: Any) -> Any:
    """What the second rank of the group sends does not come."""

    def exchange(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
        received = real(slices, group)
        keep = torch.ones(len(received), *[1] * (received.ndim - 1))
        keep[1] = 0
        return received * keep

    return exchange


def wrong_rows(real: Any) -> Any:
    """Rows of tokens arrive in another order."""
    return lambda rows, *others: real(rows, *others).roll(1, 0)


def louder(real: Any) -> Any:
    """Messages between stages are half as large again."""

    def send(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is dist.isend and operation.tensor.is_floating_point():
                operation.tensor = operation.tensor * 1.5
        return real(operations)

    return send


def in_16_bits(change: Callable[[Tensor, dist.ProcessGroup], None]) -> Any:
    def only(tensor: Tensor, group: dist.ProcessGroup) -> None:
        if tensor.dtype == torch.bfloat16:
            change(tensor, group)

    return only


@contextmanager
def ddp_that_keeps_gradients() -> Iterator[None]:
    """DDP that never reduces."""
    real = numbers_trial.assemble

    def assemble(*args: Any, **given: Any) -> Any:
        assembled = real(*args, **given)
        assembled.parts[0].require_backward_grad_sync = False
        return assembled

    with mock.patch.object(numbers_trial, "assemble", assemble):
        yield


SCATTER = partial(after, key="output")
REDUCE = partial(after, key="tensor")
GATHER = partial(after, key="output_tensor")

FAULTS: dict[str, Fault] = {
    "a sum for a mean over dp_shard": Fault(
        layout=FSDP,
        spoiled=patched(dist, REDUCE_SCATTER, SCATTER(times(4.0))),
        words=("4 times too large: sums where they should be means, over dp_shard (4 ranks)",),
    ),
    "a sum for a mean over dp_replicate": Fault(
        layout=COPIES,
        spoiled=patched(dist, "all_reduce", REDUCE(times(4.0))),
        words=("4 times too large: sums where they should be means, over dp_replicate (4 ranks)",),
    ),
    "a mean of a mean": Fault(
        layout=FSDP,
        spoiled=patched(dist, REDUCE_SCATTER, SCATTER(times(0.25))),
        words=("4 times too small: divided twice, over dp_shard (4 ranks)",),
    ),
    "a dropped rank": Fault(
        layout=FSDP,
        spoiled=patched(dist, REDUCE_SCATTER, before(drop)),
        words=("the part of rank 2 is missing in the gradients",),
    ),
    "a bit of a gradient of one replica of four": Fault(
        layout=COPIES,
        spoiled=patched(dist, "all_reduce", REDUCE(flip_a_bit)),
        words=("differ after a step, first in the gradient of", "rank 3 on", "has other bits"),
    ),
    "a bit of a parameter of one replica of four": Fault(
        layout=DDP,
        spoiled=patched(
            ShardOptimizer,
            "step",
            after_optimizer(lambda parameters: flip_a_bit(parameters[0]), spares_one_process=False),
        ),
        words=("differ after a step, first in", "rank 3 on", "has other bits than the others"),
    ),
    "a bit of a parameter of one replica of two": Fault(
        layout=HSDP,
        spoiled=patched(
            ShardOptimizer, "step", after_optimizer(lambda parameters: flip_a_bit(parameters[0]))
        ),
        words=("replicas of dp_replicate (ranks 1, 3) differ after a step",),
    ),
    "norms not added up over dp_shard": Fault(
        layout=FSDP,
        spoiled=patched(clip, "sum_over", no_sum_over("dp_shard")),
        words=("the gradient norm is", "the squares of the ranks of dp_shard are not added up"),
    ),
    "norms not added up over tp": Fault(
        layout={"dp_shard": 2, **SPLIT},
        spoiled=patched(clip, "sum_over", no_sum_over("tp")),
        model=DENSE,
        words=("the gradient norm is", "the squares of the ranks of tp are not added up"),
    ),
    "norms not added up over pp": Fault(
        layout={"dp_shard": 2, "pp": 2, **PIPED},
        spoiled=patched(clip, "sum_over", no_sum_over("pp")),
        words=("the gradient norm is", "the squares of the ranks of pp are not added up"),
    ),
    "a stage without gradients": Fault(
        layout={"dp_shard": 2, "pp": 2, **PIPED},
        spoiled=patched(Pipeline, "forward_backward", without_gradients_of_rank(1)),
        words=("are missing: those of pipeline rank 1 of 2", "ranks 2, 3"),
    ),
    "experts divided by the ranks of their group": Fault(
        layout={"dp_shard": 4, "ep": 2},
        spoiled=patched(FSDPModule, "set_gradient_divide_factor", lambda _: lambda *__: None),
        model=MIXTURE,
        words=("the gradients of the routed experts", "2 times too large", "ep (2 ranks)"),
    ),
    "a gradient scaled twice": Fault(
        layout=FSDP,
        spoiled=patched(train_step, "scaled", lambda _: lambda loss, scaler: 2 * loss),
        words=("the gradients of all parameters are twice too large",),
    ),
    "a loss scaled twice": Fault(
        layout=FSDP,
        spoiled=patched(
            train_step,
            "loss_function",
            lambda real: lambda *args: lambda *given: 2 * real(*args)(*given),
        ),
        words=("the loss is", "2 times too large, on all ranks"),
    ),
    "a partial sum of tp that is skipped": Fault(
        layout={"dp_shard": 2, **SPLIT},
        spoiled=patched(functional, PARTIAL_SUM, unsummed),
        model=DENSE,
        words=("the forward pass is wrong from tok_embeddings on", "tp (2 ranks)"),
    ),
    "keys of a rank of cp that are missing": Fault(
        layout={"dp_shard": 2, "cp": 2},
        spoiled=patched(context_parallel, "exchange", one_rank_missing),
        words=("the forward pass is wrong from layers.0.attention on", "cp (2 ranks)"),
    ),
    "rows of experts in another order": Fault(
        layout={"dp_shard": 4, "ep": 2},
        spoiled=patched(expert_parallel, "exchange_rows", wrong_rows),
        model=MIXTURE,
        words=("the forward pass is wrong from layers.0.feed_forward on", "ep (2 ranks)"),
    ),
    "messages between stages": Fault(
        layout={"dp_shard": 2, "pp": 2, **PIPED},
        spoiled=patched(dist, "batch_isend_irecv", louder),
        words=("wrong from the input of layers.1 on", "what the stage before sends"),
    ),
    "an all-gather of other ranks' shards": Fault(
        layout=FSDP,
        spoiled=patched(dist, ALL_GATHER, GATHER(roll)),
        words=(
            "forward is given wrong parameters",
            "the all-gather over dp_shard brings other values",
        ),
    ),
    "an all-gather of old shards": Fault(
        layout=FSDP | {"reshard_after_forward": "never"},
        spoiled=stale,
        words=("the loss of a second step", "other parameters than the first step left"),
    ),
    "a reduce-scatter in another order": Fault(
        layout=FSDP,
        spoiled=patched(dist, REDUCE_SCATTER, before(roll)),
        words=("the reduce-scatter over dp_shard gives", "belongs to number"),
    ),
    "an accumulation that forgets a micro-batch": Fault(
        layout=FSDP | {"num_microbatches": 2},
        spoiled=patched(train_step, "scaled", forgetful),
        words=("micro-batch 1 of 2 is missing in the gradients",),
    ),
    "tied tables that are not summed": Fault(
        layout={"dp_shard": 2, "pp": 2, **PIPED},
        spoiled=patched(TiedTables, "sum_gradients", lambda _: lambda __: None),
        model={**DENSE, "tied_embeddings": True},
        words=("the table that embedding and head share are not added up over pp",),
    ),
    "an all-reduce that adds twice": Fault(
        layout=COPIES,
        spoiled=patched(dist, "all_reduce", REDUCE(times(2.0))),
        words=("twice too large: something is added or scaled twice",),
    ),
    "replicas that are not reduced": Fault(
        layout=DDP,
        spoiled=ddp_that_keeps_gradients,
        words=("the gradients are not averaged over dp_replicate: each replica keeps its own",),
    ),
    "an optimizer that is broken on one rank": Fault(
        layout=FSDP,
        spoiled=patched(ShardOptimizer, "step", after_optimizer(move_on_rank_1)),
        words=("adamw makes another step than in one process", "on rank 1 on"),
    ),
    "Muon's matrices that come back to others": Fault(
        layout=FSDP,
        spoiled=patched(
            muon,
            "orthogonal_shards",
            lambda real: lambda *args: [part.flip(0) for part in real(*args)],
        ),
        training={"optimizer": "muon"},
        words=("muon makes another step than in one process",),
    ),
    "a sum for a mean in bf16 alone": Fault(
        layout=FSDP,
        spoiled=patched(dist, REDUCE_SCATTER, SCATTER(in_16_bits(times(4.0)))),
        training={"precision": "bf16", "reduce_dtype": "bf16"},
        words=("in bf16, reduced in bf16, the gradients are 4 times too large", "dp_shard"),
    ),
}


if RELEASE < (2, 9):
    FAULTS["the sums of gloo before torch 2.9, not made up for"] = Fault(
        layout=FSDP,
        spoiled=patched(data_parallel, "take_means", lambda _: lambda __: None),
        words=("4 times too large: sums where they should be means, over dp_shard (4 ranks)",),
    )


def try_some(out: Path) -> None:
    """The faults that are asked for, on 4 ranks; rank 0 writes what was said of each."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, fault in jobs.asked_of(FAULTS).items():
        text = plans.plan_text(model=fault.model, training=fault.training, **fault.layout)
        with fault.spoiled():
            results[name] = tried(parse_plan(text))["problem"]
    jobs.leave_with(results, out)


def raises_on_a_rank(_: Path) -> NoReturn:
    """Rank 1 cannot make its step."""
    if is_rank_of_environment(1):
        numbers_trial.train_step = _raise  # type: ignore[assignment]
    _run_preflight()


def waits_on_a_rank(_: Path) -> NoReturn:
    """Rank 1 does something else in the middle of its step."""
    if is_rank_of_environment(1):
        numbers_trial.train_step = lambda *_, **__: time.sleep(600)  # type: ignore[assignment]
    _run_preflight("2")


def ends_a_program(_: Path) -> None:
    """A program of one's own, whose collectives add where they should average."""
    dist.init_process_group("gloo")
    change = SCATTER(times(2.0), group=2)
    setattr(dist, REDUCE_SCATTER, change(getattr(dist, REDUCE_SCATTER)))
    try:
        parallelize(losses.Stack(), parse_plan(plans.plan_text(dp_shard=2)), numbers=True)
    except ValueError as error:  # as the interpreter does with what nobody catches
        sys.excepthook(type(error), error, error.__traceback__)


def _run_preflight(seconds: str = "30") -> NoReturn:
    os.environ["SLURMD_NODENAME"] = f"node{1 + int(os.environ['RANK'])}"
    os.environ["FSDPPLAN_PLAN"] = plans.plan_text(dp_shard=2)
    main(["--numbers", "--preflight-seconds", seconds])


def _raise(*_: Any, **__: Any) -> NoReturn:
    raise RankError("layers.0.ffn_norm.weight has no gradient")


def is_rank_of_environment(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank
