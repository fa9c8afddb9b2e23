"""Where a run stands, as its checkpoints say it: trainer.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import DropoutConfig, PlanConfig
from ..errors import TrainerError
from ..optimizer import Recipe
from ..precision import precision_of_step
from ..schedule import learning_rate_at, schedule_of
from ..shared import trainer_options
from .files import PROGRESS, Unreadable, reason, resumable
from .whole_file import read_small

SCHEMA_VERSION = 3
"""Version of trainer.json. Those of version 1 have no version, no manifest and no generators; those
of version 2 say of the recipe no more than steps, learning rate and warm-up."""

JUMP_FRACTION = 0.01
"""By how much more or less than planned the next step's learning rate may be, before a run that
goes on is refused: what a schedule moves in a few steps is no jump."""

NOT_OF_THE_WEIGHTS = frozenset(
    {
        "name",
        "vocab_multiple",
        "max_positions",
        "rope_theta",
        "sliding_window",
        "full_attention_every",
        "window_kind",
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
    recipe: dict[str, Any] = field(default_factory=dict)
    """How the weights were updated (`recorded`); empty before version 3."""
    param_dtype: str = "fp32"
    """In which parameters and AdamW's moments are."""
    dropout: dict[str, Any] = field(default_factory=dict)
    """`training.dropout` of the plan that wrote it; empty where it said nothing."""
    adapters: dict[str, Any] = field(default_factory=dict)
    """`training.adapters` of the plan that wrote it: the checkpoint holds these, not the model;
    empty where there are none."""
    base: str = ""
    """Fingerprint of what is frozen beside the adapters (`base_fingerprint`)."""


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


def require_same_run(
    path: Path, found: Progress, plan: PlanConfig, *, seed: int, steps: int | None = None
) -> list[str]:
    """Raise unless the plan's run can go on from `found`, to `steps` where that is not what it was
    laid out for; returns what else has changed."""
    if (found.seed, found.seq_len) != (seed, plan.training.seq_len):
        raise TrainerError(
            f"{path} was trained with --seed {found.seed} and sequences of {found.seq_len}, this "
            f"run has --seed {seed} and {plan.training.seq_len}: the data would not go on where it "
            "stopped; use the same, or another --checkpoint-dir"
        )
    if not found.model:
        return []
    planned = _shape(json.loads(json.dumps(asdict(plan.model))))
    there = _shape({"vocab_multiple": 1, **found.model})  # which older ones do not say
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
    words += _adapter_words(path, found, plan)
    if found.param_dtype != plan.training.param_dtype:
        raise TrainerError(
            f"{path} holds parameters in {found.param_dtype}, the plan keeps them in "
            f"{plan.training.param_dtype}: plan with --param-dtype {found.param_dtype}, or export "
            "it and begin from there with --init-from"
        )
    now = precision_of_step(plan.training, found.step, found.steps if steps is None else steps)
    if found.precision != now:
        words.append(f"precision {found.precision} there, {now} from here on")
    if plan.training.gradient_compression.startswith("powersgd"):
        first = plan.training.gradient_compression.split(":")[2]
        words.append(
            f"PowerSGD begins anew: what it had left out of gradients is not in a checkpoint, and "
            f"the next {first} steps are sent whole"
        )
    words += [
        f"dropout of {place} {found.dropout.get(place, 0.0):g} there, {value:g} from here on"
        for place, value in asdict(plan.training.dropout or DropoutConfig()).items()
        if value != found.dropout.get(place, 0.0)
    ]
    return words


def _adapter_words(path: Path, found: Progress, plan: PlanConfig) -> list[str]:
    """What of adapters has changed. Raises unless those of `found` are the plan's."""
    planned = _adapters(plan)
    if bool(found.adapters) != bool(planned):
        there, here = (
            ("adapters alone", "all of the model")
            if found.adapters
            else ("the whole model", "adapters beside it")
        )
        how = f"plan with --lora {found.adapters['rank']}" if found.adapters else "plan without"
        raise TrainerError(
            f"{path} holds {there}, and the plan trains {here}: {how} to go on, or take another "
            "--checkpoint-dir"
        )
    words = [
        f"{name} {_shown(found.adapters.get(name))} there, {_shown(value)} in the plan"
        for name, value in planned.items()
        if name != "dropout" and found.adapters.get(name) != value
    ]
    if words:
        raise TrainerError(
            f"{path} holds other adapters than the plan's ({'; '.join(words)}): plan with what "
            "they were trained with, or take another --checkpoint-dir"
        )
    before, now = found.adapters.get("dropout"), planned.get("dropout")
    return [] if before == now else [f"dropout of adapters {before:g} there, {now:g} from here on"]


def _adapters(plan: PlanConfig) -> dict[str, Any]:
    """`training.adapters` as JSON has it; empty without."""
    adapters = plan.training.adapters
    told: dict[str, Any] = json.loads(json.dumps(asdict(adapters))) if adapters else {}
    return told


def require_same_base(path: Path, found: Progress, base: str) -> None:
    """Raise unless the adapters of `found` were trained beside what has the fingerprint `base`."""
    if found.base != base:
        raise TrainerError(
            f"{path} holds adapters of another base, without which they say nothing: give "
            "--init-from the folder that its run began with, or take another --checkpoint-dir"
        )


