"""A local Hugging Face `config.json` to a `Model`. JSON is parsed; no code of the model is run.

Defaults of absent keys are those of the configuration classes of transformers 5. Shapes must be
written: a default hidden size has never been what a user meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.table import Table, parse_json_object, path_text, read_text, short
from fsdpplan.spec.model import Model

_LIMIT_BYTES = 1024 * 1024
_MIXTURE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_SILU = ("silu", "swish")
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu", "gelu_fast", "gelu_python")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what its config says that the plan does not follow."""

    model: Model
    notes: tuple[str, ...]


def read_hf_config(path: Path | str) -> LoadedModel:
    """The model of a `config.json`, or of the folder that holds one."""
    file = Path(path)
    if os.path.isdir(file):  # Path.is_dir raises on a name that is too long
        file = file / "config.json"
    text = read_text(file, limit_bytes=_LIMIT_BYTES, what="model config")
    return parse_hf_config(text, where=path_text(file), name=_model_name(file))


def parse_hf_config(text: str, *, where: str, name: str) -> LoadedModel:
    """The model in the text of a `config.json`; `where` names the file in messages."""
    table = Table(where=where, values=parse_json_object(text, where=where))
    reader = _reader(table)
    notes: list[str] = []
    values = reader(table, notes)
    if "quantization_config" in table.values:
        notes.append("quantization_config is left out: training keeps its weights in fp32")
    try:
        return LoadedModel(model=Model(name=name, **values), notes=tuple(notes))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error


def _model_name(file: Path) -> str:
    """What to call the model: its folder for a `config.json`, else the file."""
    stem = file.resolve().parent.name if file.name == "config.json" else file.stem
    return stem[:100] if stem.isprintable() and stem.strip() else "model"


Reader = Callable[[Table, list[str]], dict[str, Any]]


def _reader(table: Table) -> Reader:
    """The reader of the config's family. Mixtures of experts are refused by name or by key."""
    families: dict[str, Reader] = {
        "gpt2": _gpt2,
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
    }
    supported = ", ".join(families)
    for key in _MIXTURE_KEYS:
        if isinstance(table.values.get(key), int) and table.values[key] > 1:
            raise SpecError(
                f"{table.field(key)} = {short(table.values[key])}: a mixture of experts, which "
                f"fsdpplan does not price yet; dense models that it reads: {supported}"
            )
    family = table.text("model_type")
    if family not in families:
        kind = " (it holds several models)" if "text_config" in table.values else ""
        raise SpecError(
            f"{table.field('model_type')} {short(family)} is not read{kind}; supported: "
            f"{supported}. For another dense decoder give the shape itself: --layers --hidden "
            "--ffn-hidden --heads --kv-heads --vocab"
        )
    return families[family]


def _optional_integer(table: Table, key: str, default: int) -> int:
    """`key`, or `default` where it is absent or null."""
    return default if table.values.get(key) is None else table.integer(key)


def _optional_flag(table: Table, key: str, default: bool) -> bool:
    return default if table.values.get(key) is None else table.flag(key)


def _optional_number(table: Table, key: str, default: float) -> float:
    return default if table.values.get(key) is None else table.number(key)


def _activation(table: Table, key: str, default: str, known: tuple[str, ...]) -> str:
    """The activation function, which must be one that the trainer has."""
    return default if table.values.get(key) is None else table.choice(key, known)


