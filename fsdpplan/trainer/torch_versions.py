"""What some releases of torch lack or do otherwise, and what is done about it: one function each,
with the release that ends it. What cannot be made up for is in `lacking`.

The torch that is here, against the oldest that the plan needs and the one that it is for.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.overrides import handle_torch_function, has_torch_function

from .config import LayoutConfig, PlanConfig
from .errors import WrongTorch
from .floor import newer_words, release_of, release_words
from .parallel.pipeline_stages import SPLIT_BACKWARD_SCHEDULES, rank_shares
from .private_torch import has_ring_attention

RELEASE = release_of(torch.__version__)
"""Of the torch that is here."""

OWN_WARNINGS: dict[str, tuple[int, int]] = {
    # DCP's writer asks a tensor for its storage, with each save
    "TypedStorage is deprecated": (2, 11),
}
"""What torch warns of in code of its own that the trainer calls, and the release that ends it."""

TORCHAO = {(2, 8): "0.13.0", (2, 9): "0.14.1"}
"""The torchao for releases that the newest one cannot be imported under."""


RECORDS = 2000
"""Collectives that the flight recorder of newer releases keeps."""


def quiet() -> None:
    """Do not tell users what torch warns itself of."""
    for message in own_warnings():
        warnings.filterwarnings("ignore", message)


def own_warnings() -> list[str]:
    """How those begin that this release gives."""
    return [message for message, ended in OWN_WARNINGS.items() if ended > RELEASE]


def torchao_wanted() -> str:
    """What pip is to install beside this torch."""
    return f"torchao=={TORCHAO[RELEASE]}" if RELEASE in TORCHAO else "torchao"


def lacking(plan: PlanConfig) -> Iterator[str]:
    """What this torch lacks of what `plan` asks for, and what to do, in words."""
    layout = plan.layout
    if layout.schedule == "dualpipev" and not hasattr(pipelining, "ScheduleDualPipeV"):
        yield _refusal("schedule dualpipev", "2.9", "--schedule zbv")
    if layout.cp > 1 and not plan.trades_heads and not has_ring_attention():
        yield _refusal(f"ring attention (cp {layout.cp})", "2.10", "--cp 1")
    if layout.schedule in SPLIT_BACKWARD_SCHEDULES and RELEASE < (2, 12) and _has_empty_stage(plan):
        yield _refusal(
            f"schedule {layout.schedule} with a stage without parameters",
            "2.12",
            "other stage_blocks",
        )
    if layout.pp > 1 and RELEASE < (2, 10) and _regathers(layout):
        yield _refusal(
            f"FSDP2 of {layout.virtual_stages} stages a rank", "2.10", "--virtual-stages 3"
        )
    if layout.ep > 1 and layout.tp > 1 and RELEASE < (2, 9):
        yield _refusal(
            f"FSDP2 of experts split by ep {layout.ep} and tp {layout.tp}", "2.9", "--tp 1"
        )
    adapters = plan.training.adapters
    if adapters and adapters.base == "nf4" and layout.sharding == "fsdp" and RELEASE < (2, 13):
        yield _refusal("FSDP2 of a base in nf4", "2.13", "--base bf16, or --sharding ddp")


def _regathers(layout: LayoutConfig) -> bool:
    """Whether a rank has more stages than torch keeps gathered at a time."""
    return layout.sharding == "fsdp" and layout.virtual_stages > 3


def _has_empty_stage(plan: PlanConfig) -> bool:
    """Whether a stage has neither blocks nor the embedding nor the head: backward cannot be split
    where nothing has a gradient."""
    shares = [share for rank in range(plan.layout.pp) for share in rank_shares(plan, pp_rank=rank)]
    return not all(share.blocks or share.is_first or share.is_last for share in shares)


def _refusal(what: str, since: str, instead: str) -> str:
    return (
        f"{what} with torch {torch.__version__} (it came with {since}: pip install "
        f"'torch>={since}', or plan with {instead})"
    )


def keep_flight_records() -> None:
    """Let the flight recorder keep collectives, for whoever asks what a rank waits for.

    Before torch 2.11 it keeps none unless it is told how many.
    """
    if RELEASE < (2, 11):
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDS))


def take_means(unit: Any) -> None:
    """Let an FSDP unit sum gradients and divide by itself, over gloo before torch 2.9.

    There a reduce-scatter that is asked for the mean gives the sum, and says nothing (its
    all-reduce divides). FSDP2 asks for means; NCCL gives them.
    """
    if RELEASE < (2, 9) and dist.get_backend() == "gloo":
        unit.set_force_sum_reduction_for_comms(True)


def tell_masks_apart() -> None:
    """Let DTensor tell the masks of two embeddings that are split by rows from each other.

    Before torch 2.13 they may be equal where the embeddings have one shape, also of two dtypes: the
    plan of a redistribution is then taken from the cache with the other's mask, and none is found
    where the rows are summed ("assert self.mask_buffer.data is not None"). So it is for a tiny step
    in fp32 before one with parameters in bf16. Newer releases compare as here.
    """
    module: Any = import_module("torch.distributed.tensor._ops._embedding_ops")
    mask = getattr(module, "_MaskPartial", None) or module.MaskPartial
    shape = torch.Size((2, 2))
    if mask(offset_shape=shape) != mask(offset_shape=shape):
        return

    def is_same(one: Any, other: object) -> bool:
        return isinstance(other, mask) and one.mask_buffer is other.mask_buffer

    mask.__eq__ = is_same


def divide_by(unit: Any, divisor: float, *, shard_ranks: int) -> None:
    """Let an FSDP unit divide the sum of its gradients by another number than that of its ranks.

    gloo cannot scale while it reduces, so the sum is scaled after. One rank alone reduces nothing
    since torch 2.10: it scales while it copies, and would do so twice.
    """
    unit.set_gradient_divide_factor(divisor)
    unit.set_force_sum_reduction_for_comms(shard_ranks > 1 or RELEASE < (2, 10))


def has_grouped_mm() -> bool:
    """Whether one call multiplies all experts, since torch 2.10. Without it each expert is
    multiplied by itself, and the host waits for how many rows each has."""
    return hasattr(F, "grouped_mm")


def _windowed_kernel() -> Callable[..., Tensor] | None:
    """Fused attention of sliding windows whose heads share keys, since torch 2.12."""
    if RELEASE < (2, 12):
        return None
    kernel: Callable[..., Tensor] = import_module("torch.nn.attention.varlen").varlen_attn
    return kernel


windowed_kernel = _windowed_kernel()


def windowed_operators() -> frozenset[Any]:
    """What that kernel is to a dispatch mode."""
    if windowed_kernel is None:
        return frozenset()
    return frozenset({torch.ops.torch_attn._varlen_attn.default})


def leave_outputs_unchecked(stage: Any) -> None:
    """Let a pipeline's last stage give what it likes, since nobody receives it: logits may be parts
    of them, or not be made at all.

    Before torch 2.12 each stage compares what it gives with what was stated for it.
    """
    if hasattr(stage, "_validate_fwd_outputs") and stage.is_last:
        stage._validate_fwd_outputs = lambda outputs: None


def greet_nobody(stage: Any) -> None:
    """Let a pipeline stage send its neighbours no greetings before the first step, over gloo.

    From torch 2.9 to 2.11 it does, for NCCL's sake, and also to itself where both are on one rank
    (zbv, dualpipev), which gloo cannot.
    """
    greets = hasattr(stage, "_get_init_p2p_neighbors_ops") and RELEASE < (2, 12)
    if greets and dist.get_backend() == "gloo":
        stage._get_init_p2p_neighbors_ops = list


def let_go_of_gradients(stage: Any) -> None:
    """Let a pipeline stage keep no gradient of what it received, once that is on its way back.

    Before torch 2.10 it keeps those of all micro-batches until the next step.
    """
    if RELEASE >= (2, 10):
        return
    backward = stage.backward_one_chunk

    def backward_one_chunk(chunk: int, *arguments: Any, **options: Any) -> Any:
        result = backward(chunk, *arguments, **options)
        whole = options.get("full_backward", True)  # of a split one newer releases keep them, too
        for received in stage.args_recv_info.get(chunk, ()) if whole else ():
            if hasattr(received, "buffer"):
                received.buffer.grad = None
        return result

    stage.backward_one_chunk = backward_one_chunk


def behind_weights(stage: Any, act: Callable[[], None]) -> None:
    """Let a pipeline stage call `act` when it has gone back through the weights of a micro-batch by
    itself: it then sets or adds to their gradients by hand, which autograd's hooks do not see."""
    backward = stage.backward_weight_one_chunk

    def backward_weight_one_chunk(*arguments: Any, **options: Any) -> Any:
        result = backward(*arguments, **options)
        act()
        return result

    stage.backward_weight_one_chunk = backward_weight_one_chunk


