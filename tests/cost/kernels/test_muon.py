"""Muon: golden numbers of Llama 3.1 8B by hand, and who shares which matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.kernels.optimizer import (
    NEWTON_SCHULZ_STEPS,
    Matrices,
    deal_rounds,
    muon_elements,
    muon_matrices,
    muon_seconds,
    newton_schulz_seconds,
)
from fsdpplan.cost.memory.ledger import rank_state
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.network.placement import Group
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Experts
from fsdpplan.spec.training import Training
from tests.cost.problems import SMALL, Case, case
from tests.cost.works import H100

BLOCK_MATRICES = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
"""Elements: query and output, key and value, the feed-forward's three."""


def muon(name: str = "llama-3.1-8b", **layout: object) -> Case:
    drawn = case(name, **layout)
    return replace(drawn, training=replace(drawn.training, optimizer="muon"))


def matrices_of(drawn: Case) -> tuple[Matrices, ...]:
    stage = whole_model(drawn.model)
    return muon_matrices(drawn, stage)


def test_a_matrix_takes_longer_than_its_flops_at_the_peak() -> None:
    seconds = newton_schulz_seconds(rows=4096, columns=14336, device=H100)
    m, n = 4096, 14336
    flops = NEWTON_SCHULZ_STEPS * (2 * 2 * m * m * n + 2 * m**3)  # X Xᵀ, its square, both with X
    least = flops / H100.peak_flops_per_second("bf16")
    assert least < seconds < 3 * least


def test_ranks_exchange_their_parts_of_all_matrices_twice() -> None:
    drawn = muon(dp_shard=64)
    calls = [
        call
        for call in step_calls(drawn, whole_model(drawn.model))
        if call.collective == "all_to_all"
    ]
    (call,) = calls
    # 7 * 32 = 224 matrices, 64 in a round: 4 rounds there and back
    assert call.count == 8
    assert call.count * call.call_bytes == 2 * 2 * 32 * BLOCK_MATRICES // 64
    assert call.group == Group(axis="dp_shard", ranks=64, stride=1)


def test_the_exchange_is_waited_for() -> None:
    drawn = muon(dp_shard=8)
    adamw = estimate(replace(drawn, training=replace(drawn.training, optimizer="adamw")))
    with_muon = estimate(drawn)
    (row,) = [row for row in with_muon.communication if row.collective == "all_to_all"]
    assert row.exposed_seconds == pytest.approx(row.seconds)
    assert not [row for row in adamw.communication if row.collective == "all_to_all"]
    waiting = with_muon.time.exposed_communication_seconds
    assert waiting == pytest.approx(adamw.time.exposed_communication_seconds + row.seconds)
    assert with_muon.time.optimizer_seconds > adamw.time.optimizer_seconds
    assert with_muon.time.compute_seconds == adamw.time.compute_seconds


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_momentum_is_half_of_two_moments(ranks: int) -> None:
    layout = {"dp_shard": ranks} if ranks > 1 else {"sharding": "ddp"}
    drawn = muon(**layout)
    stage = whole_model(drawn.model)
    state = rank_state(drawn, stage)
    assert muon_elements(drawn, stage, is_whole=ranks == 1) == 32 * BLOCK_MATRICES // ranks
    assert state.optimizer == 8 * state.optimizer_parameters - 4 * 32 * BLOCK_MATRICES // ranks


def test_moments_of_8_bits_have_a_scale_for_each_256() -> None:
    drawn = muon(dp_shard=8)
    eight_bit = replace(drawn, training=replace(drawn.training, optimizer="adamw_8bit"))
    state = rank_state(eight_bit, whole_model(drawn.model))
    assert state.optimizer == pytest.approx(state.optimizer_parameters * (2 + 8 / 256))


def test_replicas_orthogonalise_the_same_and_shards_share_it() -> None:
    def seconds(**layout: object) -> float:
        return muon_seconds(matrices=matrices_of(muon(**layout)), device=H100)

    alone = seconds(sharding="ddp", dp_replicate=8)
    assert alone == pytest.approx(seconds(sharding="ddp", dp_replicate=2))
    assert seconds(dp_shard=8) == pytest.approx(alone / 8, rel=0.05)
    assert seconds(dp_replicate=2, dp_shard=8) == pytest.approx(seconds(dp_shard=8))


def test_tensor_parallel_ranks_share_what_they_split() -> None:
    drawn = muon(dp_shard=4, tp=2, sequence_parallel=True, loss_parallel=True)
    groups = {one.sharers for one in matrices_of(drawn)}
    assert groups == {Group(axis="dp_shard*tp", ranks=8, stride=1)}
    drawn = muon(sharding="ddp", dp_replicate=2, tp=2, sequence_parallel=True, loss_parallel=True)
    assert {one.sharers.axis for one in matrices_of(drawn)} == {"tp"}


@pytest.mark.parametrize(
    ("layout", "stack", "ranks"),
    [
        ({"dp_shard": 8}, 1, 1),
        ({"dp_shard": 4}, 2, 1),
        ({"dp_shard": 16}, 8, 16),
        ({"dp_shard": 16, "ep": 4}, 2, 4),
        ({"dp_shard": 8, "ep": 4}, 1, 1),
        ({"dp_shard": 64, "ep": 4}, 2, 16),
    ],
)
def test_experts_are_whole_where_there_are_as_many_as_ranks(
    layout: dict[str, int], stack: int, ranks: int
) -> None:
    drawn = muon(**layout)
    model = replace(SMALL, experts=Experts(experts=8, active=2, hidden=2048))
    found = {
        (one.stack, one.sharers.ranks)
        for one in matrices_of(replace(drawn, model=model))
        if {one.rows, one.columns} == {2048, SMALL.hidden}
    }
    assert (stack, ranks) in found


def test_rounds_are_as_many_as_it_takes_to_deal_all_out() -> None:
    group = Group(axis="dp_shard", ranks=4, stride=1)
    small, large = (
        Matrices(rows=n, columns=n, stack=1, number=5, sharers=group) for n in (1024, 4096)
    )
    assert deal_rounds((small, large)) == {group: 3}
    # rounds of LLLL, Lsss, ss: each as long as its costliest
    costs = [newton_schulz_seconds(rows=n, columns=n, device=H100) for n in (1024, 4096)]
    expected = 2 * costs[1] + costs[0]
    assert muon_seconds(matrices=(small, large), device=H100) == pytest.approx(expected)


def test_other_softwares_have_adamw_only() -> None:
    with pytest.raises(SpecError, match="optimizer muon is that of runtime fsdp2"):
        Training(seq_len=1, global_batch=1, runtime="megatron", optimizer="muon")
