"""Candidates: the layouts that a row may mean, the first that fits is taken.

A row that gives everything has one. Without `micro_batch` there is one for each that fills the
batch, the largest first; without `act_ckpt` those without recomputation come first. A mixture that
does not say so may split its experts by tp or spread whole ones over it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isqrt

from fsdpplan.cost.schedule.order import microbatches_refusal
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.layout import ActivationCheckpointing, Layout, Offload
from fsdpplan.spec.model import Model
from fsdpplan.validate.runs.degrees import Degrees, expert_ranks
from fsdpplan.validate.runs.runtimes import Software
from fsdpplan.validate.runs.skipped import NotExpressed, given
from fsdpplan.validate.runs.stages import Pipeline, pipelines_of

MAX_MICRO_BATCHES = 64
"""Micro-batches tried where none is given, from the smallest up: any batch below 5040 has fewer."""

CHECKPOINTING: dict[str, ActivationCheckpointing] = {"none": "none", "op": "op", "full": "full"}

EVERY_SECOND = 0.5
"""Blocks that torchtitan's `selective layer` recomputes, unless told otherwise."""

HALF = 0.5
"""What recomputing single modules is worth, where nothing says which."""

SOME_BLOCKS = re.compile(
    r"\b(?:recomput|checkpoint)\w*[^;]{0,30}?(\d{1,4})\s*(?:of|out of|/)\s*(\d{1,4})\s*"
    r"(?:\w+ )?(?:layers|blocks)",
    re.I,
)
FIRST_BLOCKS = re.compile(
    r"\brecompute[-_ ](?:num[-_ ])?(?:layers|blocks)\s*[=:]?\s*(\d{1,4})"
    r"|\brecomput\w* (?=\d)(?:(\d{1,4}) (?:layers|blocks))",
    re.I,
)
SHARE_OF_BLOCKS = re.compile(
    r"\b(?:recomput|checkpoint)\w*[^;]{0,30}?(\d{1,2}(?:\.\d+)?) ?% of (?:the )?(?:layers|blocks)",
    re.I,
)
UNIFORM = re.compile(r"recompute[-_ ]method\s*[=:]?\s*uniform", re.I)
"""Words in the notes on blocks that are recomputed: so many of so many, the first of a stage
(Megatron-LM's `--recompute-method block`; with `uniform` the number is the length of a run, and all
are recomputed), a share."""

FORWARD_SHARE = 1 / 3
"""Forward's part of a step's FLOPs: what recomputing all of it adds to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What backward recomputes."""

    modes: tuple[ActivationCheckpointing, ...]
    """Those that the row may mean, the likeliest first."""
    recomputed_share: float | None = None
    """Share of the blocks to which mode `full` applies, none to the others; None: all blocks."""


def layouts_of(
    run: MeasuredRun,
    *,
    model: Model,
    software: Software,
    degrees: Degrees,
    global_batch: int,
    modes: tuple[ActivationCheckpointing, ...],
) -> tuple[tuple[Layout, ...], list[str]]:
    """The layouts that `run` may mean, the likeliest first, and what was assumed for all."""
    bases, said = _bases(run, model=model, software=software, degrees=degrees)
    per_rank = global_batch // degrees.data_parallel
    micro_batches = (run.micro_batch,) if run.micro_batch else _divisors(per_rank)
    spreads = expert_ranks(run, model=model, software=software, degrees=degrees)
    layouts = tuple(
        replace(
            base,
            ep=spread.ep,
            experts_over_tp=spread.over_tp,
            activation_checkpointing=mode,
            micro_batch=micro_batch,
            num_microbatches=per_rank // micro_batch,
        )
        for spread in spreads
        for mode in modes
        for base in bases
        for micro_batch in micro_batches
    )
    if len(layouts) == 1:
        return layouts, said
    return tuple(one for one in layouts if _is_taken(one)) or layouts, said


def _is_taken(layout: Layout) -> bool:
    """Whether the schedule takes so many micro-batches; 1F1B is priced with any."""
    return layout.schedule == "1f1b" or not microbatches_refusal(
        schedule=layout.schedule, pp=layout.pp, num_microbatches=layout.num_microbatches
    )