def lowered(schedule: Any) -> Any:
    """`schedule` of several stages a rank, run as a list of actions that has messages and gathers.

    Since torch 2.10 all of them are. Before, most find out their messages as they go, and those in
    which a rank has two neighbouring stages (zbv) send to themselves, which gloo cannot do.
    """
    schedules: Any = import_module("torch.distributed.pipelining.schedules")
    runtime = schedules._PipelineScheduleRuntime
    if isinstance(schedule, runtime):
        return schedule
    actions = runtime(
        schedule._stages,
        schedule._n_microbatches,
        loss_fn=schedule._loss_fn,
        scale_grads=schedule.scale_grads,
    )
    load = getattr(actions, "_prepare_schedule_with_comms", None) or actions._load_actions
    load(schedule.pipeline_order)
    actions.stage_index_to_group_rank = schedule.stage_index_to_group_rank
    for stage in schedule._stages:
        stage.stage_index_to_group_rank = schedule.stage_index_to_group_rank
    return actions


def few_micro_batches(
    make: Callable[..., Any], stage: Any, *, n_microbatches: int, **options: Any
) -> Any:
    """A schedule of one stage a rank, also for fewer micro-batches than stages.

    Before torch 2.11 it refuses them when it is made, and runs them.
    """
    schedule = make(stage, n_microbatches=max(n_microbatches, stage.num_stages), **options)
    schedule._n_microbatches = n_microbatches
    return schedule


