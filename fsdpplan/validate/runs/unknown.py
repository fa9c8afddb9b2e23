"""Unknown: what a row leaves open, as the rows that it could be.

Each blank column that changes the price is a set of possibilities: the row again with the blank
filled in. The first is what `express` takes; how far the others lie from it widens the band.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.runtime import runtime_named
from fsdpplan.validate.runs.degrees import unstated_zero
from fsdpplan.validate.runs.fabric import names_network, spans_network, usual_networks
from fsdpplan.validate.runs.runtimes import Software

OTHERS_CHANCE = 0.25
"""Chance that a blank is not what is taken, all other possibilities together. Software has a
convention, and nodes have a usual network: a guess, said as one."""

GUESSED = re.compile(r"\bact_ckpt\b[^;]*\bguess", re.I)
"""Words on recomputation that a table gives without knowing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """One blank."""

    what: str
    """What is not said, in words."""
    cases: tuple[MeasuredRun, ...]
    """The row with each other possibility in the blank's place."""


def unknowns(run: MeasuredRun, *, software: Software, profile: str) -> tuple[Unknown, ...]:
    """What `run`, which is expressed on the nodes of `profile`, leaves open."""
    found = (_network(run, profile), _recomputation(run, software), _zero_stage(run, software))
    return tuple(one for one in found if one is not None and one.cases)


def _network(run: MeasuredRun, profile: str) -> Unknown | None:
    """Nodes with the GPU have one of the networks that such nodes have in the catalogue."""
    if names_network(run) or not spans_network(run, profile):
        return None
    cases = tuple(replace(run, network=words) for words in usual_networks(profile))
    return Unknown(what="network", cases=cases)


def _recomputation(run: MeasuredRun, software: Software) -> Unknown | None:
    """Nothing, attention alone where the software can, or all."""
    if run.activation_checkpointing and not GUESSED.search(run.notes):
        return None
    words = ["none", "full"]
    if software.selective == "attention":
        # with fused attention its recomputation changes little, and some take it by habit
        flash = runtime_named(software.runtime).flash_attention
        words = ["none", "full"] if flash else ["none", "selective", "full"]
    cases = tuple(replace(run, activation_checkpointing=word) for word in words)
    return Unknown(what="recomputation", cases=cases)


def _zero_stage(run: MeasuredRun, software: Software) -> Unknown | None:
    if run.zero_stage:
        return None
    cases = tuple(replace(run, zero_stage=stage) for stage in unstated_zero(run, software)[1:])
    return Unknown(what="ZeRO stage", cases=cases)
