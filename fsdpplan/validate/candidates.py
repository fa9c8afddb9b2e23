"""Candidates: the layouts that a row may mean, the first that fits is taken.

A row that gives everything has one. Without `micro_batch` there is one for each that fills the
batch, the largest first; without `act_ckpt` those without recomputation come first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

from fsdpplan.cost.shards import Stage, stage_elements
from fsdpplan.files.runs import MeasuredRun
from fsdpplan.spec.layout import ActivationCheckpointing, Layout, Schedule
from fsdpplan.spec.model import Model
from fsdpplan.validate.runtimes import runtime_of
from fsdpplan.validate.skipped import NotExpressed, given

MAX_STAGES = 256
"""Pipeline stages up to which a simulation ends in seconds."""

MAX_MICRO_BATCHES = 64
"""Micro-batches tried where none is given, from the smallest up: any batch below 5040 has fewer."""

CHECKPOINTING: dict[str, ActivationCheckpointing] = {
    "none": "none",
    "selective": "attention",
    "op": "op",
    "full": "full",
}
SCHEDULES: dict[str, Schedule] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved-1f1b": "interleaved_1f1b",
    "interleaved_1f1b": "interleaved_1f1b",
}
UNSTATED_VIRTUAL_STAGES = 2
"""Stages a rank where a table says interleaved and no more: the least, and torchtitan's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How the data-parallel ranks share state."""

    replicate: int
    shard: int
    sharded_optimizer_ranks: int
    """Ranks over which only the optimizer state is sharded (1: none); no layout can say that."""


def require_priced(run: MeasuredRun) -> None:
    """Raise NotExpressed on what the cost model has no price for, whatever its degree."""
    if run.moe:
        raise NotExpressed("mixture of experts is not priced yet", run.moe)
    if "fp8" in run.dtype.lower():
        raise NotExpressed("fp8 is not priced yet", run.dtype)
    if run.cp > 1:
        raise NotExpressed("context parallelism is not priced yet", f"cp {run.cp}")
    if run.ep > 1:
        raise NotExpressed("expert parallelism is not priced yet", f"ep {run.ep}")
    if run.async_tp:
        raise NotExpressed("async tensor parallelism is not priced yet")
    if run.offload not in ("", "none"):
        raise NotExpressed("offload is not priced yet", run.offload)


def degrees_of(run: MeasuredRun) -> tuple[Degrees, list[str]]:
    """Data-parallel degrees, checked against the GPUs."""
    gpus = given(run.gpus, "gpus")
    if not run.zero_stage:
        raise NotExpressed("zero_stage is not given")
    said: list[str] = []
    replicate, shard = run.dp_replicate, run.dp_shard
    inner = run.tp * run.pp
    if replicate is None or shard is None:
        if gpus % (inner * (replicate or shard or 1)):
            raise NotExpressed("the degrees do not multiply to the GPUs", f"{gpus} GPUs")
        rest = gpus // (inner * (replicate or shard or 1))
        if run.zero_stage == "hsdp" and replicate is None and shard is None:
            raise NotExpressed("dp_shard is not given", "zero_stage is hsdp")
        replicate, shard = replicate or (rest if shard else 1), shard or rest
        said.append(f"dp_replicate {replicate} and dp_shard {shard}, by the GPUs")
    if inner * replicate * shard != gpus:
        raise NotExpressed(
            "the degrees do not multiply to the GPUs",
            f"{run.tp} x {run.pp} x {replicate} x {shard} is not {gpus}",
        )
    if run.zero_stage == "1" and shard > 1:
        said.append("ZeRO-1 priced in time as DDP, memory not predicted")
    if run.zero_stage in ("0", "1") or shard == 1:
        optimizer_ranks = shard if run.zero_stage == "1" else 1
        return Degrees(
            replicate=replicate * shard, shard=1, sharded_optimizer_ranks=optimizer_ranks
        ), said
    return Degrees(replicate=replicate, shard=shard, sharded_optimizer_ranks=1), said


def global_batch_of(run: MeasuredRun, degrees: Degrees) -> tuple[int, list[str]]:
    """Sequences a step: as given, or from micro-batch and accumulation."""
    ranks = degrees.replicate * degrees.shard
    least = ranks * (run.micro_batch or 1)
    if run.global_batch is None:
        if run.is_timed and not (run.micro_batch and run.num_microbatches):
            raise NotExpressed("global_batch is not given")
        batch = least * (run.num_microbatches or 1)
        return batch, [f"global batch {batch}: the least that the other columns allow"]
    if run.global_batch % least:
        raise NotExpressed(
            "the batch does not split into whole micro-batches",
            f"{run.global_batch} sequences over {ranks} ranks, micro-batch {least // ranks}",
        )
    return run.global_batch, []


