"""Same: whether a published `config.json` is of the plan's model, in all that a step shows."""

from __future__ import annotations

import math
from typing import Any

from ..config import DropoutConfig, ModelConfig
from ..errors import TrainerError
from .families import DROPOUTS, FAMILIES, Config, config_of, longest_of, rope_table


def require_same_model(
    config: Config,
    model: ModelConfig,
    *,
    seq_len: int,
    where: str,
    dropout: DropoutConfig | None = None,
) -> str:
    """The `model_type` of `config`. Raises TrainerError where it describes another model than
    `model` in anything that a forward pass of `seq_len` tokens shows, or drops elements of which
    the plan says nothing (`dropout`)."""
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise TrainerError(
            f"{where} is of model_type {name!r}, which the trainer does not compute exactly; take "
            f"one of those it does: {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise TrainerError(
            f"{where} has a quantization_config: its weights are quantised; take the release in "
            "bf16, or convert it first"
        )
    if not family.fits(model):
        raise TrainerError(_other(where, f"it is a {name} and the plan's model is not"))
    wanted = config_of(str(name), model)
    for key, value in wanted.items():
        if key in config and key not in _APART and not _same(config[key], value):
            if key in DROPOUTS:
                if dropout is not None:  # which the plan says
                    continue
                raise TrainerError(
                    f"{where} drops out {config[key]} ({key}), and the plan does not say what is "
                    "dropped: plan again with its config (recommend --config), or with --dropout 0"
                )
            raise TrainerError(_other(where, f"its {key} is {config[key]!r}, not {value!r}"))
    _require_same_rope(config, model, where)
    _require_same_window(config, model, seq_len, where)
    return str(name)


def _other(where: str, what: str) -> str:
    return (
        f"{where} is not the plan's model: {what}; plan again with its config (recommend --config)"
    )


_APART = frozenset(
    {"architectures", "max_position_embeddings", "n_positions", "rope_theta", "rope_scaling"}
    | {"sliding_window", "use_sliding_window", "max_window_layers", "n_inner", "layer_types"}
)
"""Keys that are compared in their own way, or say nothing of a forward pass."""


_ACTIVATIONS = ({"silu", "swish"}, {"gelu_new", "gelu_pytorch_tanh"})
"""Words for one function."""


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, str) and any({theirs, ours} <= words for words in _ACTIVATIONS):
        return True
    if theirs is None and ours == 1:  # of groups: one
        return True
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(theirs, ours, rel_tol=1e-9)
    return bool(theirs == ours)


def _require_same_rope(config: Config, model: ModelConfig, where: str) -> None:
    if model.positions != "rope":
        return
    tables = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    table: Config = dict(tables[0]) if tables else {}
    theta = table.get("rope_theta", config.get("rope_theta"))
    if theta is not None and not _same(theta, float(model.rope_theta)):
        raise TrainerError(_other(where, f"its rope_theta is {theta}, not {model.rope_theta:g}"))
    part = table.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if part not in (None, 1, 1.0):
        raise TrainerError(_other(where, f"it turns a part of each head ({part})"))
    ours = rope_table(model.rope_scaling) or {"rope_type": "default"}
    theirs = {"rope_type": table.get("type", "default"), **table}
    if any(key in theirs and not _same(theirs[key], ours[key]) for key in ours):
        raise TrainerError(_other(where, f"its rotary positions are {theirs}, not {ours}"))
    longest = config.get("max_position_embeddings")
    if ours["rope_type"] == "dynamic" and longest not in (None, longest_of(model)):
        ours = {"max_position_embeddings": longest_of(model)}
        raise TrainerError(_other(where, f"its dynamic positions begin at {longest}, not {ours}"))


def _require_same_window(config: Config, model: ModelConfig, seq_len: int, where: str) -> None:
    """Windows that a sequence does not fill are none."""
    theirs = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    seen = [
        window if window and window < seq_len else None for window in (theirs, model.sliding_window)
    ]
    if "sliding_window" in config and seen[0] != seen[1]:
        raise TrainerError(
            _other(where, f"its sliding_window is {theirs}, not {model.sliding_window or None}")
        )
