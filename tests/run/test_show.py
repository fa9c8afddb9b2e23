from __future__ import annotations

import io

import pytest

from fsdpplan.run.metrics import Measured, Start, Step
from fsdpplan.run.show import LiveDisplay, PlainDisplay, display_for, step_words


def measured(step: int) -> Measured:
    last = Step(
        step=step,
        loss=2.5,
        step_seconds=0.2,
        tokens_per_second=None,
        mfu_fraction=0.4,
        allocated_bytes=None,
        reserved_bytes=None,
    )
    return Measured(start=Start(first_step=0, steps=9), steps=(last,))


def test_a_pipe_gets_plain_lines() -> None:
    stream = io.StringIO()
    display = display_for(stream)
    assert isinstance(display, PlainDisplay)
    with display:
        display.state("submitted")
        display.output("step 1/9  loss 2.5")
        display.progress(measured(1))
    assert stream.getvalue() == "fsdpplan: submitted\nstep 1/9  loss 2.5\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_gets_one_moving_line_and_all_lines_that_are_no_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = display_for(Terminal())
    assert isinstance(display, LiveDisplay)
    with display:
        display.output("tiny: fsdp [/b] :smile:")
        display.progress(Measured())
        display.progress(measured(3))
        display.output("step 3/9  loss 2.5")
        display.output("1: step 4/9  loss 2.5")
        display.output("a warning")
    said = capsys.readouterr().err
    assert "tiny: fsdp [/b] :smile:" in said
    assert "a warning" in said
    assert "step 3/9" not in said
    assert "step 4/9" not in said


def test_a_step_in_words() -> None:
    assert step_words(measured(3)) == "step 3  loss 2.500  200 ms  MFU 40.0 %"
