"""Predict: the cost model's word on one row."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.step import estimate, rank_memory
from fsdpplan.errors import SpecError
from fsdpplan.files.runs import MemoryKind
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Interval, MemoryBreakdown
from fsdpplan.spec.layout import Layout
from fsdpplan.validate.express import Expressed
from fsdpplan.validate.fabric import load_request
from fsdpplan.validate.skipped import NotExpressed, Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a row."""

    layout: Layout
    """The layout that was priced."""
    step_seconds: Interval
    memory: MemoryBreakdown | None
    """None where the priced layout holds other state than the row's."""
    fits: bool | None
    """Whether the device has room for it; None without `memory`."""
    assumptions: tuple[str, ...]

    def peak_memory_bytes(self, kind: MemoryKind | None) -> int | None:
        """The peak as `kind` counts it; None where that cannot be told."""
        if self.memory is None:
            return None
        match kind:
            case "alloc":
                return self.memory.peak_allocated_bytes
            case "reserved":
                return self.memory.peak_reserved_bytes
            case "nvidia-smi":
                return self.memory.peak_device_bytes
            case _:
                return None


def predict(expressed: Expressed) -> Prediction | Skipped:
    """The prediction for a row; what it left open is chosen by what fits in memory."""
    try:
        cluster = load_request(expressed.cluster_request)
        layout = _first_fitting(expressed, cluster)
        result = estimate(
            model=expressed.model, cluster=cluster, training=expressed.training, layout=layout
        )
    except NotExpressed as error:
        return error.skipped
    except SpecError as error:
        return Skipped(reason="the cost model does not take it", detail=str(error))
    has_memory = expressed.sharded_optimizer_ranks == 1
    fits = result.memory.peak_device_bytes <= cluster.device.memory_bytes
    return Prediction(
        layout=layout,
        step_seconds=result.step_seconds,
        memory=result.memory if has_memory else None,
        fits=fits if has_memory else None,
        assumptions=(*expressed.assumptions, *_fills(expressed, layout)),
    )


def _first_fitting(expressed: Expressed, cluster: Cluster) -> Layout:
    """The first layout that fits, or the last one, which needs least."""
    for layout in expressed.layouts[:-1]:
        memory = rank_memory(
            model=expressed.model, cluster=cluster, training=expressed.training, layout=layout
        )
        spread = expressed.sharded_optimizer_ranks
        elsewhere = memory.optimizer_bytes * (spread - 1) // spread
        if memory.peak_device_bytes - elsewhere <= cluster.device.memory_bytes:
            return layout
    return expressed.layouts[-1]


def _fills(expressed: Expressed, layout: Layout) -> list[str]:
    """Sentences on what was chosen by what fits."""
    said = []
    if len({one.micro_batch for one in expressed.layouts}) > 1:
        said.append(f"micro-batch {layout.micro_batch}, the largest that fits")
    if len({one.activation_checkpointing for one in expressed.layouts}) > 1:
        said.append(f"checkpointing {layout.activation_checkpointing}: none where that fits")
    return said
