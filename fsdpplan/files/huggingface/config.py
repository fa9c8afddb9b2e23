"""A local Hugging Face `config.json` to a `Model`. JSON is parsed; no code of the model is run.

Defaults of absent keys are those of the configuration classes of transformers 5. Shapes must be
written: a default hidden size has never been what a user meant.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface import experts as hf_experts
from fsdpplan.files.huggingface import gpt as hf_gpt
from fsdpplan.files.huggingface import llama as hf_llama
from fsdpplan.files.huggingface.fields import optional_number
from fsdpplan.files.huggingface.llama import Fields
from fsdpplan.files.table import Table, parse_json_object, path_text, read_text, short
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Dropout

_LIMIT_BYTES = 1024 * 1024
DROPOUTS: dict[str, dict[str, str]] = {
    "bloom": {"attention": "attention_dropout", "residual": "hidden_dropout"},
    "gpt2": {"attention": "attn_pdrop", "residual": "resid_pdrop", "embedding": "embd_pdrop"},
    "gpt_neox": {
        "attention": "attention_dropout",
        "residual": "hidden_dropout",
        "embedding": "hidden_dropout",
    },
    "opt": {"attention": "attention_dropout", "residual": "dropout"},
    "phi3": {"attention": "attention_dropout", "residual": "resid_pdrop"},
    "starcoder2": {
        "attention": "attention_dropout",
        "residual": "residual_dropout",
        "embedding": "embedding_dropout",
    },
}
"""Key by family of each probability that its modeling module reads; most have that of attention
alone. Falcon and MPT share theirs out otherwise. Source: transformers 5."""
OTHER_DROPOUTS = frozenset(
    {"attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "hidden_dropout"}
    | {"resid_pdrop", "residual_dropout"}
)
"""Keys that are said to be left out where the family does not read them so."""
_DROPOUT_DEFAULTS = {"gpt2": 0.1, "opt": 0.1}
"""Where the key is absent, but for OPT's of attention."""
_MIXTURE_KEYS = (*hf_experts.EXPERT_KEYS, "moe_intermediate_size")

Reader = Callable[[Table, list[str]], Fields]

DENSE_FAMILIES: dict[str, Reader] = {
    "bloom": hf_gpt.bloom,
    "falcon": hf_gpt.falcon,
    "gemma": hf_llama.gemma,
    "gemma2": hf_llama.gemma2,
    "gemma3": hf_llama.gemma3_with_vision,
    "gemma3_text": hf_llama.gemma3,
    "gpt2": hf_gpt.gpt2,
    "gpt_neox": hf_gpt.gpt_neox,
    "llama": hf_llama.llama,
    "mistral": hf_llama.mistral,
    "mpt": hf_gpt.mpt,
    "nemotron": hf_gpt.nemotron,
    "olmo2": hf_llama.olmo2,
    "olmo3": hf_llama.olmo3,
    "opt": hf_gpt.opt,
    "phi3": hf_llama.phi3,
    "qwen2": hf_llama.qwen2,
    "qwen3": hf_llama.qwen3,
    "starcoder2": hf_gpt.starcoder2,
}
"""Readers by `model_type`."""

MIXTURE_FAMILIES: dict[str, Reader] = {
    "deepseek_v2": hf_experts.deepseek_v2,
    "deepseek_v3": hf_experts.deepseek_v3,
    "gpt_oss": hf_experts.gpt_oss,
    "mixtral": hf_experts.mixtral,
    "qwen2_moe": hf_experts.qwen2_moe,
    "qwen3_moe": hf_experts.qwen3_moe,
}

