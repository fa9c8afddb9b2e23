"""What to measure goes to the ranks as words, and arrives as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.topology.measure.settings import (
    Attention,
    Axis,
    MeasuredDevice,
    MeasuredDtype,
    Settings,
    parse,
    words,
)

COUNTS = st.integers(1, 2**20)
ATTENTION = st.builds(
    lambda kv_heads, times, rest: Attention(
        batch=rest[0], heads=kv_heads * times, kv_heads=kv_heads, seq_len=rest[1], head_dim=rest[2]
    ),
    st.integers(1, 64),
    st.integers(1, 16),
    st.tuples(COUNTS, COUNTS, COUNTS),
)
AXES = st.builds(
    Axis,
    name=st.sampled_from(["pp", "dp_replicate", "dp_shard", "cp", "tp"]),
    ranks=COUNTS,
    stride=COUNTS,
)
SETTINGS = st.builds(
    Settings,
    device=st.sampled_from(get_args(MeasuredDevice)),
    seconds=st.integers(1, 10_000).map(float),
    dtypes=st.lists(st.sampled_from(get_args(MeasuredDtype)), unique=True).map(tuple),
    shapes=st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=5).map(tuple),
    attention=st.lists(ATTENTION, max_size=3).map(tuple),
    axes=st.lists(AXES, max_size=5).map(tuple),
    smallest_bytes=st.integers(1, 2**12),
    largest_bytes=st.integers(2**12, 2**34),
)
LOG = Path("a folder/log.jsonl")


@given(SETTINGS)
def test_settings_survive_the_way_to_the_ranks(settings: Settings) -> None:
    assert parse((*words(settings), "--out", str(LOG))) == (settings, LOG)


@given(SETTINGS)
def test_sizes_rise_from_the_smallest_to_the_largest(settings: Settings) -> None:
    sizes = settings.sizes
    assert (sizes[0], sizes[-1]) == (settings.smallest_bytes, settings.largest_bytes)
    assert list(sizes) == sorted(set(sizes))


def test_collectives_are_measured_from_a_kibibyte_to_a_gibibyte() -> None:
    sizes = Settings(device="cuda").sizes
    assert (sizes[0], sizes[-1], len(sizes)) == (2**10, 2**30, 11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "tpu"),
        (["--device", "cpu", "--seconds", "0"], "seconds must be a finite number above 0"),
        (["--device", "cpu", "--seconds", "soon"], "--seconds"),
        (["--device", "cpu", "--dtypes", "int4"], "dtypes must be one of"),
        (["--device", "cpu", "--shapes", "1,2"], "must be 3 whole numbers"),
        (["--device", "cpu", "--shapes", "1,2,0"], "k must be a whole number of at least 1"),
        (["--device", "cpu", "--attention", "1,3,2,8,8"], "multiple of kv_heads"),
        (["--device", "cpu", "--axis", "tp:2"], "must be 2 whole numbers"),
        (["--device", "cpu", "--axis", "a b:2:1"], "is no name"),
        (["--device", "cpu", "--largest-bytes", "1"], "above largest_bytes"),
        ([], "--device"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse([*arguments, "--out", str(LOG)])


def test_the_program_can_be_imported_where_there_is_no_torch() -> None:
    told = "import sys; sys.modules['torch'] = None; import fsdpplan.topology.measure.program"
    subprocess.run([sys.executable, "-c", told], check=True)
