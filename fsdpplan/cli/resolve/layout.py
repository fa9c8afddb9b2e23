"""The parts of a layout that the user fixed."""

from __future__ import annotations

from dataclasses import fields
from math import prod
from typing import Any

from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.synonyms import SELECTIVE
from fsdpplan.cli.resolve import Resolved
from fsdpplan.errors import SpecError
from fsdpplan.search.pins import Pins
from fsdpplan.search.pins import pin_flag as flag
from fsdpplan.spec.layout import MESH_AXES
from fsdpplan.spec.runtime import RuntimeName


def resolve_pins(
    options: LayoutOptions, *, gpus: int, runtime: RuntimeName | None = None
) -> Resolved[Pins]:
    """The pins, refused where they contradict each other."""
    given = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if getattr(options, field.name) is not None
    }
    meant = _selective(given, runtime)
    _refuse_degrees(given, gpus)
    _refuse_schedule(given)
    _refuse_recomputation(given)
    return Resolved(
        value=Pins(**given, **_stages(given)),
        sources=tuple((f"layout.{name}", f"flag {flag(name)}") for name in given),
        assumptions=meant,
    )


def _selective(given: dict[str, Any], runtime: RuntimeName | None) -> tuple[str, ...]:
    """Put the runtime's own meaning in the place of the word, and say which it is."""
    if given.get("activation_checkpointing") != SELECTIVE:
        return ()
    is_megatron = (runtime or "").startswith("megatron")
    mode, whose = ("attention", "Megatron") if is_megatron else ("op", "torchtitan")
    given["activation_checkpointing"] = mode
    return (f"selective recomputation is {mode}, as {whose}'s (--activation-checkpointing)",)


def _refuse_degrees(given: dict[str, Any], gpus: int) -> None:
    degrees = {axis: given[axis] for axis in MESH_AXES if axis in given}
    product = prod(degrees.values())
    if gpus % product:
        words = " x ".join(f"{flag(axis)} {degree}" for axis, degree in degrees.items())
        raise SpecError(
            f"{words}{f' = {product}' if len(degrees) > 1 else ''} does not divide {gpus} GPUs; "
            f"{_divisors_hint(degrees, gpus)}"
        )
    if given.get("sharding") == "ddp" and given.get("dp_shard", 1) > 1:
        raise SpecError(
            f"--sharding ddp keeps whole copies: leave --dp-shard {given['dp_shard']} out, "
            "or use --sharding fsdp"
        )
    ep, shard_ranks = given.get("ep", 1), given.get("dp_shard", 0) * given.get("cp", 1)
    if shard_ranks and shard_ranks % ep:
        raise SpecError(
            f"--ep {ep} must divide --dp-shard x --cp = {shard_ranks}, the ranks that share one "
            "copy: use another --ep or --dp-shard"
        )


def _divisors_hint(degrees: dict[str, int], gpus: int) -> str:
    """The divisors of `gpus` beside the degree that does not divide it."""
    for axis, degree in degrees.items():
        if gpus % degree:
            below = max(d for d in range(1, min(degree, gpus) + 1) if gpus % d == 0)
            above = next((d for d in range(degree, gpus + 1) if gpus % d == 0), None)
            near = [f"{flag(axis)} {d}" for d in (below, above) if d is not None]
            return f"use {' or '.join(dict.fromkeys(near))}, or other --gpus"
    return f"their product must divide {gpus}"


def _refuse_schedule(given: dict[str, Any]) -> None:
    schedule, pp = given.get("schedule"), given.get("pp")
    if schedule == "none" and pp is not None and pp > 1:
        raise SpecError(
            f"--pp {pp} needs a schedule: type --schedule 1f1b, or leave --schedule out"
        )
    if schedule not in (None, "none") and pp == 1:
        raise SpecError(
            f"--schedule {schedule} needs a pipeline: type --pp 2 or more, or leave it out"
        )
    stages = given.get("virtual_stages", 1)
    if stages > 1 and schedule in ("gpipe", "1f1b"):
        raise SpecError(
            f"--virtual-stages {stages} does not go with --schedule {schedule}: use --schedule "
            "interleaved_1f1b"
        )


def _refuse_recomputation(given: dict[str, Any]) -> None:
    blocks = given.get("checkpoint_blocks", "all")
    if blocks != "all" and given.get("activation_checkpointing") == "none":
        raise SpecError(
            f"--checkpoint-blocks {blocks} with --activation-checkpointing none recomputes "
            "nothing: use --activation-checkpointing full, or leave --checkpoint-blocks out"
        )


def _stages(given: dict[str, Any]) -> dict[str, Any]:
    """The stages a rank that `--stage-blocks` implies, where they are not given."""
    blocks, pp = given.get("stage_blocks"), given.get("pp")
    if blocks is None:
        return {}
    if pp is None or pp == 1 or len(blocks) % pp:
        wish = f"--pp {len(blocks)}" if pp is None else f"a multiple of --pp {pp} numbers"
        raise SpecError(
            f"--stage-blocks {','.join(map(str, blocks))} names {len(blocks)} stages, which "
            f"{'needs --pp' if pp is None else f'--pp {pp} does not divide'}: use "
            f"{wish if pp != 1 else '--pp 2 or more'}"
        )
    virtual = len(blocks) // pp
    if given.get("virtual_stages", virtual) != virtual:
        raise SpecError(
            f"--stage-blocks names {len(blocks)} stages, and --pp {pp} with --virtual-stages "
            f"{given['virtual_stages']} makes {pp * given['virtual_stages']}: use --virtual-stages "
            f"{virtual}"
        )
    return {} if "virtual_stages" in given else {"virtual_stages": virtual}
