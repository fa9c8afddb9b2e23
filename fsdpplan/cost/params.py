"""Parameters: every tensor of the model, and how many elements it has.

Golden: GPT-2 Small 124,439,808 and GPT-2 Large 774,030,080 (transformers on the meta device).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from fsdpplan.spec.model import Model

TensorParallelSplit = Literal["rows", "columns", "none"]
"""Which dimension tensor parallelism splits: dim 0, dim 1, or none (replicated)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One parameter as torch holds it."""

    name: str
    """Name within its block, or within the model."""
    shape: tuple[int, ...]
    split: TensorParallelSplit

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape on one of `tp` tensor-parallel ranks (the fullest one)."""
        match self.split:
            case "rows":
                return (-(-self.shape[0] // tp), *self.shape[1:])
            case "columns":
                return (self.shape[0], -(-self.shape[1] // tp))
            case "none":
                return self.shape


def _linear(
    name: str, rows: int, columns: int, *, bias: bool, split: TensorParallelSplit
) -> list[ParameterTensor]:
    tensors = [ParameterTensor(name=f"{name}.weight", shape=(rows, columns), split=split)]
    if bias:
        bias_split: TensorParallelSplit = "rows" if split == "rows" else "none"
        tensors.append(ParameterTensor(name=f"{name}.bias", shape=(rows,), split=bias_split))
    return tensors


def _norm(name: str, width: int, *, bias: bool) -> list[ParameterTensor]:
    tensors = [ParameterTensor(name=f"{name}.weight", shape=(width,), split="none")]
    if bias:
        tensors.append(ParameterTensor(name=f"{name}.bias", shape=(width,), split="none"))
    return tensors


@lru_cache(maxsize=64)
def block_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Parameters of one transformer block, in the order in which torch registers them."""
    layer_norm = model.norm == "layernorm"
    attention_bias = model.attention_bias
    h, ffn = model.hidden, model.ffn_hidden
    tensors = _norm("attention_norm", h, bias=layer_norm)
    tensors += _linear("wq", model.query_dim, h, bias=attention_bias, split="rows")
    tensors += _linear("wk", model.kv_dim, h, bias=attention_bias, split="rows")
    tensors += _linear("wv", model.kv_dim, h, bias=attention_bias, split="rows")
    tensors += _linear("wo", h, model.query_dim, bias=model.attention_output_bias, split="columns")
    if model.qk_norm:
        tensors += _norm("q_norm", model.head_dim, bias=False)
        tensors += _norm("k_norm", model.head_dim, bias=False)
    tensors += _norm("ffn_norm", h, bias=layer_norm)
    tensors += _linear("w1", ffn, h, bias=model.mlp_bias, split="rows")
    tensors += _linear("w2", h, ffn, bias=model.mlp_bias, split="columns")
    if model.mlp == "swiglu":
        tensors += _linear("w3", ffn, h, bias=model.mlp_bias, split="rows")
    return tuple(tensors)


@lru_cache(maxsize=64)
def embedding_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Token table and, where learned, position table."""
    tensors = [
        ParameterTensor(
            name="tok_embeddings.weight", shape=(model.vocab, model.hidden), split="rows"
        )
    ]
    if model.positions == "learned":
        tensors.append(
            ParameterTensor(
                name="pos_embeddings.weight",
                shape=(model.max_positions, model.hidden),
                split="none",
            )
        )
    return tuple(tensors)


@lru_cache(maxsize=64)
def head_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Final norm and, unless tied, the output head."""
    tensors = _norm("norm", model.hidden, bias=model.norm == "layernorm")
    if not model.tied_embeddings:
        tensors.append(
            ParameterTensor(name="output.weight", shape=(model.vocab, model.hidden), split="rows")
        )
    return tuple(tensors)


def elements(tensors: tuple[ParameterTensor, ...]) -> int:
    """Elements of all `tensors`."""
    return sum(tensor.elements for tensor in tensors)


@lru_cache(maxsize=64)
def parameter_count(model: Model) -> int:
    """Parameters of the model; a tied head counts once."""
    return (
        model.layers * elements(block_tensors(model))
        + elements(embedding_tensors(model))
        + elements(head_tensors(model))
    )


@lru_cache(maxsize=64)
def matmul_parameter_count(model: Model) -> int:
    """Weights that multiply each token: all matrices of the blocks and the output head.

    The embedding look-up, norms and biases are out; a tied head is in.
    """
    block = sum(t.elements for t in block_tensors(model) if len(t.shape) == 2)
    return model.layers * block + model.vocab * model.hidden
