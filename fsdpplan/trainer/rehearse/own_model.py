"""Rehearse a model of the user's own: `parallelize(model, plan)` and a step, as ranks of any world.

    from fsdpplan.trainer import load_plan
    from fsdpplan.trainer.rehearse.own_model import rehearse_model

    def build():
        with torch.device("meta"):
            model = Model()
        return model, {"input_ids": torch.zeros(1, 4096, dtype=torch.int64)}

    report = rehearse_model(build, load_plan("fsdpplan.json"), ranks=(0, 1023))

The report is that of `--rehearse`; `fsdpplan rehearse --build FILE.py:build` shows it. The file is
run as the program that it is: rehearse files that you would run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..clip import clip_gradients
from ..config import PlanConfig
from ..errors import TrainerError
from ..model.weights import materialise
from ..optimizer import Recipe, make_optimizer
from ..parallel.data_parallel import gradient_sync
from ..parallel.mesh import build_meshes
from ..parallel.parallelize import parallelize
from ..private_torch import fake_tensors
from ..user.loss import is_put_off, token_loss
from ..user.pipeline import UserPipeline, forward_backward
from .counting import layout_axes
from .fake_world import FakeReplicas
from .rank import CPU, RankRehearsal, Stage, fake_cluster, measured, on_cpu
from .rehearsal import Document, rehearsed

Inputs = Mapping[str, Tensor] | Sequence[Tensor]
Arguments = Mapping[str, Any]
Build = Callable[[], tuple[nn.Module, Inputs] | tuple[nn.Module, Inputs, Arguments]]
"""Makes the model, on the meta device, and an example of what it is called with, for one
micro-batch; and what `parallelize` is told of it (`tp_plan`, `head`, `blocks`), by name."""
Loss = Callable[[Any], Tensor]

RECIPE = Recipe(steps=2, learning_rate=1e-3, warmup_steps=0, weight_decay=0.1, clip_norm=1.0)


def rehearse_model(
    build: Build, plan: PlanConfig, *, loss: Loss | None = None, ranks: Sequence[int] = (0,)
) -> Document:
    """The report of `ranks` of the plan's world training the model that `build` makes.

    `loss` makes a number of what the model returns; by default its `.loss`, or the mean of a
    tensor.
    """

    def one(rank: int, stage: Stage) -> RankRehearsal:
        small = on_cpu(plan)
        with fake_cluster(small, rank, cuda_like=plan.cluster.device.kind == "cuda"):
            program = ModelProgram(build, small, loss or loss_of_output, stage)
            return measured(program, rank, stage=stage)

    return rehearsed(plan, ranks, one)


class ModelProgram:
    """The user's model under `parallelize`, in the loop that the documentation shows.

    Whole parameters have values before `parallelize` wraps them, fake ones; shards get them after.
    """

    def __init__(self, build: Build, plan: PlanConfig, loss: Loss, stage: Stage) -> None:
        self.plan, self.loss, self.mode = plan, loss, fake_tensors()
        self.is_whole = plan.layout.sharding == "ddp"
        self.first_step_differs = self.is_whole and plan.layout.dp_replicate > 1
        stage.name = "building the model"
        self.model, self.given, self.arguments = _unpacked(build())
        if any(not parameter.is_meta for parameter in self.model.parameters()):
            raise TrainerError(
                "the model to rehearse has values: build it under `with torch.device('meta')`"
            )
        if self.is_whole:
            with self.mode:
                materialise(self.model, CPU)
        stage.name = "parallelising the model"
        self.meshes = build_meshes(plan.layout, CPU.type)
        self.axes = layout_axes(self.meshes, plan.layout)
        self.called = parallelize(self.model, plan, example=self.given, **self.arguments)
        if isinstance(self.called, UserPipeline):
            self.model = self.called  # what this rank has of it

    def begin(self) -> torch.optim.Optimizer:
        if not self.is_whole:
            materialise(self.model, CPU)
        if isinstance(self.given, Mapping):
            self.given = {name: _fake(tensor, self.mode) for name, tensor in self.given.items()}
        else:
            self.given = [_fake(tensor, self.mode) for tensor in self.given]
        return make_optimizer(self.model, RECIPE)

    def held(self) -> list[Tensor]:
        given = self.given.values() if isinstance(self.given, Mapping) else self.given
        buckets = self.called.buckets if isinstance(self.called, FakeReplicas) else ()
        return [*given, *self.model.parameters(), *self.model.buffers(), *buckets]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        layout = self.plan.layout
        if layout.pp > 1:
            self._in_a_pipeline()
        for number in range(layout.num_microbatches if layout.pp == 1 else 0):
            is_last = number == layout.num_microbatches - 1
            with gradient_sync(self.called, layout, is_last=is_last):
                self.loss(self._forward()).div(layout.num_microbatches).backward()  # type: ignore[no-untyped-call]
        copied = getattr(self.model, "copied_names", ())
        clip_gradients(self.model, self.meshes, RECIPE.clip_norm, counted_elsewhere=copied)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _in_a_pipeline(self) -> None:
        """All micro-batches at once, each of the example's inputs."""
        layout = self.plan.layout
        rows = layout.micro_batch * layout.num_microbatches
        if isinstance(self.given, Mapping):
            whole: Inputs = {name: _repeated(each, rows) for name, each in self.given.items()}
        else:
            whole = [_repeated(each, rows) for each in self.given]
        forward_backward(self.called, self.plan, whole, loss=lambda output, _: self.loss(output))

    def _forward(self) -> Any:
        if isinstance(self.given, Mapping):
            return self.called(**self.given)
        return self.called(*self.given)

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        self.given = []
        self.model.state_dict()


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return mode.from_tensor(tensor)


def _unpacked(built: tuple[Any, ...]) -> tuple[nn.Module, Inputs, Arguments]:
    model, given, *others = built
    arguments: Arguments = others[0] if others else {}
    known = {"blocks", "head", "tp_plan", "ends"}
    if len(others) > 1 or not isinstance(arguments, Mapping) or not known >= set(arguments):
        raise TrainerError(
            "the function of --build must return a model, its inputs, and at most a dict of what "
            f"parallelize is told of it ({', '.join(sorted(known))})"
        )
    return model, given, arguments


def _repeated(tensor: Tensor, rows: int) -> Tensor:
    if not tensor.ndim:
        return tensor
    return tensor.repeat(max(1, rows // tensor.shape[0]), *[1] * (tensor.ndim - 1))


def loss_of_output(output: Any) -> Tensor:
    """What a model's own loss is, or that of tokens where its head leaves that to it, or the mean
    of a tensor that it returns."""
    if isinstance(output, Tensor) and is_put_off(output):
        return token_loss(output, output.new_zeros(output.shape[:-1], dtype=torch.int64))
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(output, Tensor):
        return output.float().mean()
    raise TrainerError(
        f"the model returns {type(output).__name__}, of which no loss is known: give it labels, or "
        "rehearse_model(..., loss=FUNCTION)"
    )


def load_build(where: str) -> Build:
    """The function named by `FILE.py:FUNCTION`; the file is run."""
    file, _, name = where.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not file or not path.is_file() or spec is None or spec.loader is None:
        raise TrainerError(f"--build must be FILE.py:FUNCTION, and {where!r} names no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        raise TrainerError(f"{path} has no function {name!r}: --build must be FILE.py:FUNCTION")
    found: Build = build
    return found
