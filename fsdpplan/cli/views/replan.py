"""A plan for other GPUs: what stays, what does not, and how its run goes on."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.views.difference import (
    difference_document,
    priced_document,
    terms_table,
    verdict,
)
from fsdpplan.cli.views.render import blocks, listed, wrapped
from fsdpplan.cost.reshard import Moved
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    cluster_document,
    model_document,
    training_document,
)
from fsdpplan.run.elastic import Standing
from fsdpplan.search.advice.difference import Priced, difference
from fsdpplan.search.advice.words import degrees, policy
from fsdpplan.spec.training import program_named
from fsdpplan.units import format_bandwidth, format_count, format_gb, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Another batch, and the best layout for it."""

    global_batch: int
    priced: Priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A plan for other GPUs."""

    inputs: Inputs
    before: Priced
    after: Priced
    other: Other | None
    """The nearest batch that all GPUs share evenly; None: this one they do."""
    moved: Moved
    storage_bytes_per_second: float | None
    standing: Standing | None
    """Where the run stands; None: nobody said where its checkpoints are."""
    place: str
    """Where the plan is saved."""

    @property
    def seconds(self) -> float:
        """From the last step of the old run to the first of the new one, as far as that is writing
        and reading."""
        return self.moved.seconds(self.storage_bytes_per_second)


def replan_screen(answer: Replanned, *, width: int) -> str:
    """What `replan` prints."""
    before, after = answer.before, answer.after
    cluster = after.case.cluster
    what = (
        f"{after.case.model.name} on {cluster.gpus:,} x {cluster.device.name} in place of "
        f"{before.case.cluster.gpus:,} x {before.case.cluster.device.name}"
    )
    found = difference(before, after)
    return blocks(
        "\n".join(
            (
                wrapped(f"{what}: {degrees(after.case.layout)}", width=width),
                wrapped(policy(after.case.layout), width=width, first="  "),
                wrapped(verdict(found), width=width, first="  "),
            )
        ),
        terms_table(before, after, found),
        listed("Batch and schedule", _schedule(answer), width=width),
        listed("Checkpoint", _checkpoint(answer), width=width),
        _next(answer, width),
        listed("Assumed", answer.inputs.assumptions, width=width),
        listed("Warnings", answer.inputs.warnings, width=width),
    )


def _schedule(answer: Replanned) -> list[str]:
    before, after = answer.before.case.training, answer.after.case.training
    layout = answer.after.case.layout
    split = (
        f"{layout.data_parallel} data-parallel ranks x {layout.num_microbatches} passes x "
        f"micro-batch {layout.micro_batch}"
    )
    if before.global_batch == after.global_batch:
        lines = [
            f"a global batch of {after.global_batch:,} sequences is kept: {split}",
            "steps, warm-up and learning rate stay as they are: a step trains "
            f"{format_count(after.tokens_per_step)} tokens as before",
        ]
    else:
        factor = after.global_batch / before.global_batch
        lines = [
            f"a global batch of {after.global_batch:,} sequences in place of "
            f"{before.global_batch:,}, {(factor - 1) * 100:+.1f} %: {split}",
            f"the schedule counts steps, and each now trains {factor:.3f} times the tokens: the "
            f"same tokens take {1 / factor:.3f} times the steps that are left, and warm-up, decay "
            "and learning rate are yours to keep or scale",
        ]
    lines += [] if answer.other is None else [_even(answer, answer.other)]
    if answer.standing is not None:
        lines += answer.standing.said
    return lines


def _even(answer: Replanned, other: Other) -> str:
    gain = answer.after.token_seconds / other.priced.token_seconds - 1
    gpus = answer.after.case.cluster.gpus
    batch = answer.after.case.training.global_batch
    return (
        f"{batch:,} sequences do not split evenly over {gpus} GPUs: --global-batch "
        f"{other.global_batch} does, and would train {gain * 100:+.1f} % tokens a second"
    )


def _checkpoint(answer: Replanned) -> list[str]:
    moved, rate = answer.moved, answer.storage_bytes_per_second
    if not _is_ours(answer):
        program = program_named(answer.after.case.training.program).words
        return [
            f"the checkpoints of {program} are its own: ask it whether they can be read in another "
            f"layout; {format_gb(moved.saved_bytes)} of parameters and optimizer state are in them"
        ]
    where = "as its files are" if _is_known(answer) else "as predicted"
    lines = [
        "any layout of the trainer reads what any other wrote; random numbers begin anew, from the "
        "seed and the step"
    ]
    training = answer.after.case.training
    if training.powersgd_rank:
        lines.append("what PowerSGD has kept of gradients is not saved: it begins anew")
    if training.optimizer == "adamw_8bit":
        lines.append(
            "8-bit moments have a scale for each 256 elements of a shard, and no test of ours "
            "reads them in another layout: keep the old checkpoint until the loss goes on as it "
            "should"
        )
    took = format_seconds(answer.seconds) if answer.seconds else "no time"
    if rate is not None:
        time = f"{took} at {format_bandwidth(rate)}"
        if rate > moved.network_bytes_per_second:
            network = format_bandwidth(moved.network_bytes_per_second)
            time = f"{took}, since the nodes receive {network} and not {format_bandwidth(rate)}"
    elif answer.seconds:
        time = f"{took} at least, by the network of its nodes (--storage-bw says the storage's)"
    else:
        time = "--storage-bw says how long that takes"
    lines.append(
        f"{format_gb(moved.saved_bytes)} are saved ({where}), read once for their checksums, and "
        f"{format_gb(moved.read_bytes)} of them by all ranks for their shards: {time}"
    )
    if answer.standing is not None:
        stands = answer.standing
        left = max(0, stands.steps - stands.step)
        seconds = left * answer.after.estimate.step_seconds.expected
        lines.append(
            f"{stands.folder} is at step {stands.step:,} of {stands.steps_before:,}: "
            f"{left:,} are left, {format_seconds(seconds)}"
            + ("" if stands.steps == stands.steps_before else f", to step {stands.steps:,}")
        )
    return lines


def _is_known(answer: Replanned) -> bool:
    return answer.standing is not None and answer.standing.saved_bytes is not None


def _is_ours(answer: Replanned) -> bool:
    """Whether fsdpplan's own trainer runs it, whose checkpoints these are."""
    return answer.after.estimate.runnable and answer.after.case.training.program == "reference"


