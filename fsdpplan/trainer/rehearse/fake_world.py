"""A world of any size in one process: ranks that are not there, tensors that hold nothing.

DistributedDataParallel for tensors that hold nothing.

Its reducer is C++ that needs real gradients, so the one part of a rehearsal that is not the program
itself is this stand-in: buckets by torch's own function, in the order in which backward finishes
gradients, reduced when they are full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from ..parallel.ddp_hooks import reduce_in_dtype, reduce_low_rank
from ..private_torch import (
    ddp_buckets,
    ddp_first_bucket_bytes,
    forget_meshes,
    join_fake_group,
    own_propagation_mode,
    replaced,
)


@contextmanager
def fake_world(ranks: int, *, rank: int = 0) -> Iterator[None]:
    """A process group of `ranks` of which this process is `rank`, alone.

    Meshes must be made in it but outside of a fake mode: they look into their rank tensor.
    """
    join_fake_group(rank=rank, world=ranks)
    try:
        with own_propagation_mode():
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


class _FusedRMSNorm(torch.autograd.Function):
    """Saves what CUDA's fused RMSNorm saves: input, weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor, epsilon: float) -> Tensor:
    if isinstance(x, DTensor):
        assert isinstance(weight, DTensor)
        local = weight.to_local(grad_placements=[Partial()])
        out = _fused_rms_norm(x.to_local(), shape, local, epsilon)
        return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)
    if torch.is_autocast_enabled("cpu"):
        x, weight = x.float(), weight.float()
    normalised: Tensor = _FusedRMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normalised