def layouts_of(
    run: MeasuredRun, *, model: Model, degrees: Degrees, global_batch: int
) -> tuple[tuple[Layout, ...], list[str]]:
    """The layouts that `run` may mean, the likeliest first, and what was assumed for all."""
    base, said = _base(run, model=model, degrees=degrees)
    per_rank = global_batch // base.data_parallel
    micro_batches = (run.micro_batch,) if run.micro_batch else _divisors(per_rank)
    modes: tuple[ActivationCheckpointing, ...] = ("none", "full")
    if run.activation_checkpointing:
        modes = (CHECKPOINTING[run.activation_checkpointing],)
    layouts = tuple(
        replace(
            base,
            activation_checkpointing=mode,
            micro_batch=micro_batch,
            num_microbatches=per_rank // micro_batch,
        )
        for mode in modes
        for micro_batch in micro_batches
    )
    return layouts, said


def _base(run: MeasuredRun, *, model: Model, degrees: Degrees) -> tuple[Layout, list[str]]:
    """The layout of `run` without batch and checkpointing."""
    said: list[str] = []
    schedule, virtual_stages = _schedule(run, model, said)
    sequence_parallel = _tensor_parallel(run, model, said)
    if run.compile is None:
        said.append("not compiled")
    is_fsdp = degrees.shard > 1
    resharded = is_fsdp and run.zero_stage != "2" and run.pp == 1
    if is_fsdp and run.zero_stage == "2":
        said.append("ZeRO-2 priced as FSDP that keeps parameters after forward")
    runtime = runtime_of(run.framework)
    if not is_fsdp and degrees.replicate > 1:
        said.append(f"gradients all-reduced in {runtime.bucket_words}, as {runtime.name} does")
    # Accumulation: FSDP reduces in each backward pass, the others in the last.
    last = run.pp > 1 or not is_fsdp
    layout = Layout(
        dp_replicate=degrees.replicate,
        dp_shard=degrees.shard,
        tp=run.tp,
        pp=run.pp,
        sharding="fsdp" if is_fsdp else "ddp",
        reshard_after_forward="always" if resharded or not is_fsdp else "never",
        gradient_sync="last" if last else "every",
        ddp_bucket_bytes=runtime.ddp_bucket_bytes or _rank_bytes(run, model),
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=sequence_parallel,
        loss_parallel=run.tp > 1,
        compile=run.compile or False,
    )
    return layout, said


def _rank_bytes(run: MeasuredRun, model: Model) -> int:
    """fp32 bytes of the parameters of a rank that holds embedding, head and its share of blocks."""
    stage = Stage(blocks=-(-model.layers // run.pp), has_embedding=True, has_head=True)
    return 4 * stage_elements(model=model, stage=stage, tp=run.tp)


def _schedule(run: MeasuredRun, model: Model, said: list[str]) -> tuple[Schedule, int]:
    """(schedule, stages a rank)."""
    if run.pp == 1:
        return "none", 1
    if run.schedule and run.schedule not in SCHEDULES:
        raise NotExpressed("this pipeline schedule is not priced", run.schedule)
    schedule = SCHEDULES[run.schedule or "1f1b"]
    stages = run.virtual_stages or 1
    if schedule == "interleaved_1f1b" and stages == 1:
        stages = UNSTATED_VIRTUAL_STAGES
        said.append(f"{stages} stages a rank")
    elif stages > 1 and schedule == "1f1b":
        schedule = "interleaved_1f1b"
    if not run.schedule:
        said.append(f"schedule {schedule}")
    if stages > 1 and schedule == "gpipe":
        raise NotExpressed("this pipeline schedule is not priced", f"gpipe with vpp {stages}")
    if run.pp * stages > model.layers:
        raise NotExpressed(
            "more pipeline stages than layers", f"{run.pp * stages} for {model.layers}"
        )
    if run.pp * stages > MAX_STAGES:
        raise NotExpressed("too many pipeline stages", f"{run.pp * stages}, over {MAX_STAGES}")
    return schedule, stages


def _tensor_parallel(run: MeasuredRun, model: Model, said: list[str]) -> bool:
    """Whether the sequence is split outside the matmuls too."""
    if run.tp == 1:
        return False
    split = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn_hidden": model.ffn_hidden}
    if run.sequence_parallel is not False:
        split["seq_len"] = given(run.seq_len, "seq_len")
    for name, width in split.items():
        if width % run.tp:
            raise NotExpressed(f"tp does not divide {name}", f"tp {run.tp}, {name} {width}")
    if run.sequence_parallel is None:
        said.append("sequence parallelism with tp")
    return run.sequence_parallel is not False


def _divisors(number: int) -> tuple[int, ...]:
    """The smallest divisors, in falling order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return tuple(reversed(divisors[:MAX_MICRO_BATCHES]))
