"""A user's model in a pipeline, and the step that is the same for every plan.

    loss = forward_backward(model, plan, inputs, targets)

All micro-batches go through forward and backward: one after another, or by the plan's schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..config import PlanConfig
from ..errors import TrainerError
from ..parallel.data_parallel import gradient_sync
from ..parallel.gradient_sums import PipelineSums
from ..parallel.local_parameters import hand_over_gradients
from ..parallel.mesh import Meshes
from ..parallel.pipeline import planned_schedule, stated_stage
from ..parallel.replicas import ReplicaGradients
from ..parallel.tied_tables import TiedTables
from ..text.packing import IGNORED
from ..torch_versions import keep_no_outputs
from .loss import Loss, OwnTargets, loss_of, own_targets, takes_count
from .stages import POSITION, TARGETS, Cut, Stage, from_names, merged
from .targets import NUM_ITEMS, targets_per_micro_batch, uncounted
from .trace import Inputs, Trace, called_with


class UserPipeline(nn.Module):
    """What a rank has of a user's model: parameters and buffers under their names in the whole
    model. It is not called, but stepped, by `forward_backward`."""

    def __init__(
        self,
        cut: Cut,
        trace: Trace,
        stages: Sequence[Stage],
        plan: PlanConfig,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert meshes.pp is not None
        whole = merged(cut, stages)
        self._modules.update(whole._modules)
        self._parameters, self._buffers = whole._parameters, whole._buffers
        self._non_persistent_buffers_set = cut.model._non_persistent_buffers_set
        config = getattr(cut.model, "config", None)
        if config is not None:
            self.config = config
        if callable(fill := getattr(cut.model, "_init_weights", None)):
            self._init_weights = fill
        self.whole_names = frozenset(cut.model.state_dict(keep_vars=True))
        """Of what a checkpoint of the whole model holds."""
        here = cut.copies if any(stage.share.is_last for stage in stages) else {}
        self.copied_names = dict(here)
        """Name of each parameter here that is another stage's, too -> its name there."""
        self._stages, self._plan = tuple(stages), plan
        self._pp, self._device = meshes.pp, device
        self._copies = _copies(cut, stages)
        self._copies_are_equal = False
        self._own_targets = own_targets(cut.model)
        self._sums = PipelineSums.of([stage.module for stage in stages], plan.layout)
        self._replicas: ReplicaGradients | None = None
        if plan.layout.sharding == "ddp" and meshes.axis("dp_replicate") is not None:
            group = meshes.parameters["dp_replicate"].get_group()
            self._replicas = ReplicaGradients([stage.module for stage in stages], plan, group)
        layout = plan.layout
        _, length, *others = trace.hidden_shape
        batch = layout.micro_batch
        # each rank of tp hands over its own part of the sequence
        length = length // layout.tp if layout.sequence_parallel else length
        hidden = torch.empty(
            (batch, length, *others),
            dtype=trace.hidden_dtype,
            device="meta",
            requires_grad=True,
        )
        for stage in stages:
            stage.hands_on = hidden
        first = torch.empty((batch,), dtype=torch.int64, device="meta")
        staged = [
            stated_stage(
                stage.module,
                stage.share,
                plan,
                device,
                meshes.pp.get_group(),
                first=first,
                hidden=hidden,
            )
            for stage in stages
        ]
        if self._sums is not None:
            self._sums.watch(staged)
        self._schedule = planned_schedule(plan, staged, lambda loss, _: loss)
        self._no_outputs = keep_no_outputs(self._schedule, staged)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise TrainerError(
            f"a model in a pipeline of {self._plan.layout.pp} is not called by itself: call "
            "fsdpplan.trainer.forward_backward(model, plan, inputs, targets), which runs all "
            "micro-batches"
        )

    def train(self, mode: bool = True) -> UserPipeline:
        """The mode of the stages, too."""
        for stage in getattr(self, "_stages", ()):
            stage.module.train(mode)
        super().train(mode)
        return self

    def step(self, inputs: Inputs, targets: Tensor | None, loss: Loss | None) -> Tensor:
        """Gradients of the mean loss over the targets; all ranks get this replica's part of it."""
        layout = self._plan.layout
        if not self._copies_are_equal:
            self._equalise_copies()
        rows = layout.micro_batch * layout.num_microbatches
        given = _by_name(inputs, targets, rows)
        counted = _counted(given, self._own_targets, self._plan, loss)
        losses: list[Tensor] = []

        def scaled(output: Any, named: Mapping[str, Any]) -> Tensor:
            one = loss_of(output, named.get(TARGETS), loss, counted.count)
            return one / layout.num_microbatches

        for stage in self._stages:
            stage.loss_of = scaled if stage.share.is_last else None
            stage.beside = counted.beside
        if self._sums is not None:
            self._sums.begin()
        if self._replicas is not None:
            self._replicas.begin()
        places = torch.zeros(rows, dtype=torch.int64, device=self._device)
        try:
            self._schedule.step(
                *((places,) if self._has("is_first") else ()),
                target=places if self._has("is_last") else None,
                losses=losses,
                **self._no_outputs,
                **given,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, TrainerError):  # torch tells what the stage was given
                raise error.__cause__ from None
            raise
        counted.require_used(here=self._has("is_last"), device=self._device)
        if self._replicas is not None:
            self._replicas.finish()
        # sums over tensor-parallel ranks that no one has made yet
        hand_over_gradients(stage.module for stage in self._stages)
        for _, table, copy in self._copies:
            self._tied(table, copy).sum_gradients()
        mean = torch.stack(losses).detach().sum() if losses else _no_loss(self._device)
        dist.all_reduce(mean, group=self._pp.get_group())
        return mean

    def _has(self, end: str) -> bool:
        return any(getattr(stage.share, end) for stage in self._stages)

    def _tied(self, table: _Place | None, copy: _Place | None) -> TiedTables:
        return TiedTables([place() for place in (table, copy) if place is not None], self._pp)

    @torch.no_grad()
    def _equalise_copies(self) -> None:
        """Give each copy the values of what it is a copy of, once."""
        group = self._pp.get_group()
        ends = dist.get_global_rank(group, 0), dist.get_global_rank(group, group.size() - 1)
        for _, table, copy in self._copies:
            if table is not None and copy is not None:
                _local(copy()).copy_(_local(table()))
            elif table is not None:
                dist.send(_local(table()), ends[1], group=group)
            elif copy is not None:
                dist.recv(_local(copy()), ends[0], group=group)
        self._copies_are_equal = True