def _fused_rms_norm_forward(module: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    return _fused_rms_norm(x, module.normalized_shape, module.weight, module.eps or 0.0)


@contextmanager
def cuda_like_norms() -> Iterator[None]:
    """Replace RMSNorm's composite CPU kernel, which saves two fp32 copies of its input.

    Under autocast to bf16, CUDA computes it in fp32 (torch 2.13, `AT_FORALL_FP32`).
    """
    forward, function = torch.nn.RMSNorm.forward, torch.nn.functional.rms_norm
    torch.nn.RMSNorm.forward = _fused_rms_norm_forward  # type: ignore[assignment, method-assign]
    torch.nn.functional.rms_norm = _fused_rms_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.RMSNorm.forward = forward  # type: ignore[method-assign]
        torch.nn.functional.rms_norm = function


@contextmanager
def cuda_like_dropout() -> Iterator[None]:
    """Let attention drop as CUDA's fused kernels do, which keep a seed: on CPUs scores would be
    written."""
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attend(*heads: Tensor, dropout_p: float = 0.0, **given: Any) -> Tensor:
        out: Tensor = original(*heads, **given)
        return out

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def nothing_to_draw() -> Iterator[None]:
    """Fake tensors have no numbers: `normal_` writes zeros, whatever generator it is given."""
    original = torch.Tensor.normal_

    def normal_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.zero_()

    torch.Tensor.normal_ = normal_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.normal_ = original  # type: ignore[method-assign]


LEAST_8BIT_ELEMENTS = 4096
"""Of a tensor whose moments torchao keeps in 8 bits."""


@contextmanager
def updates_in_place() -> Iterator[None]:
    """Let torchao's update of a parameter, which it compiles into kernels that write in place, do
    nothing: beneath dispatch modes nothing is compiled, and its operators one by one would make
    temporaries that are as large as the parameter many times over."""
    if find_spec("torchao") is None:
        yield
        return
    adam: Any = import_module("torchao.optim.adam")

    def update(*_: object) -> None:
        """Leave all as it is."""

    with (
        replaced(adam, "single_param_adam", update),
        torch.compiler.set_stance("force_eager"),
    ):
        # it makes its tables when they are first asked for, and reads their values
        whole = nn.Parameter(torch.zeros(LEAST_8BIT_ELEMENTS))
        whole.grad = torch.zeros_like(whole)
        adam.AdamW8bit([whole]).step()
        yield


data_parallel: Any = import_module("..parallel.data_parallel", __package__)
"""The module, as one of whose names another may be put."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBucket:
    """What a hook asks of a bucket."""

    whole: Tensor
    parts: list[Tensor]
    number: int
    is_the_last: bool

    def buffer(self) -> Tensor:
        """Of all gradients."""
        return self.whole

    def gradients(self) -> list[Tensor]:
        """Views of that."""
        return self.parts

    def index(self) -> int:
        """Its place in the order of reductions."""
        return self.number

    def is_last(self) -> bool:
        """Of a backward pass."""
        return self.is_the_last


class _Done(NamedTuple):
    """A collective that has run."""

    tensor: Tensor

    def get_future(self) -> Any:
        """Of its result, there already."""
        future: Any = torch.futures.Future()
        future.set_result([self.tensor])
        return future


@contextmanager
def done_at_once() -> Iterator[None]:
    """Let all-reduces of a hook give a future: those of the fake group have none with a value."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *, group: Any = None, async_op: bool = False) -> _Done:
        assert async_op
        original(tensor, group=group)
        return _Done(tensor)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_reduce = original


class FakeReplicas(nn.Module):
    """In the place of DDP, with those of its arguments that the trainer gives.

    As there, all gradients are one bucket in the first step, and in later ones buckets of a limit,
    of which the first is small unless the limit was given (torch 2.13, nn/parallel/distributed.py,
    BucketCapacityConfig).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = process_group
        cap = data_parallel.DDP_DEFAULT_BUCKET_BYTES
        first = ddp_first_bucket_bytes()
        if bucket_cap_mb is not None:
            cap = first = int(bucket_cap_mb * 2**20)
        self.limits_bytes = [first, cap]
        self.syncs = True
        self.is_settled = False
        self.reduced_dtype: torch.dtype | None = None
        """None: the gradients' own."""
        self.power_sgd: Any = None
        """The state of PowerSGD's hook, if that reduces them."""
        self.reduced: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.finished: list[Tensor] = []
        self._fill([self.reduced])
        for parameter in self.reduced:
            parameter.register_post_accumulate_grad_hook(self._finish)  # type: ignore[no-untyped-call]

    def _fill(self, buckets: list[list[Tensor]]) -> None:
        """Make the memory of `buckets`, of which gradients are parts."""
        self.gradient_of: dict[Tensor, Tensor] = {}
        self.bucket_of: dict[Tensor, int] = {}
        self.buckets = []
        for number, parameters in enumerate(buckets):
            length = sum(p.numel() for p in parameters)
            whole = parameters[0].new_zeros(length)
            self.buckets.append(whole)
            parts = torch.split(whole, [p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                self.gradient_of[parameter] = part.view(parameter.shape)
                self.bucket_of[parameter] = number

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.syncs and len(self.finished) == len(self.reduced):
            order = ddp_buckets(self.finished, self.limits_bytes)
            if len(self.buckets) == 1 and len(order) > 1:
                self._fill([[self.finished[index] for index in bucket] for bucket in order])
            self._settle()
        if self.syncs:
            self.finished = []
            self.missing = [
                list(self.bucket_of.values()).count(n) for n in range(len(self.buckets))
            ]
        return self.module(*inputs, **named)

    def _finish(self, parameter: Tensor) -> None:
        """Keep the gradient in its bucket, and reduce that if it was the last one.

        Without synchronisation gradients stay where backward makes them, as DDP leaves them.
        """
        if not self.syncs:
            return
        assert parameter.grad is not None
        if parameter.grad is not self.gradient_of[parameter]:
            self.gradient_of[parameter].copy_(parameter.grad)
            parameter.grad = self.gradient_of[parameter]
        self.finished.append(parameter)
        number = self.bucket_of[parameter]
        self.missing[number] -= 1
        if not self.missing[number]:
            self._reduce(number)

    def _reduce(self, number: int) -> None:
        bucket = self.buckets[number]
        if self.power_sgd is not None and self.is_settled:
            self._compress(number)
            return
        sent = bucket.to(self.reduced_dtype or bucket.dtype)
        dist.all_reduce(sent, group=self.group)
        if sent is not bucket:
            bucket.copy_(sent)

    def _settle(self) -> None:
        """Buckets stay as they are from here on: PowerSGD is past its first steps, and has an error
        of each."""
        self.is_settled = True
        if self.power_sgd is not None and not self.power_sgd.error_dict:
            self.power_sgd.iter = self.power_sgd.start_powerSGD_iter
            for number, bucket in enumerate(self.buckets):
                self.power_sgd.error_dict[number] = torch.zeros_like(bucket)

    def _compress(self, number: int) -> None:
        """Torch's own hook, whose collectives are done when they return."""
        gradients = [part for p, part in self.gradient_of.items() if self.bucket_of[p] == number]
        bucket = FakeBucket(
            whole=self.buckets[number],
            parts=gradients,
            number=number,
            is_the_last=number == len(self.buckets) - 1,
        )
        with done_at_once():
            reduce_low_rank(self.power_sgd, bucket).wait()

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Those of the trainer."""
        if hook is reduce_low_rank:
            self.power_sgd = state
            return
        assert hook is reduce_in_dtype
        self.reduced_dtype = state.dtype

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in which gradients only add up."""
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True


@contextmanager
def fake_replicas() -> Iterator[None]:
    """Let the trainer's `apply_ddp` and `gradient_sync` take FakeReplicas for DDP."""
    original = data_parallel.DistributedDataParallel
    data_parallel.DistributedDataParallel = FakeReplicas
    try:
        yield
    finally:
        data_parallel.DistributedDataParallel = original