def _decoder(
    table: Table, notes: list[str], *, kv_heads: int | None, max_positions: int
) -> dict[str, Any]:
    """What Llama, Mistral and Qwen configs share, with the family's defaults of absent keys."""
    heads = table.integer("num_attention_heads")
    hidden = table.integer("hidden_size")
    _activation(table, "hidden_act", "silu", _SILU)
    if "num_key_value_heads" in table.values:
        kv_heads = None  # null: as many as query heads
    return {
        "layers": table.integer("num_hidden_layers"),
        "hidden": hidden,
        "ffn_hidden": table.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": _optional_integer(table, "num_key_value_heads", kv_heads or heads),
        "vocab": table.integer("vocab_size"),
        "max_positions": _optional_integer(table, "max_position_embeddings", max_positions),
        "tied_embeddings": _optional_flag(table, "tie_word_embeddings", False),
        "norm_epsilon": _optional_number(table, "rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(table, notes),
    }


def _head_dim(table: Table) -> int:
    """`head_dim`, or hidden / heads where it is absent or null."""
    if table.values.get("head_dim") is not None:
        return table.integer("head_dim")
    hidden, heads = table.integer("hidden_size"), table.integer("num_attention_heads")
    if hidden % heads:
        raise SpecError(
            f"{table.field('num_attention_heads')} {heads} does not divide hidden_size {hidden}; "
            "write head_dim, or correct one of them"
        )
    return hidden // heads


def _rope_theta(table: Table, notes: list[str]) -> float:
    """Base of the rotary frequencies: `rope_parameters` (transformers 5) or `rope_theta`."""
    theta = _optional_number(table, "rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        if table.values.get(key) is None:
            continue
        rope = table.table(key)
        theta = _optional_number(rope, "rope_theta", theta)
        if _optional_number(rope, "partial_rotary_factor", 1.0) != 1.0:
            raise rope.wrong("partial_rotary_factor", "1: positions turn whole heads here")
        kind = rope.values.get("rope_type", rope.values.get("type", "default"))
        if kind != "default":
            notes.append(
                f"{key} of type {short(kind)} is left out: it turns the angles of long positions "
                "and changes neither memory nor time"
            )
    if _optional_number(table, "partial_rotary_factor", 1.0) != 1.0:
        raise table.wrong("partial_rotary_factor", "1: positions turn whole heads here")
    return theta


def _note_window(table: Table, notes: list[str], *, window: int | None) -> None:
    """Sliding windows are planned and trained as full causal attention; say so."""
    if window is not None:
        notes.append(
            f"sliding_window {window} is planned and trained as full causal attention: the same "
            "up to that sequence length, slower above it"
        )


def _llama(table: Table, notes: list[str]) -> dict[str, Any]:
    bias = _optional_flag(table, "attention_bias", False)
    return _decoder(table, notes, kv_heads=None, max_positions=2048) | {
        "head_dim": _head_dim(table),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": _optional_flag(table, "mlp_bias", False),
    }


def _mistral(table: Table, notes: list[str]) -> dict[str, Any]:
    window = 4096
    if "sliding_window" in table.values:
        window = _optional_integer(table, "sliding_window", 0)
    _note_window(table, notes, window=window or None)
    return _decoder(table, notes, kv_heads=8, max_positions=131072) | {"head_dim": _head_dim(table)}


def _qwen_window(table: Table, notes: list[str]) -> None:
    if _optional_flag(table, "use_sliding_window", False):
        _note_window(table, notes, window=_optional_integer(table, "sliding_window", 4096))


def _qwen2(table: Table, notes: list[str]) -> dict[str, Any]:
    _qwen_window(table, notes)
    return _decoder(table, notes, kv_heads=32, max_positions=32768) | {
        "head_dim": _head_dim(table),
        "attention_bias": True,
    }


def _qwen3(table: Table, notes: list[str]) -> dict[str, Any]:
    _qwen_window(table, notes)
    bias = _optional_flag(table, "attention_bias", False)
    return _decoder(table, notes, kv_heads=32, max_positions=32768) | {
        "head_dim": _optional_integer(table, "head_dim", 128),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
    }


def _gpt2(table: Table, notes: list[str]) -> dict[str, Any]:
    if _optional_flag(table, "add_cross_attention", False):
        raise table.wrong("add_cross_attention", "false: only decoders are planned")
    kind = _activation(table, "activation_function", "gelu_new", _GELU)
    if kind not in ("gelu_new", "gelu_pytorch_tanh"):
        notes.append(f"activation_function {kind} is trained as the tanh form of GELU")
    hidden, heads = table.integer("n_embd"), table.integer("n_head")
    if hidden % heads:
        raise SpecError(f"{table.field('n_head')} {heads} does not divide n_embd {hidden}")
    return {
        "layers": table.integer("n_layer"),
        "hidden": hidden,
        "ffn_hidden": _optional_integer(table, "n_inner", 4 * hidden),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "vocab": table.integer("vocab_size"),
        "mlp": "gelu",
        "norm": "layernorm",
        "positions": "learned",
        "max_positions": _optional_integer(table, "n_positions", 1024),
        "tied_embeddings": _optional_flag(table, "tie_word_embeddings", True),
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "norm_epsilon": _optional_number(table, "layer_norm_epsilon", 1e-5),
    }
