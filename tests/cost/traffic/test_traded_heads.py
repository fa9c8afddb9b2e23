"""Traded heads: what attention over CPU processes exchanges (real runs are in tests/trainer)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.calls import traded_widths
from fsdpplan.spec.layout import Layout
from tests.cost.problems import SMALL, Case, case
from tests.cost.wide import LATENT, wide_cases


def cp_bytes(case: Case, kind: str) -> dict[str, int]:
    """Bytes that a block moves over cp, by collective."""
    moved: dict[str, int] = {}
    device = replace(case.cluster.device, kind=kind)  # type: ignore[arg-type]
    for call in block_calls(replace(case, cluster=replace(case.cluster, device=device))):
        if call.group.axis == "cp":
            size = call.count * call.call_bytes
            moved[call.collective] = moved.get(call.collective, 0) + size
    return moved


def test_queries_keys_values_and_outputs_travel_once_each_way() -> None:
    asked = case(cp=2, dp_shard=2, seq_len=1024)
    # 512 tokens, bf16; 16 heads of 64 and 8 for keys and for values; forward and backward
    width = 16 * 64 + 2 * 8 * 64 + 16 * 64
    assert cp_bytes(asked, "cpu") == {"all_to_all": 2 * 2 * 512 * width}


def test_recomputed_attention_trades_its_inputs_again() -> None:
    plain = case(cp=2, dp_shard=2)
    inputs = 512 * 2 * (16 + 2 * 8) * 64
    outputs = 512 * 2 * 16 * 64
    before = cp_bytes(plain, "cpu")["all_to_all"]
    for mode, more in (("attention", inputs), ("op", inputs + outputs), ("full", inputs + outputs)):
        again = plain.with_layout(activation_checkpointing=mode)
        assert cp_bytes(again, "cpu")["all_to_all"] == before + more


def test_key_heads_are_repeated_until_the_ranks_divide_them() -> None:
    model = replace(SMALL, heads=16, kv_heads=4, head_dim=1, positions="learned")
    widths = {cp: traded_widths(model, Layout(cp=cp)) for cp in (1, 2, 4, 8, 16)}
    assert {cp: into - 16 for cp, (into, _) in widths.items()} == {1: 8, 2: 8, 4: 8, 8: 16, 16: 32}
    assert {out for _, out in widths.values()} == {16}


def test_latent_attention_trades_as_many_keys_as_queries() -> None:
    assert LATENT.latent is not None
    into, out = traded_widths(LATENT, Layout(cp=2))
    assert out == LATENT.heads * LATENT.latent.value_head_dim
    assert into == LATENT.heads * (2 * LATENT.head_dim + LATENT.latent.value_head_dim)


@given(wide_cases())
def test_a_ring_is_cudas_and_an_all_to_all_the_cpus(drawn: Case) -> None:
    assert "all_to_all" not in cp_bytes(drawn, "cuda")
    assert set(cp_bytes(drawn, "cpu")) <= {"all_to_all"}
