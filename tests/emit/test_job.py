from __future__ import annotations

from typing import Any

import pytest

from fsdpplan.emit.job import (
    Job,
    UserProgram,
    later_starts,
    requeues,
    sbatch_option,
    time_limit_seconds,
    trained_words,
    trial_words,
)
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("08:00:00", 28800),
        ("2-12", 216000),
        ("1-2:30", 95400),
        ("1-00:00:30", 86430),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert time_limit_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "8h", "1:2:3:4", "-5", "1-", "08:00:00 ", "١٢h"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="minutes"):
        time_limit_seconds(text)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"time": "tomorrow"}, "08:00:00"),
        ({"port": 80}, "1024"),
        ({"cpus_per_task": 0}, "at least 1"),
        ({"output": "$HOME/x.out"}, "expand nothing"),
        ({"output": "~/x.out"}, "expand nothing"),
        ({"env": (("A B", "c"),)}, "no name of an environment variable"),
        ({"sbatch": ("--nodes=4",)}, "the plan fixes"),
        ({"sbatch": ("--gpus-per-nod=4",)}, "the plan fixes"),
        ({"sbatch": ("-N4",)}, "--name=value"),
        ({"sbatch": ("--export=NONE",)}, "exported environment"),
        ({"sbatch": ("--exclude=n1",)}, "use --exclude"),
        ({"exclude": ("n1 n2",)}, "list of nodes"),
        ({"signal_seconds": 60}, "--time"),
        ({"signal_seconds": 600, "time": "5"}, "not below the time limit"),
        ({"python": ""}, "python3"),
        ({"nccl_debug": "LOUD"}, "VERSION"),
    ],
)
def test_an_impossible_job_is_refused_in_words(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Job(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"steps": 0}, "at least 1"),
        ({"checkpoint_every": 5}, "--checkpoint-dir"),
        ({"checkpoint_keep": 5}, "--checkpoint-dir"),
        ({"learning_rate": float("nan")}, "finite"),
        ({"tokenizer": "tokenizer.json"}, "give --data"),
        ({"profile": "8:2", "steps": 7}, "after the last step, 7"),
        ({"profile": "6:3", "steps": 7}, "ends after the last step, 7"),
        ({"memory_snapshot": "20:2", "steps": 20}, "ends after the last step, 20"),
        ({"clip_norm": -1.0}, "above 0"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_impossible_trainer_options_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Trainer(**values)


def test_a_program_needs_a_path() -> None:
    with pytest.raises(SpecError, match=r"train\.py"):
        UserProgram(script="")


def test_extra_sbatch_options_keep_their_values() -> None:
    assert sbatch_option("--constraint=h100&ib") == ("constraint", "h100&ib")
    assert sbatch_option("--exclusive") == ("exclusive", None)


def test_a_job_says_how_far_it_trains_and_what_is_kept() -> None:
    plain = "20 steps on made-up tokens, without checkpoints, so it starts once"
    assert trained_words(Job()) == f"Trains: {plain}"
    kept = Trainer(steps=7, data="d.bin", checkpoint_dir="ck")
    assert trained_words(Job(program=kept)) == "Trains: 7 steps on d.bin, with checkpoints in ck"
    assert trained_words(Job(program=UserProgram(script="t.py"))) == "Runs: t.py"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (Trainer(), "trains 20 steps on made-up tokens, without checkpoints, so it starts once"),
        (Trainer(steps=7, data="d.bin"), "trains 7 steps on d.bin, without checkpoints, so it"),
        (Trainer(data="d.bin", checkpoint_dir="ck"), "trains 20 steps on d.bin, with checkpoints"),
        (Trainer(steps=7, data="d.bin", checkpoint_dir="ck"), None),
        (UserProgram(script="t.py"), None),
    ],
)
def test_a_trial_is_called_one(program: Trainer | UserProgram, says: str | None) -> None:
    words = trial_words(Job(program=program))
    assert words is None if says is None else says in (words or "")


OWN = UserProgram(script="t.py")
SAVING = Trainer(checkpoint_dir="ck")


@pytest.mark.parametrize(
    ("program", "survival", "starts", "goes_back"),
    [
        (Trainer(), Survival(), 0, False),
        (SAVING, Survival(), 3, True),
        (OWN, Survival(), 3, True),
        # Spares are asked for to be used, and what is asked for outright is done.
        (Trainer(), Survival(spares=1), 3, False),
        (Trainer(), Survival(retries=2, requeue=True), 2, True),
        (SAVING, Survival(retries=0, requeue=False), 0, False),
    ],
)
def test_a_job_starts_again_by_itself_only_where_it_may_go_on_from_something(
    program: Trainer | UserProgram, survival: Survival, starts: int, goes_back: bool
) -> None:
    job = Job(program=program, survival=survival)
    assert (later_starts(job), requeues(job)) == (starts, goes_back)
