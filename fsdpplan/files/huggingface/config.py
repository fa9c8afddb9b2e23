"""A local Hugging Face `config.json` to a `Model`. JSON is parsed; no code of the model is run.

Defaults of absent keys are those of the configuration classes of transformers 5. Shapes must be
written: a default hidden size has never been what a user meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface import experts as hf_experts
from fsdpplan.files.huggingface import gpt as hf_gpt
from fsdpplan.files.huggingface import llama as hf_llama
from fsdpplan.files.huggingface.fields import optional_number
from fsdpplan.files.huggingface.llama import Fields
from fsdpplan.files.huggingface.unread import of_experts, refuse_family, refuse_mixture
from fsdpplan.files.huggingface.wrappers import text_model
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
    "kimi_k2": hf_experts.deepseek_v3,
    "qwen3_vl_moe": hf_experts.qwen3_moe,
    "qwen3_vl_moe_text": hf_experts.qwen3_moe,
    "gpt_oss": hf_experts.gpt_oss,
    "mixtral": hf_experts.mixtral,
    "qwen2_moe": hf_experts.qwen2_moe,
    "qwen3_moe": hf_experts.qwen3_moe,
}

LATER_FAMILIES: dict[str, dict[str, str]] = {
    "dense": {
        "apertus": "apertus",
        "arcee": "arcee",
        "cohere": "cohere",
        "cohere2": "cohere2",
        "cwm": "cwm",
        "ernie4_5": "ernie4_5",
        "exaone4": "exaone4",
        "glm": "glm",
        "glm4": "glm4",
        "glm4v_text": "glm4",
        "granite": "granite",
        "helium": "helium",
        "hunyuan_v1_dense": "hunyuan_v1_dense",
        "internlm3": "internlm3",
        "jais2": "jais2",
        "ministral": "ministral",
        "ministral3": "ministral3",
        "mistral3": "ministral3",
        "qwen2_5_vl_text": "qwen2_text",
        "qwen2_vl_text": "qwen2_text",
        "qwen3_vl": "qwen3_vl",
        "qwen3_vl_text": "qwen3_vl",
        "seed_oss": "seed_oss",
        "smollm3": "smollm3",
        "stablelm": "stablelm",
        "vaultgemma": "vaultgemma",
        "youtu": "youtu",
    },
    "hybrids": {
        "deepseek_v32": "deepseek_v32",
        "glm_moe_dsa": "glm_moe_dsa",
        "llama4": "llama4",
        "llama4_text": "llama4",
        "nemotron_h": "nemotron_h",
        "qwen3_5": "qwen3_5",
        "qwen3_5_text": "qwen3_5",
        "qwen3_5_moe": "qwen3_5_moe",
        "qwen3_5_moe_text": "qwen3_5_moe",
        "qwen3_next": "qwen3_next",
    },
    "states": {
        "bailing_hybrid": "bailing_hybrid",
        "bamba": "bamba",
        "granitemoehybrid": "granitemoehybrid",
        "kimi_linear": "kimi_linear",
        "olmo_hybrid": "olmo_hybrid",
    },
    "sparse": {
        "afmoe": "afmoe",
        "axk1": "axk1",
        "bailing_moe": "bailing_moe",
        "bailing_moe_v2": "bailing_moe",
        "cohere2_moe": "cohere2_moe",
        "dots1": "dots1",
        "ernie4_5_moe": "ernie4_5_moe",
        "exaone_moe": "exaone_moe",
        "flex_olmo": "flex_olmo",
        "glm4_moe": "glm4_moe",
        "glm4_moe_lite": "glm4_moe_lite",
        "glm4v_moe_text": "glm4_moe_text",
        "granitemoe": "granitemoe",
        "granitemoeshared": "granitemoe",
        "hunyuan_v1_moe": "hunyuan_v1_moe",
        "hy_v3": "hy_v3",
        "laguna": "laguna",
        "mellum": "mellum",
        "mimo_v2_flash": "mimo_v2_flash",
        "minimax_m2": "minimax_m2",
        "minimax_m3_vl_text": "minimax_m3",
        "mistral4": "mistral4",
        "olmoe": "olmoe",
        "phimoe": "phimoe",
        "solar_open": "solar_open",
        "step3p5": "step3p5",
    },
}
"""Readers of few configs by the module of this folder that is read where one is asked for."""


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
    whole = Table(where=where, values=parse_json_object(text, where=where))
    notes: list[str] = []
    table = text_model(whole, notes)
    family = _family(whole, table)
    reader = _reader(table, family)
    try:
        model = Model(name=name, **reader(table, notes))
    except SpecError as error:
        if str(error).startswith(where):
            raise
        raise SpecError(f"{where}: {error}") from error
    dropout = _dropout(table, family, notes)
    notes += _left_out(table)
    if "quantization_config" in whole.values or "quantization_config" in table.values:
        notes.append("quantization_config is left out: training keeps its weights in fp32")
    return LoadedModel(model=model, notes=tuple(notes), dropout=dropout)


LEFT_OUT = {
    "attn_logit_softcapping": "scores are not capped",
    "final_logit_softcapping": "logits are not capped",
    "moe_router_logit_softcapping": "scores of experts are not capped",
    "swiglu_limit": "activations of experts are not clamped",
    "swiglu_limits": "activations of experts are not clamped",
}
"""Keys that change what a forward pass computes, and what stands in its place here: time and memory
hardly hang on them, and the trainer takes no published weights of such a model."""


MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "attention_value_scale",
    "logits_scaling",
    "logit_scale",
)
"""Keys of constants that a forward pass multiplies by."""


def _left_out(table: Table) -> list[str]:
    notes = [
        f"{key} {short(table.values[key])} is left out: {instead}"
        for key, instead in LEFT_OUT.items()
        if table.values.get(key) not in (None, 0)
    ]
    found = [key for key in MULTIPLIERS if table.values.get(key) not in (None, 1)]
    if found:
        notes.append(f"{' and '.join(found)} left out: constants that nothing is multiplied by")
    return notes


def _dropout(table: Table, family: str, notes: list[str]) -> Dropout | None:
    """The probabilities of the config, or of its family; the others are noted."""
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
    later = [family for readers in LATER_FAMILIES.values() for family in readers]
    return sorted([*DENSE_FAMILIES, *MIXTURE_FAMILIES, *later])


def _family(whole: Table, text: Table) -> str:
    """The family of a config: its own where that is read, of a wrapper else its text model's."""
    family = whole.text("model_type")
    if text is whole or family in families():
        return family
    if text.values.get("model_type") is None:
        return family
    return text.text("model_type")


def _reader(table: Table, family: str) -> Reader:
    """The reader of the config's family."""
    if family in MIXTURE_FAMILIES:
        return MIXTURE_FAMILIES[family]
    for module, readers in LATER_FAMILIES.items():
        if family in readers:
            later = import_module(f"fsdpplan.files.huggingface.{module}")
            reader: Reader = getattr(later, readers[family])
            return reader
    if key := of_experts(table):
        raise refuse_mixture(table, key, family, families())
    if family not in DENSE_FAMILIES:
        raise refuse_family(table, family, families(), wraps=bool(table.prefix))
    return DENSE_FAMILIES[family]
