"""Context parallelism: who holds which positions, what is refused, and the ring of CUDA."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.model.attention import AttentionCore, AttentionKernel
from fsdpplan.trainer.parallel.context_parallel import own_positions, shared_heads
from fsdpplan.trainer.parallel.support import require_runnable
from fsdpplan.trainer.private_torch import (
    attend_around_a_ring,
    has_ring_attention,
    share_of_pieces,
)
from fsdpplan.trainer.rehearse.fake_world import fake_world
from tests.trainer import plans
from tests.trainer.parallel_layouts import MODELS


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from(["ring", "ulysses"]),
)
def test_ranks_share_the_positions_of_a_sequence(
    cp: int, piece: int, kind: str, attention: str
) -> None:
    training = {"seq_len": 2 * cp * piece}
    document = plans.plan_document(training=training, cp=cp, cp_attention=attention)
    document["cluster"]["device"]["kind"] = kind
    plan = parse_plan(json.dumps(document))
    parts = [own_positions(plan, cp_rank=rank) for rank in range(cp)]
    assert {len(part) for part in parts} == {2 * piece}
    assert sorted(torch.cat(parts).tolist()) == list(range(2 * cp * piece))
    if kind == "cpu" or attention == "ulysses":
        assert torch.cat(parts).tolist() == list(range(2 * cp * piece))
    elif has_ring_attention():
        assert torch.equal(torch.cat(parts), share_of_pieces(2 * cp * piece, cp))


@given(st.integers(1, 32), st.integers(1, 16), st.integers(1, 8))
def test_heads_are_made_up_so_that_ranks_divide_them(key_heads: int, cp: int, group: int) -> None:
    shared = shared_heads(key_heads * group, key_heads, ranks=cp)
    keys = shared.padded_key_heads * shared.copies
    assert keys % cp == 0
    assert shared.heads % keys == 0
    if key_heads * group % cp == 0:
        assert shared.heads == key_heads * group
    assert shared.heads < key_heads * group + cp * group


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 4))
def test_attention_of_heads_that_are_made_up_is_that_of_those_there_were(
    key_heads: int, cp: int, group: int
) -> None:
    shared = shared_heads(key_heads * group, key_heads, ranks=cp)
    q = torch.randn(1, key_heads * group, 3, 4)
    k, v = torch.randn(2, 1, key_heads, 3, 4).unbind()
    sent = shared.padded(q), shared.repeated(k), shared.repeated(v)
    out, alone = (F.scaled_dot_product_attention(*of, enable_gqa=True) for of in (sent, (q, k, v)))
    torch.testing.assert_close(shared.cut(out), alone)


@pytest.mark.parametrize(
    ("kind", "model", "layout", "words"),
    [
        ("cpu", {}, {"cp": 2, "sharding": "ddp"}, "sharding ddp with cp 2"),
        ("cuda", {}, {"cp": 24}, "twice cp"),
        (
            "cuda",
            {"sliding_window": 4, "full_attention_every": 2},
            {"cp": 2},
            "with sliding windows",
        ),
        ("cuda", {"attention_sinks": True}, {"cp": 2}, "with attention sinks"),
    ],
)
def test_what_attention_over_ranks_cannot_do_is_refused_in_words(
    kind: str, model: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    document = plans.plan_document(model=MODELS["llama"] | model, **layout)
    document["cluster"]["device"]["kind"] = kind
    with pytest.raises(TrainerError, match=words):
        require_runnable(parse_plan(json.dumps(document)))


@pytest.mark.parametrize("model", [{"sliding_window": 4}, {"attention_sinks": True}])
def test_traded_heads_take_what_a_ring_does_not(model: dict[str, Any]) -> None:
    document = plans.plan_document(model=MODELS["llama"] | model, cp=2, cp_attention="ulysses")
    document["cluster"]["device"]["kind"] = "cuda"
    require_runnable(parse_plan(json.dumps(document)))


class Kernel(AttentionKernel):
    """Keeps what it is called with."""

    def forward(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, **given: Any) -> Tensor:
        self.given = (q_BHTE, k_BHTE, v_BHTE)
        return q_BHTE


@pytest.mark.skipif(not has_ring_attention(), reason="ring attention came with torch 2.10")
def test_a_ring_gives_its_kernel_sequences_that_are_split_over_its_ranks() -> None:
    with fake_world(2):
        core = AttentionCore(scale=1.0)
        core.kernel = Kernel()
        attend_around_a_ring(core.kernel, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
        q, k = torch.ones(1, 4, 6, 8), torch.ones(1, 2, 6, 8)
        out = core(q, k, k[..., :4])
        assert not isinstance(out, DTensor)
        assert out.shape == (1, 4, 6, 4)
        for tensor in core.kernel.given:
            assert isinstance(tensor, DTensor)
            assert tensor.placements == (Shard(2),)
            assert tensor.shape[2] == 12
