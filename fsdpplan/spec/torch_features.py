"""What plans need of PyTorch, and since when it has it: the one table.

The search leaves out what a release lacks, a plan says the oldest release that it needs, the
trainer refuses to start below that, and docs/reference/torch.md prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import OLDEST, TorchRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFeature:
    """Something that torch has since a release, and some plans need."""

    name: str
    """What it is, as a noun: it stands in sentences."""
    since: TorchRelease
    """The first release that has it."""
    needed: Callable[[Case], bool]
    """Whether a plan needs it."""
    done_without: str = ""
    """What the trainer does under earlier ones; empty: it refuses."""
    slower: str = ""
    """What that costs, where it does."""
    instead: str = ""
    """What to plan in its place where it is refused."""
    source: str
    """Where torch has it, or what was seen without it."""

    @property
    def oldest(self) -> TorchRelease:
        """The oldest release under which a plan that needs it can be trained."""
        return OLDEST if self.done_without else self.since


NUMA_BINDING = TorchFeature(
    name="ranks on the cores near their GPU",
    since=TorchRelease(2, 9),
    done_without="runs on any core",
    needed=lambda case: (
        case.on_cuda and case.cluster.device.vendor == "nvidia" and case.cluster.gpus_per_node > 1
    ),
    source="--numa-binding of torch/distributed/run.py, which 2.8.0 has not and 2.9.1 has",
)
"""Of the job script; each node looks whether it can."""

WINDOWED_KERNEL = TorchFeature(
    name="a kernel of sliding windows",
    since=TorchRelease(2, 12),
    done_without="adds a mask to all scores, of keys and values of every query head",
    needed=lambda case: 0 < case.model.sliding_window < case.training.seq_len,
    source="varlen_attn of torch/nn/attention/varlen.py",
)

FEATURES: tuple[TorchFeature, ...] = (
    TorchFeature(
        name="the pipeline schedule dualpipev",
        since=TorchRelease(2, 9),
        needed=lambda case: case.layout.schedule == "dualpipev",
        instead="--schedule zbv",
        source="ScheduleDualPipeV of torch/distributed/pipelining/schedules.py",
    ),
    TorchFeature(
        name="FSDP of experts that ep and tp split",
        since=TorchRelease(2, 9),
        needed=lambda case: (
            case.layout.sharding == "fsdp" and min(case.layout.ep, case.layout.tp) > 1
        ),
        instead="--tp 1 or --ep 1",
        source='"FSDP only supports 1D TP", raised by torch/distributed/fsdp/_fully_shard of 2.8; '
        "seen",
    ),
    TorchFeature(
        name="FSDP of a base in 4 bits",
        since=TorchRelease(2, 13),
        needed=lambda case: (
            case.layout.sharding == "fsdp"
            and case.training.adapters is not None
            and case.training.adapters.base == "nf4"
        ),
        instead="--base bf16 or --sharding ddp",
        source='"only Tensors of floating point dtype can require gradients", raised for '
        "parameters of bytes by torch/distributed/fsdp/_fully_shard of 2.9; seen; 2.10 to 2.12 not "
        "tried",
    ),
    TorchFeature(
        name="ring attention by module",
        since=TorchRelease(2, 10),
        needed=lambda case: case.layout.cp > 1 and not case.trades_heads,
        instead="--cp 1 or --cp-attention ulysses",
        source="_ContextParallel of torch/distributed/tensor/experimental/_context_parallel",
    ),
    TorchFeature(
        name="split backward of stages without parameters",
        since=TorchRelease(2, 12),
        needed=lambda case: (
            case.layout.schedule in SPLIT_BACKWARD_SCHEDULES and 0 in case.layout.stage_blocks[1:-1]
        ),
        instead="--schedule 1f1b",
        source='"element 0 of tensors does not require grad", raised by 2.11; seen',
    ),
    TorchFeature(
        name="FSDP of more than three stages a rank",
        since=TorchRelease(2, 10),
        needed=lambda case: (
            case.layout.pp > 1 and case.layout.sharding == "fsdp" and case.layout.virtual_stages > 3
        ),
        instead="--virtual-stages 3",
        source='"Unsharding the same stage twice", raised by '
        "torch/distributed/pipelining/schedules.py of 2.9; seen",
    ),
    TorchFeature(
        name="grouped matmuls",
        since=TorchRelease(2, 10),
        done_without="multiplies the experts one after another",
        slower="the host waits for the rows of each expert, which the prediction does not count",
        needed=lambda case: case.model.experts is not None,
        source="grouped_mm of torch/nn/functional.py",
    ),
    WINDOWED_KERNEL,
    TorchFeature(
        name="a kernel of packed documents",
        since=TorchRelease(2, 12),
        done_without="attends to one document after the other",
        slower="the host waits for how long they are, which the prediction does not count",
        needed=lambda case: case.training.packed,
        source="varlen_attn of torch/nn/attention/varlen.py",
    ),
    TorchFeature(
        name="pipelines that keep no logits",
        since=TorchRelease(2, 10),
        done_without="lets the last stage give them up itself",
        needed=lambda case: case.layout.pp > 1,
        source="return_outputs of torch/distributed/pipelining/schedules.py",
    ),
    TorchFeature(
        name="schedules of several stages a rank by lowered actions",
        since=TorchRelease(2, 10),
        done_without="hands their actions to torch's runtime for these",
        needed=lambda case: case.layout.virtual_stages > 1,
        source="_PipelineScheduleRuntime of torch/distributed/pipelining/schedules.py; seen",
    ),
    TorchFeature(
        name="means by gloo's reduce-scatter",
        since=TorchRelease(2, 9),
        done_without="sums, and divides by itself",
        needed=lambda case: case.layout.sharding == "fsdp" and not case.on_cuda,
        source="ReduceOp.AVG of gloo gives sums in 2.8, and says nothing; seen",
    ),
    NUMA_BINDING,
)
"""Every row is tried on each release by `make test-torch`, but for those that need CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchNeed:
    """The oldest release that a plan can be trained under, and why."""

    oldest: TorchRelease
    because: str
    """What it needs; empty where it is the oldest of all."""


def torch_need(case: Case) -> TorchNeed:
    """What a plan needs of torch; nothing where another program than the trainer's is priced."""
    if case.training.runtime == "fsdp2":
        newest = max(
            (feature for feature in FEATURES if feature.oldest > OLDEST and feature.needed(case)),
            key=lambda feature: feature.oldest,
            default=None,
        )
        if newest is not None:
            return TorchNeed(oldest=newest.oldest, because=newest.name)
    return TorchNeed(oldest=OLDEST, because="")


def lacking(case: Case) -> TorchFeature | None:
    """The first feature that the plan needs and its release lacks; None where none is missing, or
    where no release was said."""
    training = case.training
    if training.torch_release is None or training.runtime != "fsdp2":
        return None
    lacked = features_lacked(training.torch_release)
    return next((feature for feature in lacked if feature.needed(case)), None)


def slower_without(case: Case) -> tuple[TorchFeature, ...]:
    """What the plan's release lacks, and the trainer does more slowly."""
    release = case.training.torch_release
    if release is None or case.training.runtime != "fsdp2":
        return ()
    return tuple(f for f in FEATURES if f.slower and release < f.since and f.needed(case))


@cache
def features_lacked(release: TorchRelease) -> tuple[TorchFeature, ...]:
    """What cannot be planned for `release`."""
    return tuple(feature for feature in FEATURES if release < feature.oldest)