def checkpointing_of(run: MeasuredRun, software: Software) -> tuple[Checkpointing, list[str]]:
    """What `act_ckpt` means for the row's software."""
    word = run.activation_checkpointing
    if not word and software.recomputes_by_default is False:
        return Checkpointing(modes=("none",)), [
            f"nothing recomputed, as {software.words} does unless told to"
        ]
    if not word:
        return Checkpointing(modes=("none", "full")), []
    if word == "op" and software.selective != "blocks":
        # modules of a block, such as a mixture's: more than attention, less than all
        return Checkpointing(modes=("full",), recomputed_share=HALF), [
            f"single modules recomputed, as {software.words} can: half of what all costs and saves"
        ]
    if word == "full" and (blocks := _recomputed_blocks(run)) is not None:
        return blocks
    if word != "selective":
        return Checkpointing(modes=(CHECKPOINTING[word],)), []
    if software.selective == "attention":
        return Checkpointing(modes=("attention",)), []
    share, why = EVERY_SECOND, "every second one"
    if run.mfu and run.hfu:
        share = min(1.0, max(0.0, (run.hfu / run.mfu - 1) / FORWARD_SHARE))
        why = "by hfu over mfu"
    return Checkpointing(modes=("full",), recomputed_share=share), [
        f"selective checkpointing of {share:.0%} of the blocks, {why}: time and memory lie in "
        "proportion between none and all"
    ]


def _recomputed_blocks(run: MeasuredRun) -> tuple[Checkpointing, list[str]] | None:
    """How many of a stage's blocks the notes say are recomputed; None: they do not say."""
    stage = max(1, (run.layers or 0) // (run.pp * (run.virtual_stages or 1)))
    some = SOME_BLOCKS.search(run.notes)
    number = FIRST_BLOCKS.search(run.notes)
    if some and 0 < int(some[1]) < int(some[2]):
        share = int(some[1]) / int(some[2])
    elif number and not UNIFORM.search(run.notes) and 0 < int(number[1] or number[2]) < stage:
        share = int(number[1] or number[2]) / stage
    elif part := SHARE_OF_BLOCKS.search(run.notes):
        share = min(1.0, float(part[1]) / 100)
    else:
        return None
    return Checkpointing(modes=("full",), recomputed_share=share), [
        f"{share:.0%} of the blocks recomputed, by the notes: time and memory lie in proportion "
        "between none and all"
    ]


def _bases(
    run: MeasuredRun, *, model: Model, software: Software, degrees: Degrees
) -> tuple[tuple[Layout, ...], list[str]]:
    """The layouts of `run` without batch and checkpointing, one for each pipeline that it may
    mean."""
    said: list[str] = []
    pipelines = pipelines_of(run, model=model, software=software, said=said)
    sequence_parallel = _tensor_parallel(run, model, said)
    if model.experts:
        said.append("every expert gets the same number of tokens")
    compiles = software.compiles if run.compile is None else run.compile
    if run.compile is None:
        said.append("compiled" if compiles else "not compiled")
    is_fsdp = degrees.sharding == "fsdp"
    keeps = degrees.keeps_parameters or run.pp > 1
    if not is_fsdp and degrees.data_parallel > 1:
        said.append(f"gradients reduced once a step, in the buckets of {software.words}")
    # Accumulation: FSDP reduces in each backward pass, the others in the last.
    last = run.pp > 1 or not is_fsdp
    layout = Layout(
        dp_replicate=degrees.replicate,
        dp_shard=degrees.shard,
        cp=degrees.cp,
        tp=run.tp,
        pp=run.pp,
        sharding=degrees.sharding,
        reshard_after_forward="never" if is_fsdp and keeps else "always",
        gradient_sync="last" if last else "every",
        schedule=pipelines[0].schedule,
        virtual_stages=pipelines[0].virtual_stages,
        stage_blocks=pipelines[0].stage_blocks,
        sequence_parallel=sequence_parallel,
        loss_parallel=run.tp > 1,
        async_tp=run.async_tp and run.tp > 1,
        offload=_offload(run),
        compile=compiles,
    )
    return tuple(_with(layout, one) for one in pipelines), said


def _with(layout: Layout, pipeline: Pipeline) -> Layout:
    return replace(
        layout,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        stage_blocks=pipeline.stage_blocks,
    )


def _offload(run: MeasuredRun) -> Offload:
    if run.offload in ("", "none"):
        return "none"
    if run.offload != "cpu":
        raise NotExpressed("this offload is not priced", run.offload)
    return "cpu"


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
