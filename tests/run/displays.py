"""A display that remembers."""

from __future__ import annotations

from fsdpplan.run.follow.metrics import Measured
from fsdpplan.run.follow.show import Display


class Remembers(Display):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.lines: list[str] = []
        self.steps: list[int] = []
        self.questions: list[str] = []
        self.answer = True

    def __exit__(self, *_: object) -> None:
        pass

    def state(self, text: str) -> None:
        self.states.append(text)

    def output(self, line: str) -> None:
        self.lines.append(line)

    def confirms(self, question: str) -> bool:
        self.questions.append(question)
        return self.answer

    def progress(self, measured: Measured) -> None:
        self.steps = [step.step for step in measured.steps]
