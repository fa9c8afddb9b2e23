"""What is said of a config whose family is not read: never of a mixture that it is dense."""

from __future__ import annotations

import difflib

from fsdpplan.errors import SpecError
from fsdpplan.files.table import Table, short

NOT_PLANNED = {
    "axk2": "its norms and its attention have gates of a kind of their own",
    "deepseek_v4": "attention compresses stretches of keys, and residual streams are several",
    "diffllama": "its attention is the difference of two",
    "ernie4_5_vl_moe": "text and images have experts of different widths in a block",
    "falcon_h1": "attention and Mamba-2 stand side by side in a block",
    "gemma3n": "each block has a table of embeddings, several streams and keys of another block",
    "gemma4": "heads of blocks with windows are of another width than those of blocks without",
    "glm5_next": "it carries several residual streams, mixed in each block",
    "hy_v4": "it carries several residual streams, mixed in each block",
    "jamba": "it has Mamba blocks of the first kind",
    "lfm2": "it has short convolutions in attention's place",
    "lfm3": "it has short convolutions in attention's place",
    "longcat_flash": "its blocks have two attentions, and experts that do nothing",
    "inkling2": "it convolves what attention and experts return",
    "minimax": "it has lightning attention",
    "mistral_large4": "its latent attention differs from block to block",
    "nanochat": "its norms have no weights",
    "zaya": "its attention is convolved, and its router has layers",
}
"""Families of transformers 5 by the beginning of `model_type`, and why no plan is made of them."""

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys that count routed experts; any other key about experts says as well that there are some."""
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_MOST_EXPERTS = 2048
"""Of a block; more are not networks each."""


def of_experts(table: Table) -> str:
    """The key that says that a model has experts, most telling first; empty: none does."""
    keys = sorted(key for key in table.values if "expert" in key.lower() or "moe" in key.lower())
    for key in (*_COUNTS, *keys):
        value = table.values.get(key)
        numbers = value if isinstance(value, list) else [value]
        if sum(number for number in numbers if type(number) is int) > 1:
            return key
    return ""


def refuse_mixture(table: Table, key: str, family: str, families: list[str]) -> SpecError:
    """The error for a mixture of a family that is not read, with the way out."""
    why = reason(family)
    said = f"not planned: {why}" if why else f"not read{_nearest(family, families)}"
    return SpecError(
        f"{table.field(key)} = {short(table.values[key])}: a mixture of experts of a family that "
        f"is {said}. Give its size by two numbers: {_two_numbers(table)}"
    )


def _nearest(family: str, families: list[str]) -> str:
    near = difflib.get_close_matches(family[:100], families, n=2, cutoff=0.6)
    return f"; nearest: {' and '.join(near)}" if near else ""


def reason(family: str) -> str:
    """Why a known family is not planned; empty: it is not known."""
    fitting = [name for name in NOT_PLANNED if family == name or family.startswith(f"{name}_")]
    return NOT_PLANNED[max(fitting, key=len)] if fitting else ""


def refuse_family(table: Table, family: str, families: list[str], *, wraps: bool) -> SpecError:
    """The error for a model of a family that is not read and has no experts."""
    field = f"{table.field('model_type')} {short(family)}"
    if why := reason(family):
        return SpecError(
            f"{field} is not planned: {why}. Give its size: --params, or with --layers --hidden "
            "--ffn-hidden --heads --kv-heads --vocab the shape of a plain decoder near it"
        )
    kind = " (it holds several models)" if wraps else ""
    return SpecError(
        f"{field} is not read{kind}{_nearest(family, families)}; supported: "
        f"{', '.join(families)}. Give the shape of another dense decoder itself: --layers --hidden "
        "--ffn-hidden --heads --kv-heads --vocab; of a model of another kind its size: --params, "
        "with --active-params if it has experts"
    )


def _two_numbers(table: Table) -> str:
    """`--params` and `--active-params`, with numbers where the fields say about how large it is.

        layers * 3 * hidden * width * experts + layers * 4 * hidden**2 + 2 * vocabulary * hidden

    Experts outnumber what is left out: blocks without them, norms, what narrows attention.
    """

    def whole(*keys: str) -> int:
        for key in keys:
            value = table.values.get(key)
            value = value[0] if isinstance(value, list) and value else value
            if type(value) is int and 0 < value < 10**8:
                return value
        return 0

    layers, hidden = whole("num_hidden_layers", "num_layers"), whole("hidden_size")
    experts, active, width = whole(*_COUNTS), whole(*_ACTIVE), whole(*_WIDTHS)
    if not (layers and hidden and active and width) or not 1 < experts <= _MOST_EXPERTS:
        return "--params TOTAL --active-params ACTIVE, as its publisher counts them"
    one = 3 * hidden * width
    sparse = layers // whole("expert_layer_period") if whole("expert_layer_period") else layers
    rest = layers * (4 * hidden * hidden + whole(*_SHARED) * one) + 2 * whole("vocab_size") * hidden
    total, met = (rest + sparse * number * one for number in (experts, active))
    return (
        f"--params {_typed(total)} --active-params {_typed(met)} is about what its fields come to, "
        "its publisher's own numbers are better"
    )


def _typed(count: int) -> str:
    """A count as one types it: `1.02e12`, `37e9`."""
    return f"{count / 1e12:.3g}e12" if count >= 1e12 else f"{count / 1e9:.3g}e9"
