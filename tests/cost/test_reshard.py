"""What a run reads when it goes on in another layout, against counting the overlaps one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.reshard import checkpoint_bytes, moved, overlaps
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training


@given(st.integers(1, 40), st.integers(1, 40))
def test_overlaps_are_those_of_equal_pieces(pieces: int, readers: int) -> None:
    """Piece i is [i/n, (i+1)/n), and the reader j takes [j/m, (j+1)/m)."""
    pairs = sum(
        max(i * readers, j * pieces) < min((i + 1) * readers, (j + 1) * pieces)
        for i in range(pieces)
        for j in range(readers)
    )
    assert overlaps(pieces, readers) == pytest.approx(pairs / pieces)


def case(gpus: int = 16, *, optimizer: str = "adamw", **layout: object) -> Case:
    training = Training(seq_len=4096, global_batch=64, optimizer=optimizer)  # type: ignore[arg-type]
    plain = Layout(dp_replicate=1, dp_shard=gpus, num_microbatches=64 // gpus)
    return Case(
        model=load_model("llama-3.2-1b"),
        cluster=load_cluster("dgx-h100", gpus=gpus).cluster,
        training=training,
        layout=replace(plain, **layout),  # type: ignore[arg-type]
    )


def test_saved_bytes_are_those_of_the_state_in_any_layout() -> None:
    whole = 12 * parameter_count(case().model)
    assert checkpoint_bytes(case()) == whole
    for layout in (
        {"dp_shard": 2, "dp_replicate": 8},
        {"dp_shard": 2, "tp": 8, "num_microbatches": 32},
        {"dp_shard": 4, "pp": 4, "schedule": "1f1b", "num_microbatches": 16},
        {"dp_shard": 1, "dp_replicate": 16, "sharding": "ddp"},
    ):
        assert checkpoint_bytes(case(**layout)) == pytest.approx(whole, rel=1e-3)
    assert checkpoint_bytes(case(optimizer="adamw_8bit")) == pytest.approx(whole / 2, rel=0.02)


def test_more_copies_and_finer_pieces_are_read_more_often() -> None:
    before, half = case(16), case(8)
    down = moved(before, half)
    assert down.read_bytes == down.saved_bytes == checkpoint_bytes(before)
    up = moved(half, before)
    assert up.read_bytes == 2 * up.saved_bytes
    copies = moved(before, case(16, dp_shard=8, dp_replicate=2))
    assert copies.read_bytes == 2 * copies.saved_bytes


def test_it_takes_the_slower_of_storage_and_network() -> None:
    one = moved(case(16), case(16))
    assert one.network_bytes_per_second == 2 * 8 * 50e9
    assert one.seconds(10e9) == pytest.approx(3 * one.saved_bytes / 10e9)
    assert one.seconds(None) == one.seconds(1e15) == pytest.approx(3 * one.saved_bytes / 800e9)
    assert moved(case(16), case(8)).seconds(None) == 0
