"""A frozen value with some fields changed is what `dataclasses.replace` makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import Training
from fsdpplan.spec.values import replace

LAYOUT = Layout(dp_shard=8, micro_batch=2)
TRAINING = Training(seq_len=4096, global_batch=16)


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (LAYOUT, {}),
        (LAYOUT, {"tp": 2, "sequence_parallel": True}),
        (LAYOUT, {"stage_blocks": (3, 4), "pp": 2, "schedule": "1f1b"}),
        (TRAINING, {"global_batch": 32}),
    ],
)
def test_it_is_that_of_dataclasses(value: Any, changes: dict[str, Any]) -> None:
    hash(value)  # which it remembers
    changed, same = replace(value, **changes), dataclasses.replace(value, **changes)
    assert (changed, hash(changed), repr(changed)) == (same, hash(same), repr(same))
    assert (changed == value) is (not changes)


def test_it_checks_what_is_made() -> None:
    with pytest.raises(SpecError, match="tp must be a whole number"):
        replace(LAYOUT, tp=0)
    with pytest.raises(SpecError, match="does not go with pp 1"):
        replace(LAYOUT, schedule="1f1b")


def test_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeError, match="shards"):
        replace(LAYOUT, shards=2)
