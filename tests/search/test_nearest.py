"""What is named where nothing fits; `make nearest` has a hundred questions."""

from __future__ import annotations

import pytest

from tests.search.brute import FOUR, tight
from tests.search.nearest import questions, too_far_bytes
from tests.search.questions import Question, question

DRAWN = list(questions(60))
SMALL = [asked for asked in DRAWN if asked.model.layers == 3 and asked.training.global_batch == 2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", SMALL, ids=range(len(SMALL)))
def test_no_layout_is_nearer_than_the_one_that_is_named(asked: Question) -> None:
    more, legal = too_far_bytes(asked)
    assert more is not None
    assert legal == 0 or more <= 0


def test_what_fits_with_rare_settings_alone_is_found() -> None:
    asked = tight(question(FOUR, 2, seq_len=1024, global_batch=4), 2.0)
    found = asked.answer()
    assert found.ranked
    assert found.nearest_miss is None
    assert found.feasible >= 1
    for ranked in found.ranked:
        assert ranked.estimate.memory.peak_device_bytes <= asked.asked.available_bytes


def test_of_models_with_many_words_the_nearest_has_its_loss_in_pieces() -> None:
    asked = question("qwen3-14b", 1, "pcie-8xrtx4090", global_batch=8, micro_batch=8)
    miss = asked.answer().nearest_miss
    assert miss is not None
    assert miss.layout.loss_chunks > 1


@pytest.mark.parametrize("mode", ["full", "op", None])
def test_with_some_blocks_recomputed_something_comes_nearest(mode: str | None) -> None:
    found = question(
        "llama-3.1-8b", 1, "oci-bm-gpu-a10-4", activation_checkpointing=mode, checkpoint_blocks=16
    ).answer()
    assert not found.ranked
    assert found.nearest_miss is not None
    nearest = found.nearest_miss.layout
    assert nearest.checkpoint_blocks == 16
    assert nearest.activation_checkpointing in ((mode,) if mode else ("attention", "op", "full"))
