"""sbatch reads from a script what was asked for, whatever the names are, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.order import Order
from fsdpplan.emit.targets import render
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from tests.emit.plans import make_plan
from tests.emit.test_quoting import read_as_sbatch_does
from tests.safety.hostile import LINES, PIECES, WORDS

PLAN = make_plan("cuda")
PLAN_JSON = plan_json(PLAN)
FIELDS = ("job_name", "partition", "account", "qos", "comment")
NAMES = st.fixed_dictionaries({name: LINES for name in FIELDS})


def job_of(names: dict[str, str], **more: str) -> Job:
    options = {name: text for name, text in names.items() if name != "comment"}
    return Job(**options, **more, sbatch=(f"--comment={names['comment']}",))  # type: ignore[arg-type]


def read(script: str) -> dict[str, str]:
    """Options as sbatch finds them: in #SBATCH lines before the first command."""
    options = {}
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            assert name not in options
            options[name] = read_as_sbatch_does(value)
        elif line and not line.startswith("#"):
            break
    return options


def emitted(job: Job) -> str:
    return render("slurm", Order(plan=PLAN, plan_json=PLAN_JSON, job=job, version="1.2.3"))


PLAIN = read(emitted(job_of(dict.fromkeys(FIELDS, "x"))))


@given(names=NAMES)
def test_names_are_read_as_they_were_given(names: dict[str, str]) -> None:
    options = read(emitted(job_of(names)))
    assert {name: options[name.replace("_", "-")] for name in FIELDS} == names
    assert set(options) == set(PLAIN)


@given(name=WORDS.filter(lambda text: not text.isprintable()))
def test_a_name_that_is_no_line_is_read_so_or_refused(name: str) -> None:
    try:
        script = emitted(job_of(dict.fromkeys(FIELDS, name)))
    except SpecError:
        return
    assert read(script)["job-name"] == name
    assert set(read(script)) == set(PLAIN)


@pytest.mark.parametrize("text", [piece for piece in PIECES if piece.isprintable()])
def test_a_printable_name_is_not_refused(text: str) -> None:
    name = f"a{text}b"
    assert read(emitted(job_of(dict.fromkeys(FIELDS, name))))["job-name"] == name


@given(words=st.lists(WORDS, min_size=1, max_size=10), value=WORDS)
def test_nothing_else_of_a_job_becomes_an_option(words: list[str], value: str) -> None:
    program = UserProgram(script=words[0] or "x", args=tuple(words))
    job = Job(
        program=program,
        env=(("A", value),),
        env_setup=tuple(words),
        python=value or "python3",
        metrics=value,
        sbatch=("--comment=x",),
        partition="x",
        account="x",
        qos="x",
        job_name="x",
    )
    # a program of the user's own may save, so its job may come back
    requeued = {"requeue" if name == "no-requeue" else name: PLAIN[name] for name in PLAIN}
    assert read(emitted(job)) == requeued
