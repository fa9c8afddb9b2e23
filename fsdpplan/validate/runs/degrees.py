"""Degrees: how a row's ranks share state and split the batch and the sequence."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.layout import Sharding
from fsdpplan.spec.model import Model
from fsdpplan.spec.runtime import runtime_named
from fsdpplan.validate.runs.runtimes import Software
from fsdpplan.validate.runs.skipped import NotExpressed, given

ZERO_WORDS = re.compile(r"\bzero-?([0-3])\b|(\bfsdp2?\b)|(\bddp\b)", re.I)
"""Names of a ZeRO stage, of FSDP and of DDP in that of a framework."""


EXPERT_TP = re.compile(
    r"\b(?:expert[-_ ]?(?:tensor[-_ ]parallel\w*|tp)|etp)\s*[=:]?\s*(\d{1,4})\b", re.I
)
"""Words in the notes on over how many ranks tensor parallelism splits an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Data- and context-parallel ranks, and what is sharded over them."""

    replicate: int
    shard: int
    """Ranks that share state, context-parallel ones apart."""
    cp: int
    sharding: Sharding
    keeps_parameters: bool
    """FSDP that does not free parameters after forward: how tables write ZeRO-2 of PyTorch."""

    @property
    def data_parallel(self) -> int:
        """Ranks over which the batch splits."""
        return self.replicate * self.shard


def degrees_of(run: MeasuredRun, software: Software) -> tuple[Degrees, list[str]]:
    """Data-parallel degrees, checked against the GPUs."""
    said: list[str] = []
    zero = _zero_stage(run, software, said)
    replicate, shard = _checked_ranks(run, said)
    if shard % run.cp:
        raise NotExpressed("cp does not divide dp_shard", f"cp {run.cp}, dp_shard {shard}")
    if run.cp > 1:
        said.append(f"dp_shard {shard} counts the {run.cp} context-parallel ranks too")
    sharding: Sharding
    match zero:
        case "0":
            sharding = "ddp"
        case "1":
            sharding = "zero1"
        case "2" if not software.is_zero_fsdp:
            sharding = "zero2"
        case _:
            sharding = "fsdp"
    if shard == 1 and not (run.gpus == 1 and run.zero_stage == "3"):  # which is FSDP of one rank
        sharding = "ddp"
    if sharding == "ddp":
        if run.cp > 1:
            raise NotExpressed("context parallelism without shared state", f"cp {run.cp}")
        replicate, shard = replicate * shard, 1
    keeps = sharding == "fsdp" and zero == "2"
    if keeps:
        said.append("ZeRO-2 of FSDP keeps parameters after forward")
    return Degrees(
        replicate=replicate,
        shard=shard // run.cp,
        cp=run.cp,
        sharding=sharding,
        keeps_parameters=keeps,
    ), said


def as_wrapped(run: MeasuredRun, software: Software) -> Software:
    """`software` as a row on one GPU has it: by DDP's wrapper, where it says so. The trainer of
    today leaves one replica bare."""
    named = ZERO_WORDS.search(run.framework)
    says_ddp = run.zero_stage == "0" or (named is not None and "0" in (named[1], named[3] and "0"))
    if software.runtime in ("fsdp2", "fsdp2_others") and run.gpus == 1 and says_ddp:
        return replace(software, runtime="fsdp2_wrapped")
    return software


def _zero_stage(run: MeasuredRun, software: Software, said: list[str]) -> str:
    if run.zero_stage:
        return run.zero_stage
    named = ZERO_WORDS.search(run.framework)
    if named:
        said.append(f'ZeRO stage by "{named[0]}"')
        return next(group for group in (named[1], named[2] and "3", named[3] and "0") if group)
    stages = unstated_zero(run, software)
    if not stages:
        raise NotExpressed("zero_stage is not given")
    said.append(f"ZeRO-{stages[0]}, as {software.words}'s recipes have")
    return stages[0]


def unstated_zero(run: MeasuredRun, software: Software) -> tuple[str, ...]:
    """The ZeRO stages that a row without one may have, the likeliest first; without any data
    parallelism nothing is shared."""
    inner = run.tp * run.pp * run.cp
    if run.gpus == inner:
        return ("0",)
    return software.unstated_zero


def _checked_ranks(run: MeasuredRun, said: list[str]) -> tuple[int, int]:
    """(replicas, ranks that share state), which with tp and pp make all GPUs."""
    gpus = given(run.gpus, "gpus")
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
    return replicate, shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """How experts are spread, as the layout counts it."""

    ep: int = 1
    """Ranks inside `dp_shard * cp`."""
    over_tp: bool = False
    """Tensor-parallel ranks have whole experts each, and a row's `ep` counts them too."""


def expert_ranks(
    run: MeasuredRun, *, model: Model, software: Software, degrees: Degrees
) -> tuple[ExpertRanks, ...]:
    """The ways in which a row may spread its experts, the likeliest first.

    Tensor parallelism splits every expert, as Megatron does unless told otherwise, or whole ones
    are spread over its ranks: so where the notes say so, or where `ep` is more than the ranks that
    share state.
    """
    if model.experts is None:
        if run.ep > 1:
            raise NotExpressed("expert parallelism without experts", f"ep {run.ep}")
        return (ExpertRanks(),)
    stated = EXPERT_TP.search(run.notes)
    split = 0 if stated is None else int(stated[1])
    if split not in (0, 1, run.tp):
        raise NotExpressed("experts' tensor parallelism is neither 1 nor tp", f"{split}")
    shared = degrees.shard * degrees.cp
    ways = []
    if split in (0, run.tp) and shared % run.ep == 0:
        ways.append(ExpertRanks(ep=run.ep))
    spreads = runtime_named(software.runtime).spreads_experts or split == 1 or not ways
    is_multiple = run.ep % run.tp == 0 and shared % (run.ep // run.tp) == 0
    if run.tp > 1 and split in (0, 1) and spreads and is_multiple:
        ways.append(ExpertRanks(ep=run.ep // run.tp, over_tp=True))
    if not ways:
        raise NotExpressed(
            "ep does not divide the ranks that share state", f"ep {run.ep} of {shared} x {run.tp}"
        )
    return tuple(ways)


def global_batch_of(run: MeasuredRun, degrees: Degrees) -> tuple[int, list[str]]:
    """Sequences a step: as given, or from micro-batch and accumulation."""
    ranks = degrees.data_parallel
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
