from __future__ import annotations

import io
from dataclasses import replace

import pytest

from fsdpplan.run.follow.metric_events import Start, Step
from fsdpplan.run.follow.metrics import Measured
from fsdpplan.run.follow.show import LiveDisplay, PlainDisplay, display_for, step_words


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
    assert "loss 2.5\n" not in said
    assert "step 4/9" not in said
    assert "step 3/9  loss 2.500  200 ms" in said


def test_a_step_in_words() -> None:
    words = "step 3/9  loss 2.500  200 ms  MFU 40.0 % (plan 43.0 %)  1.20 s left"
    assert step_words(measured(3), planned_mfu_fraction=0.43) == words


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (80, "step 3/9  loss 2.500  200 ms  MFU 40.0 % (plan 43.0 %)  1.20 s left"),
        (60, "step 3/9  loss 2.500  MFU 40.0 % (plan 43.0 %)  1.20 s left"),
        (50, "step 3/9  MFU 40.0 % (plan 43.0 %)  1.20 s left"),
        (30, "step 3/9  1.20 s left"),
    ],
)
def test_a_narrow_screen_keeps_the_time_that_is_left(width: int, words: str) -> None:
    assert step_words(measured(3), planned_mfu_fraction=0.43, width=width) == words


def test_the_last_step_leaves_no_time_to_wait_for() -> None:
    assert step_words(measured(9)).endswith("MFU 40.0 %")


def test_a_step_of_a_program_that_says_little() -> None:
    last = replace(measured(3).steps[0], loss=None, step_seconds=None, mfu_fraction=None)
    assert step_words(Measured(steps=(last,))) == "step 3"


def test_nobody_in_a_pipe_is_asked() -> None:
    assert PlainDisplay(io.StringIO()).confirms("leave it running?")


@pytest.mark.parametrize(
    ("answer", "is_yes"), [("", True), ("y", True), ("Yes", True), ("n", False), ("NO", False)]
)
def test_a_person_is_asked_and_silence_is_a_yes(
    answer: str, is_yes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda: answer)
    with LiveDisplay() as display:
        assert display.confirms("leave it running?") == is_yes


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_second_ctrl_c_at_the_question_is_a_yes(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> str:
        raise end

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", interrupted)
    with LiveDisplay() as display:
        display.progress(measured(3))
        assert display.confirms("leave it running?")