def written_by(plan: PlanConfig) -> dict[str, Any]:
    """What a checkpoint says of the plan that wrote it: fields of Progress."""
    return {
        "model": json.loads(json.dumps(asdict(plan.model))),
        "layout": json.loads(json.dumps(asdict(plan.layout))),
        "optimizer": plan.training.optimizer,
        "precision": plan.training.precision,
        "param_dtype": plan.training.param_dtype,
        "adapters": _adapters(plan),
        "dropout": {} if plan.training.dropout is None else asdict(plan.training.dropout),
    }


def _shape(model: dict[str, Any]) -> dict[str, Any]:
    """`model` without what is of its training: the recipe says by what its experts are balanced."""
    experts = model.get("experts")
    if not isinstance(experts, dict) or not isinstance(experts.get("router"), dict):
        return model
    router = {key: each for key, each in experts["router"].items() if key != "aux_loss_coef"}
    return {**model, "experts": {**experts, "router": router}}


def recorded(recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint says of a recipe: JSON values. No limit of the norm is null, as is what the
    schedule has no use for; what is Muon's alone is left out where there is none."""
    clip = recipe.clip_norm if math.isfinite(recipe.clip_norm) else None
    schedule, groups = recipe.schedule, [str(group) for group in recipe.groups]
    told = asdict(recipe) | {
        "clip_norm": clip,
        "groups": groups,
        "min_lr": None if schedule.kind == "constant" else schedule.min_lr,
        "decay_steps": schedule.decay_steps if schedule.kind == "wsd" else None,
    }
    if recipe.optimizer != "muon":
        told = {name: value for name, value in told.items() if not name.startswith("muon_")}
    values: dict[str, Any] = json.loads(json.dumps(told))
    return values


def changes(
    path: Path, found: Progress, plan: PlanConfig, recipe: Recipe, *, allowed: bool
) -> list[str]:
    """What a run that goes on from `found` does otherwise than the one that wrote it, and what that
    does to the learning rate of its next step. Raises TrainerError where that jumps, unless changes
    are `allowed`: the loss would, too, and nothing would say why."""
    before, now = found.recipe or _recipe_of_older(found), recorded(recipe)
    words = [
        f"{name} {_shown(before[name])} there, {_shown(now[name])} from here on"
        for name in now
        if name in before and before[name] != now[name] and name != "optimizer"
    ]
    words += _batch_words(found, plan)
    if found.step >= recipe.steps or before == now:
        return words
    for what, old, new in _next_rates(found.step, before, now):
        if old == new:
            continue
        said = f"{what} of step {found.step + 1} is {new:.4g}, by the old schedule {old:.4g}"
        if abs(new - old) > JUMP_FRACTION * max(old, new) and not allowed:
            raise TrainerError(
                f"{path} was trained by another recipe ({'; '.join(words)}): {said}; give the "
                "options that it was trained with, or --allow-changes to go on like this"
            )
        words.append(said)
    return words


def resumed_otherwise(
    folder: Path, plan: PlanConfig, recipe: Recipe, *, seed: int, allowed: bool
) -> list[str]:
    """`changes` for the checkpoint of `folder` that a run would take, before there is one. Raises
    as the run would, but for what is damaged, which it looks at itself."""
    for path in resumable(folder):
        try:
            found = read_progress(path)
        except Unreadable:
            continue
        said = require_same_run(path, found, plan, seed=seed, steps=recipe.steps)
        return said + changes(path, found, plan, recipe, allowed=allowed)
    return []


def _recipe_of_older(found: Progress) -> dict[str, Any]:
    """What is known of the recipe of a trainer that recorded none: its one schedule."""
    return {
        "steps": found.steps,
        "learning_rate": found.learning_rate,
        "warmup_steps": found.warmup_steps,
        "lr_schedule": "cosine",
        "min_lr": found.learning_rate * trainer_options.FINAL_FRACTION,
    }


def _next_rates(
    step: int, before: dict[str, Any], now: dict[str, Any]
) -> Iterator[tuple[str, float, float]]:
    """(whose rate, as it was planned, as it is) of the step after `step` of them."""
    old = learning_rate_at(step, schedule_of(before))
    new = learning_rate_at(step, schedule_of(now))
    yield "the learning rate", old, new
    if now["optimizer"] == "muon":
        yield "that of Muon's matrices", old * _muon_scale(before), new * _muon_scale(now)


def _muon_scale(recipe: dict[str, Any]) -> float:
    peak = recipe.get("muon_learning_rate")
    return 1.0 if peak is None else float(peak / recipe["learning_rate"])


def _batch_words(found: Progress, plan: PlanConfig) -> list[str]:
    """The number of sequences a step, which a schedule in steps knows nothing of."""
    names = ("dp_replicate", "dp_shard", "micro_batch", "num_microbatches")
    batch = math.prod(found.layout.get(name, 0) for name in names)
    if batch in (0, plan.training.global_batch):
        return []
    return [
        f"global_batch {batch} there, {plan.training.global_batch} from here on: the schedule "
        "counts steps, so it now goes over another number of tokens"
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
