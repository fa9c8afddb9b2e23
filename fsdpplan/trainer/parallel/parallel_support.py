"""What tensor and context parallelism ask of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import PlanConfig


def parallel_problems(plan: PlanConfig) -> Iterator[str]:
    """What this trainer cannot run of a plan's tensor and context parallelism, in words."""
    layout = plan.layout
    if layout.tp > 1:
        yield from _tensor_parallel_problems(plan)
    else:
        for name in ("sequence_parallel", "loss_parallel", "async_tp"):
            if getattr(layout, name):
                yield f"{name} (it needs tensor parallelism)"
    if layout.cp > 1:
        yield from _context_parallel_problems(plan)


def _tensor_parallel_problems(plan: PlanConfig) -> Iterator[str]:
    model, layout = plan.model, plan.layout
    if not layout.sequence_parallel:
        yield f"tp {layout.tp} without sequence_parallel (it works with it)"
    if layout.async_tp and not layout.compile:
        yield "async_tp without compile (it is a pass of torch.compile)"
    widths = {
        "heads": model.heads,
        "key/value heads": layout.tp if model.latent else model.kv_heads,
        "tokens a rank": plan.training.seq_len // layout.cp,
    }
    if any(not model.has_experts(layer) for layer in range(model.layers)):
        widths["feed-forward width"] = model.ffn_hidden
    for name, width in widths.items():
        if width % layout.tp:
            yield f"tp {layout.tp} with {name} of {width} (a divisor of it works)"


def _context_parallel_problems(plan: PlanConfig) -> Iterator[str]:
    model, layout, length = plan.model, plan.layout, plan.training.seq_len
    if layout.sharding == "ddp":
        yield f"sharding ddp with cp {layout.cp} (fsdp works)"
    if plan.cluster.device.kind == "cpu":
        if length % layout.cp:
            yield f"cp {layout.cp} with sequences of {length} (a divisor of it works)"
        return
    if length % (2 * layout.cp):
        yield f"cp {layout.cp} with sequences of {length} (twice cp must divide it)"
    if any(0 < model.window(layer) < length for layer in range(model.layers)):
        yield f"ring attention (cp {layout.cp}) with sliding windows"
    if model.attention_sinks:
        yield f"ring attention (cp {layout.cp}) with attention sinks"
