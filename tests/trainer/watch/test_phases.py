"""Parts of a step, by the functions under way."""

from __future__ import annotations

import threading

import pytest

from fsdpplan.trainer.watch.phases import Called, calls_of_error, calls_of_thread, phase_of

TRAIN = [
    Called("job/trainer/train.py", "one_step", 1),
    Called("job/trainer/step.py", "train_step", 2),
]
FORWARD = [*TRAIN, Called("job/trainer/step.py", "forward_backward", 3)]


@pytest.mark.parametrize(
    ("calls", "phase"),
    [
        (
            [Called("t/train.py", "set_up", 1), Called("t/assemble.py", "assemble", 2)],
            "initialization",
        ),
        ([*TRAIN[:1], Called("t/data.py", "micro_batches", 2)], "data"),
        ([*FORWARD, Called("t/model.py", "forward", 4)], "forward"),
        ([*FORWARD, Called("t/loss.py", "next_token_loss", 4)], "loss"),
        ([*FORWARD, Called("torch/autograd/__init__.py", "backward", 4)], "backward"),
        (
            [
                *FORWARD,
                Called("torch/autograd/__init__.py", "backward", 4),
                Called("torch/utils/checkpoint.py", "unpack_hook", 5),
                Called("t/model.py", "forward", 6),
            ],
            "backward",
        ),
        ([*TRAIN, Called("torch/optim/adamw.py", "step", 3)], "optimizer"),
        ([*TRAIN, Called("t/clip.py", "clip_gradients", 3)], "optimizer"),
        ([*TRAIN[:1], Called("t/train.py", "settle", 2)], "end of step"),
        ([Called("t/train.py", "save", 1), Called("t/checkpoint.py", "save", 2)], "checkpoint"),
        ([], "between steps"),
    ],
)
def test_the_innermost_function_that_is_known_decides(calls: list[Called], phase: str) -> None:
    assert phase_of(calls) == phase


def test_functions_are_read_off_errors_and_threads() -> None:
    def inner() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        inner()
    assert calls_of_error(caught.value)[-1].function == "inner"
    here = calls_of_thread(threading.get_ident())
    assert here[-2].function == "test_functions_are_read_off_errors_and_threads"
    assert calls_of_thread(-1) == []