def resume_words(answer: Replanned) -> str:
    """The command that goes on."""
    words = ["fsdpplan", "emit-launch", answer.place]
    program = answer.after.case.training.program
    if program_named(program).is_target:
        return shlex.join([*words, "--target", program])
    if not _is_ours(answer):
        return f"{shlex.join(words)} --script train.py"
    if answer.standing is None:
        return f"{shlex.join(words)} --checkpoint-dir DIR"
    return shlex.join([*words, *answer.standing.program.words()])


def _next(answer: Replanned, width: int) -> str:
    if not _is_ours(answer):
        return "\n".join((wrapped("It goes on by this:", width=width), resume_words(answer)))
    what = "and --data, and what else its first launch was given that no checkpoint says"
    if answer.standing is None:
        what = "with the options and the --checkpoint-dir of its first launch"
    return "\n".join((wrapped(f"It goes on by this, {what}:", width=width), resume_words(answer)))


def replan_json(answer: Replanned) -> str:
    """What `replan --json` prints."""
    inputs, stands, moved = answer.inputs, answer.standing, answer.moved
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(inputs.model),
        "cluster": cluster_document(inputs.cluster),
        "training": training_document(inputs.training),
        "saved": answer.place,
        "before": priced_document(answer.before),
        "after": {
            **priced_document(answer.after),
            "difference": difference_document(difference(answer.before, answer.after)),
        },
        "global_batch_kept": answer.before.case.training.global_batch
        == inputs.training.global_batch,
        "even_batch": None
        if answer.other is None
        else {"global_batch": answer.other.global_batch, **priced_document(answer.other.priced)},
        "checkpoint": {
            "saved_bytes": moved.saved_bytes,
            "saved_bytes_known": _is_known(answer),
            "read_bytes": moved.read_bytes,
            "seconds": answer.seconds,
            "seconds_by": "network" if answer.storage_bytes_per_second is None else "storage",
            "step": None if stands is None else stands.step,
            "steps": None if stands is None else stands.steps,
            "said": [] if stands is None else list(stands.said),
        },
        "command": resume_words(answer),
        "sources": dict(inputs.sources),
        "assumptions": list(inputs.assumptions),
        "warnings": list(inputs.warnings),
    }
    return json.dumps(document, indent=2, allow_nan=False)