LATER_FAMILIES: dict[str, str] = {
    "deepseek_v32": "deepseek_v32",
    "glm4_moe": "glm4_moe",
    "llama4": "llama4",
    "llama4_text": "llama4",
    "minimax_m2": "minimax_m2",
    "ministral3": "ministral3",
    "mistral3": "ministral3",
    "nemotron_h": "nemotron_h",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
}
"""Readers in `hybrids`, which is read where one of them is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and what its config says that the plan does not follow."""

    model: Model
    notes: tuple[str, ...]
    dropout: Dropout | None = None
    """What training with transformers drops; None: nothing."""


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
    try:
        model = Model(name=name, **reader(table, notes))
    except SpecError as error:
        if str(error).startswith(where):
            raise
        raise SpecError(f"{where}: {error}") from error
    dropout = _dropout(table, notes)
    notes += _left_out(table)
    if "quantization_config" in table.values:
        notes.append("quantization_config is left out: training keeps its weights in fp32")
    return LoadedModel(model=model, notes=tuple(notes), dropout=dropout)


LEFT_OUT = {
    "attn_logit_softcapping": "scores are not capped",
    "final_logit_softcapping": "logits are not capped",
    "swiglu_limit": "activations of experts are not clamped",
}
"""Keys that change what a forward pass computes, and what stands in its place here: time and memory
hardly hang on them, and the trainer takes no published weights of such a model."""


def _left_out(table: Table) -> list[str]:
    places = [table.values]
    if isinstance(inner := table.values.get("text_config"), dict):
        places.append(inner)
    return [
        f"{key} {short(values[key])} is left out: {instead}"
        for values in places
        for key, instead in LEFT_OUT.items()
        if values.get(key) is not None
    ]


def _dropout(table: Table, notes: list[str]) -> Dropout | None:
    """The probabilities of the config, or of its family; the others are noted."""
    family = table.text("model_type")
    keys = DROPOUTS.get(family, {"attention": "attention_dropout"})
    if family in ("falcon", "mpt"):
        keys = {}
    usual = _DROPOUT_DEFAULTS.get(family, 0.0)
    defaults = {
        key: 0.0 if (family, key) == ("opt", "attention_dropout") else usual
        for key in keys.values()
    }
    values = {place: optional_number(table, key, defaults[key]) for place, key in keys.items()}
    for key in sorted(OTHER_DROPOUTS - set(keys.values())):
        if table.values.get(key) not in (None, 0):
            notes.append(
                f"{key} {short(table.values[key])} is left out: {family} has no such use of it"
            )
    for place, value in values.items():
        if not 0 <= value < 1:
            raise table.wrong(keys[place], "a probability below 1")
    dropout = Dropout(**values)
    return dropout if dropout.drops else None


def _model_name(file: Path) -> str:
    """What to call the model: its folder for a `config.json`, else the file."""
    stem = file.resolve().parent.name if file.name == "config.json" else file.stem
    return stem[:100] if stem.isprintable() and stem.strip() else "model"


def families() -> list[str]:
    """Each `model_type` that is read."""
    return sorted([*DENSE_FAMILIES, *MIXTURE_FAMILIES, *LATER_FAMILIES])


def _reader(table: Table) -> Reader:
    """The reader of the config's family."""
    family = table.text("model_type")
    if family in MIXTURE_FAMILIES:
        return MIXTURE_FAMILIES[family]
    if family in LATER_FAMILIES:
        from fsdpplan.files.huggingface import hybrids  # of few configs

        reader: Reader = getattr(hybrids, LATER_FAMILIES[family])
        return reader
    for key in _MIXTURE_KEYS:
        if isinstance(table.values.get(key), int) and table.values[key] > 1:
            raise SpecError(
                f"{table.field(key)} = {short(table.values[key])}: a mixture of experts of a "
                f"family that is not read; those read: {', '.join(families())}. Give its "
                "size: --params with --active-params"
            )
    if family not in DENSE_FAMILIES:
        near = difflib.get_close_matches(family[:100], families(), n=2, cutoff=0.6)
        kind = " (it holds several models)" if "text_config" in table.values else ""
        kind += f"; nearest: {' and '.join(near)}" if near else ""
        raise SpecError(
            f"{table.field('model_type')} {short(family)} is not read{kind}; supported: "
            f"{', '.join(families())}. Give "
            "the shape of another dense decoder itself: --layers --hidden --ffn-hidden --heads "
            "--kv-heads --vocab"
        )
    return DENSE_FAMILIES[family]
