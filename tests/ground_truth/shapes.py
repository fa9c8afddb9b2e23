"""Models of the ground-truth tests: real families' shapes, few layers; and shapes that divide by
nothing."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model

LLAMA_8B = replace(load_model("llama-3.1-8b"), layers=4)
LLAMA_70B = load_model("llama-3.1-70b")
LLAMA_SMALL_VOCAB = replace(LLAMA_8B, vocab=8192)
GPT2 = replace(load_model("gpt2"), layers=6)
QWEN3 = replace(load_model("qwen3-0.6b"), layers=6)
SMALL = Model(
    name="small",
    layers=4,
    hidden=512,
    ffn_hidden=1408,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocab=8192,
)
ODD = Model(
    name="odd",
    layers=4,
    hidden=330,
    ffn_hidden=1001,
    heads=6,
    kv_heads=3,
    head_dim=50,
    vocab=1237,
)