_Place = Callable[[], nn.Parameter]
"""A parameter, which sharding and materialising replace, when it is asked for."""


def _copies(cut: Cut, stages: Sequence[Stage]) -> list[tuple[str, _Place | None, _Place | None]]:
    """Of each copied parameter: where this rank has it, and where its copy."""
    ends = {
        end: next((s.module for s in stages if getattr(s.share, end)), None)
        for end in ("is_first", "is_last")
    }
    found = []
    seen: set[int] = set()
    for copy, table in sorted(cut.copies.items()):
        whole = cut.model.get_parameter(table)
        first, last = ends["is_first"], ends["is_last"]
        if id(whole) in seen or (first is None and last is None):
            continue
        seen.add(id(whole))
        found.append(
            (
                copy,
                None if first is None else _place(first, table),
                None if last is None else _place(last, copy),
            )
        )
    return found


def _place(module: nn.Module, name: str) -> _Place:
    return lambda: module.get_parameter(name)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _no_loss(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


def _by_name(inputs: Inputs, targets: Tensor | None, rows: int) -> dict[str, Any]:
    """All that a stage is given, by name; tensors have a row for each sequence."""
    args, named = called_with(inputs)
    given: dict[str, Any] = {f"{POSITION}{number}": each for number, each in enumerate(args)}
    given |= named
    if targets is not None:
        given[TARGETS] = targets
    return {name: _with_rows(name, value, rows) for name, value in given.items()}


def _with_rows(name: str, value: Any, rows: int) -> Any:
    if not isinstance(value, Tensor) or not value.ndim or value.shape[0] == rows:
        return value
    if value.shape[0] == 1:
        return value.expand(rows, *value.shape[1:])
    raise TrainerError(
        f"{name.removeprefix(POSITION)} has {value.shape[0]} rows, and a step of the plan has "
        f"{rows} sequences a rank (micro-batch x micro-batches): give forward_backward all of them"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """What the losses of a step are divided by."""

    count: Tensor | None
    """Mean number of targets of a micro-batch; None where no targets are known."""
    beside: dict[str, Any]
    """What the model is given of it."""
    unsure: Sequence[Tensor] = ()
    """The targets of each micro-batch, where the model's own loss may leave the count aside."""
    num_counted: int
    """Losses that had been given a count before the step."""
    is_watched: bool
    """Whether losses may be divided by something else."""

    def require_used(self, *, here: bool, device: torch.device) -> None:
        """Raise where losses were divided by unequal numbers of targets of their own; all ranks
        call this after the step. `here`: this rank has computed them."""
        if not self.is_watched:
            return
        if here and uncounted.num_counted < self.num_counted + len(self.unsure):
            for targets in self.unsure:
                uncounted.add((targets != IGNORED).sum())
        uncounted.require_equal(device)


def _counted(
    given: dict[str, Any], own: OwnTargets, plan: PlanConfig, loss: Loss | None
) -> _Counted:
    """The targets of a step in what it is given by name, counted over all ranks; a count that the
    user gives is taken out of it."""
    by_user = given.pop(NUM_ITEMS, None)
    targets: Tensor | None = given[TARGETS] if TARGETS in given else own.of(given)
    is_own = loss is None and TARGETS not in given
    is_taken = own.takes_count if is_own else loss is None or takes_count(loss)
    count: Tensor | None = by_user
    if by_user is None and targets is not None and is_taken:
        count = targets_per_micro_batch(plan, targets)
    unsure: Sequence[Tensor] = ()
    is_sure = by_user is not None or (own.takes_count and own.names_count)
    if is_own and targets is not None and not is_sure:
        unsure = _parts(targets, plan.layout.num_microbatches)
    return _Counted(
        count=count,
        beside={NUM_ITEMS: count} if is_own and count is not None else {},
        unsure=unsure,
        num_counted=uncounted.num_counted,
        is_watched=is_own or loss is not None,
    )


def forward_backward(
    model: nn.Module,
    plan: PlanConfig,
    inputs: Inputs,
    targets: Tensor | None = None,
    *,
    loss: Loss | None = None,
) -> Tensor:
    """Forward and backward of all micro-batches of a step; returns this rank's part of the loss:
    averaged over the ranks it is the mean over all targets of the step.

    `inputs` and `targets` have a row for each sequence of the step; they are cut into the plan's
    micro-batches. The loss is `loss(output, targets)`, by default `token_loss` where there are
    targets, and else the `.loss` that the model returns. In a pipeline all its ranks give the same
    rows and get the loss.

    Targets other than -100 are counted once, over all micro-batches and ranks, and the loss of each
    micro-batch is its sum over their mean number in a micro-batch: `token_loss` and the losses of
    Hugging Face models are given that, a `loss` that has an argument `num_items_in_batch` gets it.
    Other losses are refused where numbers of targets are unequal; a model of one's own that takes
    `num_items_in_batch` is given it in `inputs`.
    """
    if isinstance(model, UserPipeline):
        return model.step(inputs, targets, loss)
    layout = plan.layout
    number, rows = layout.num_microbatches, layout.micro_batch * layout.num_microbatches
    given = _by_name(inputs, targets, rows)
    counted = _counted(given, own_targets(_inner(model)), plan, loss)
    cut = {name: _parts(value, number) for name, value in given.items()}
    total: Tensor | None = None
    for index in range(number):
        part = {name: values[index] for name, values in cut.items()}
        goal = part.pop(TARGETS, None)
        with gradient_sync(model, layout, is_last=index == number - 1):
            args, named = from_names(part)
            output = model(*args, **named, **counted.beside)
            one = loss_of(output, goal, loss, counted.count) / number
            del output  # it would keep the logits through backward
            one.backward()  # type: ignore[no-untyped-call]
        total = one.detach() if total is None else total + one.detach()
    assert total is not None
    counted.require_used(here=True, device=total.device)
    return total


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _parts(value: Any, number: int) -> Sequence[Any]:
    if isinstance(value, Tensor) and value.ndim:
        return value.tensor_split(number)
    return [value] * number
