"""Remembered: a hash that is computed once is that of the fields, and no other value's."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.layout import Layout


@given(st.integers(1, 64), st.integers(1, 64))
def test_equal_values_hash_alike_before_and_after_they_were_asked(one: int, other: int) -> None:
    layout, same = Layout(dp_shard=one), Layout(dp_shard=one)
    assert hash(layout) == hash(layout) == hash(same) == hash(copy.deepcopy(layout))
    assert hash(replace(layout, dp_shard=other)) == hash(Layout(dp_shard=other))
    assert (layout == Layout(dp_shard=other)) == (one == other)


def test_what_is_remembered_is_no_field() -> None:
    layout = Layout()
    before = asdict(layout), repr(layout)
    hash(layout)
    assert (asdict(layout), repr(layout)) == before