def keep_no_outputs(schedule: Any, stages: Sequence[Any]) -> dict[str, bool]:
    """Options of `schedule.step` with which it keeps no logits for whoever called.

    Torch 2.8 and 2.9 have no such option: their stages keep them in a list.
    """
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        return {"return_outputs": False}
    for stage in stages:
        stage.output_chunks = NothingKept()
    schedule._merge_outputs = lambda outputs: None
    return {}


class NothingKept(list[Any]):
    """A list that stays empty."""

    def append(self, _: Any) -> None:
        """Drop it."""


class ReadableProperties(TensorProperties):
    """Properties of a saved tensor, also as newer releases write them: torch 2.15 adds strides to
    the five fields of those before, and nothing here looks at them."""

    FIELDS = 5 if RELEASE < (2, 15) else 6

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the fields that this release knows."""
        super().__setstate__(state[: self.FIELDS])  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]  # as torch itself reads it


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention of fake tensors as one operator, whatever the numbers of heads.

    Before torch 2.9 the CPU's takes no grouped keys, so that scores would be made, which CUDA's
    kernel makes in no release.
    """
    if RELEASE >= (2, 9):
        yield
        return
    original = F.scaled_dot_product_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if has_torch_function((q, k, v)):  # as of torch's own: whoever counts calls is asked
            heads = (q, k, v)
            return handle_torch_function(attend, heads, *heads, attn_mask=attn_mask, **options)
        options.pop("enable_gqa", None)
        out: Tensor = _Attention.apply(q, k, v, attn_mask, options)  # type: ignore[no-untyped-call]
        return out

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


class _Attention(torch.autograd.Function):
    """The shapes of the CPU's flash attention, and what it keeps for backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = flash(q, k, v, attn_mask=mask, **options)
        ctx.save_for_backward(q, k, v, out, sums)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


def require_torch(plan: PlanConfig) -> None:
    """Raise WrongTorch where the plan needs a newer torch than this one."""
    needed, here = plan.torch_needed, release_of(torch.__version__)
    if needed is None or here >= release_of(needed.oldest):
        return
    what = f"the plan's layout ({needed.because})" if needed.because else "the plan"
    raise WrongTorch(
        f"{newer_words(release_of(needed.oldest), what=what)}, or plan again with --torch "
        f"{release_words(here)}"
    )


def say_remark(plan: PlanConfig) -> None:
    """Say once where the plan was made for another release than this one."""
    remark = torch_remark(plan)
    if remark and os.environ.get("RANK", "0") == "0":
        print(remark, file=sys.stderr, flush=True)


def torch_remark(plan: PlanConfig) -> str:
    """What to say where the plan was made for another release than this one; empty: nothing."""
    planned, here = plan.training.torch, release_words(release_of(torch.__version__))
    if planned is None or planned == here:
        return ""
    return (
        f"this is torch {torch.__version__}, and the plan is for {planned}: nobody has searched or "
        f"rehearsed it for this one; fsdpplan recommend --torch {here} does"
    )
