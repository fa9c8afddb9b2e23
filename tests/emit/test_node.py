from __future__ import annotations

import pytest

from fsdpplan.emit.job import Job, Trainer, UserProgram
from fsdpplan.emit.node import program_words


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(), "-m fsdpplan.trainer"),
        (Job(program=Trainer(steps=9, data="a b")), "-m fsdpplan.trainer --steps=9 '--data=a b'"),
        (Job(program=UserProgram(script="t.py", args=("-x", "y z"))), "t.py -x 'y z'"),
        (Job(folder="/j"), '"$FSDPPLAN_JOB_FOLDER/trainer/__main__.py"'),
    ],
)
def test_torchrun_is_told_what_to_start(job: Job, words: str) -> None:
    assert program_words(job) == words
