"""The post-mortem of a run that ran out of memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from fsdpplan.trainer.watch.oom import (
    DeviceMemory,
    from_statistics,
    is_out_of_memory,
    living_state_bytes,
    postmortem,
    postmortem_words,
    predicted_memory,
    requested_bytes,
    wrong_terms,
)

GIB = 2**30
PREDICTED = {
    "parameters_bytes": 4 * GIB,
    "gradients_bytes": 4 * GIB,
    "optimizer_bytes": 8 * GIB,
    "unsharded_parameters_bytes": GIB,
    "unsharded_gradients_bytes": GIB,
    "activations_bytes": 30 * GIB,
    "logits_bytes": 2 * GIB,
    "temporaries_bytes": 0,
    "reserved_overhead_bytes": 2 * GIB,
    "context_bytes": 2 * GIB,
    "peak_allocated_bytes": 50 * GIB,
    "peak_phase": "backward",
}
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 512.00 MiB is free."
)


def memory(**changed: int) -> DeviceMemory:
    """A device as `torch.cuda.memory_stats` and `memory_snapshot` describe one that is full."""
    values = {"allocated": 70 * GIB, "reserved": 74 * GIB, "free": GIB, "total": 80 * GIB}
    values |= changed
    statistics = {
        "allocated_bytes.all.current": values["allocated"],
        "allocated_bytes.all.peak": 72 * GIB,
        "reserved_bytes.all.current": values["reserved"],
        "inactive_split_bytes.all.current": 3 * GIB,
        "num_alloc_retries": 2,
        "num_ooms": 1,
    }
    segments = [
        {"total_size": 4 * GIB, "blocks": [{"size": 3 * GIB, "state": "active_allocated"}]},
        {"total_size": GIB, "blocks": [{"size": GIB, "state": "inactive"}]},
        {"total_size": GIB, "blocks": [{"size": 2**20, "state": "inactive"}]},
    ]
    return from_statistics(
        statistics,
        segments,
        requested=round(2.5 * GIB),
        free=values["free"],
        total=values["total"],
        state=16 * GIB,
    )


def raised(message: str) -> torch.OutOfMemoryError:
    try:
        raise torch.OutOfMemoryError(message)
    except torch.OutOfMemoryError as error:
        return error


def test_what_was_needed_is_what_lives_and_what_was_asked_for() -> None:
    assert memory().needed_bytes == round(72.5 * GIB)
    assert memory().fragmentation_bytes == 4 * GIB
    assert memory().largest_free_block_bytes == GIB
    assert memory().outside_bytes == 5 * GIB


@pytest.mark.parametrize(
    ("changed", "term"),
    [
        ({}, "working_bytes"),
        ({"allocated": 40 * GIB, "reserved": 70 * GIB}, "reserved_overhead_bytes"),
        ({"allocated": 45 * GIB, "reserved": 47 * GIB}, "context_bytes"),
    ],
)
def test_the_term_that_is_most_too_low_is_named(changed: dict[str, int], term: str) -> None:
    assert next(iter(wrong_terms(memory(**changed), PREDICTED))) == term


def test_a_plan_without_prediction_has_no_wrong_term() -> None:
    assert wrong_terms(memory(), {}) == {}
    assert predicted_memory('{"estimate": {"step_seconds": {"expected": 1.0}}}') == {}
    assert predicted_memory(json.dumps({"estimate": {"memory": PREDICTED}})) == PREDICTED


def test_the_words_say_all_of_it() -> None:
    event = {"step": 4, **postmortem(raised(MESSAGE), memory(), PREDICTED)}
    words = postmortem_words(json.loads(json.dumps(event)))
    for part in (
        "in step 5",
        "needed at least 72.50 GiB (predicted: 50.00 GiB)",
        "torch held 74.00 GiB, of it 4.00 GiB in no tensor",
        "largest free piece 1.00 GiB for a request of 2.50 GiB",
        "5.00 GiB lay outside of PyTorch",
        "wrong most in activations, logits and gathered parameters: 22.50 GiB too low",
    ):
        assert part in words


def test_what_is_not_known_is_not_said() -> None:
    nothing: dict[str, Any] = dict.fromkeys(DeviceMemory.__dataclass_fields__)
    event = {"step": None, **postmortem(raised("full"), DeviceMemory(**nothing), PREDICTED)}
    assert postmortem_words(event) == "out of memory in between steps, before the first step"


def test_requests_are_read_with_their_unit() -> None:
    assert requested_bytes(MESSAGE) == round(2.5 * GIB)
    assert requested_bytes("you tried to allocate 4096 bytes. Error code 12") == 4096
    assert requested_bytes("CUDA error: out of memory") is None


def test_the_hosts_memory_may_run_out_too() -> None:
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_state_is_parameters_gradients_and_the_optimizers() -> None:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert living_state_bytes(model, optimizer) == 400
    model(torch.ones(1, 10)).sum().backward()
    assert living_state_bytes(model, optimizer) == 800
    optimizer.step()
    assert living_state_bytes(model, optimizer) == 1600 + 4  # and AdamW's count of steps
