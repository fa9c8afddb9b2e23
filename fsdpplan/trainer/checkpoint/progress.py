"""Where a run stands, as its checkpoints say it: trainer.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import PlanConfig
from ..errors import TrainerError
from .files import PROGRESS, Unreadable, reason
from .whole_file import read_small

SCHEMA_VERSION = 2
"""Version of trainer.json. Those of version 1 have no version, no manifest and no generators."""

NOT_OF_THE_WEIGHTS = frozenset(
    {
        "name",
        "vocab_multiple",
        "max_positions",
        "rope_theta",
        "sliding_window",
        "full_attention_every",
    }
)
"""Settings of a model that may change between runs on the same weights, such as for longer texts.
Where one does change the weights, their shapes do not match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; all else that a resumed run needs is in the plan and its options."""

    step: int
    """Steps done."""
    sequences: int
    """Sequences seen: the number of the next one."""
    seed: int
    seq_len: int
    steps: int
    """Steps that the learning-rate schedule was laid out for."""
    learning_rate: float
    warmup_steps: int
    data_state: dict[str, Any] = field(default_factory=dict)
    """What the data needs beside the number of sequences, as JSON values."""
    scaler_state: dict[str, Any] = field(default_factory=dict)
    """The loss scaler's, as JSON values."""
    model: dict[str, Any] = field(default_factory=dict)
    """`model` of the plan that wrote it; empty in version 1, as are the next three."""
    layout: dict[str, Any] = field(default_factory=dict)
    optimizer: str = ""
    precision: str = ""
    param_dtype: str = "fp32"
    """In which parameters and AdamW's moments are."""


def read_progress(path: Path) -> Progress:
    """What the checkpoint `path` says of the run that wrote it."""
    try:
        document = json.loads(read_small(path / PROGRESS))
        version = document.pop("schema_version", 1)
        if version > SCHEMA_VERSION:
            raise TrainerError(
                f"{path / PROGRESS} has schema_version {version}, this trainer reads up to "
                f"{SCHEMA_VERSION}: resume with the fsdpplan that wrote it"
            )
        progress = Progress(**document)
        for each in fields(Progress):
            _require_kind(each.name, str(each.type), getattr(progress, each.name))
        return progress
    except TrainerError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{PROGRESS} cannot be read: {reason(error)}") from error


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "dict[str, Any]": (dict,),
}


def _require_kind(name: str, kind: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, _KINDS[kind]):
        raise ValueError(f"{name} is {str(value)[:60]!r}")
    if isinstance(value, int | float) and not 0 <= value < 2**63:
        raise ValueError(f"{name} is {str(value)[:60]}")


def require_same_run(path: Path, found: Progress, plan: PlanConfig, *, seed: int) -> list[str]:
    """Raise unless the plan's run can go on from `found`; returns what else has changed."""
    if (found.seed, found.seq_len) != (seed, plan.training.seq_len):
        raise TrainerError(
            f"{path} was trained with --seed {found.seed} and sequences of {found.seq_len}, this "
            f"run has --seed {seed} and {plan.training.seq_len}: the data would not go on where it "
            "stopped; use the same, or another --checkpoint-dir"
        )
    if not found.model:
        return []
    planned = json.loads(json.dumps(asdict(plan.model)))
    there = {"vocab_multiple": 1, **found.model}  # which older ones do not say
    changed = [key for key in planned if there.get(key) != planned[key]]
    words = [f"{key} {there.get(key)} there, {planned[key]} in the plan" for key in changed]
    if not NOT_OF_THE_WEIGHTS.issuperset(changed):
        raise TrainerError(
            f"{path} does not hold this model: {', '.join(words)}; take another --checkpoint-dir"
        )
    if found.optimizer != plan.training.optimizer:
        raise TrainerError(
            f"{path} was trained with {found.optimizer}, the plan's optimizer is "
            f"{plan.training.optimizer}, which cannot go on with that state: plan with --optimizer "
            f"{found.optimizer}, or take another --checkpoint-dir"
        )
    if found.param_dtype != plan.training.param_dtype:
        raise TrainerError(
            f"{path} holds parameters in {found.param_dtype}, the plan keeps them in "
            f"{plan.training.param_dtype}: plan with --param-dtype {found.param_dtype}, or export "
            "it and begin from there with --init-from"
        )
    if found.precision != plan.training.precision:
        words.append(f"precision {found.precision} there, {plan.training.precision} from here on")
    return words


def written_by(plan: PlanConfig) -> dict[str, Any]:
    """What a checkpoint says of the plan that wrote it: fields of Progress."""
    return {
        "model": json.loads(json.dumps(asdict(plan.model))),
        "layout": json.loads(json.dumps(asdict(plan.layout))),
        "optimizer": plan.training.optimizer,
        "precision": plan.training.precision,
        "param_dtype": plan.training.param_dtype,
    }
