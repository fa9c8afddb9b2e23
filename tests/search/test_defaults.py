"""Defaults: a global batch that every data-parallel degree divides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.search.pins import DEFAULT_TOKENS_PER_STEP, default_global_batch


@given(st.sampled_from([512, 1024, 4096, 8192, 131072]), st.integers(1, 4096))
def test_about_4_mi_tokens_that_the_ranks_divide(seq_len: int, gpus: int) -> None:
    batch = default_global_batch(seq_len=seq_len, gpus=gpus)
    wanted = DEFAULT_TOKENS_PER_STEP / seq_len
    assert batch % gpus == 0 or gpus > wanted
    assert 0.5 * wanted <= batch <= 1.5 * wanted


@pytest.mark.parametrize(
    ("seq_len", "gpus", "batch"),
    [(4096, 64, 1024), (8192, 128, 512), (131072, 64, 32), (4096, 1, 1024)],
)
def test_usual_numbers(seq_len: int, gpus: int, batch: int) -> None:
    assert default_global_batch(seq_len=seq_len, gpus=gpus) == batch


def test_sequences_longer_than_the_default_step_still_make_one() -> None:
    assert default_global_batch(seq_len=2**24, gpus=8) == 1


@pytest.mark.parametrize(
    ("gpus", "batch"), [(24, 40 * 24), (48, 24 * 48), (72, 16 * 72), (96, 12 * 96), (14, 72 * 14)]
)
def test_the_share_of_a_rank_splits_into_micro_batches(gpus: int, batch: int) -> None:
    assert default_global_batch(seq_len=4096, gpus=gpus) == batch
