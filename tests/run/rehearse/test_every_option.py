"""Every optimizer, precision and option of the trainer beside what `rehearse` says of it.

docs/reference/rehearsed.md is this table. Written anew by:

    python -m tests.run.rehearse.test_every_option
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from fsdpplan.cli.commands.rehearse import rehearsal_json, rehearsal_screen
from fsdpplan.files.plans import write_plan
from fsdpplan.run.rehearse import rehearse as program
from fsdpplan.run.rehearse.ranks import chosen_ranks
from fsdpplan.run.rehearse.rehearse import Rehearsal
from fsdpplan.spec.layout import Layout, Schedule
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import Optimizer, ParamDtype, Precision, ReduceDtype, Training
from fsdpplan.trainer.config import load_plan
from fsdpplan.trainer.options import Options, parse_options
from fsdpplan.trainer.parallel.support import require_runnable
from fsdpplan.trainer.rehearse import rehearsal
from fsdpplan.trainer.rehearse.rehearsal import OUTSIDE_OF_STEPS
from tests.run.rehearse.rehearsable import CHOICES, TRAINER_OPTIONS, Choice

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "rehearsed.md"
ALL = {choice.name: choice for choice in (*CHOICES, *TRAINER_OPTIONS)}

HEAD = """# What rehearses

<!-- about: Every optimizer, precision and option beside what `rehearse` says of it. -->

Each row is a tiny plan for GPUs that a test rehearses (`tests/run/rehearse/test_every_option.py`).
"As predicted": every rank goes through a step, calls each collective as often and with as many
bytes as predicted, and no two would wait for each other. The last column is what `rehearse` names
of such a plan as done in another way or not seen (`differences` and `not_seen` in its JSON). For
all plans for GPUs that is also: {outside}.

| choice | verdict | in another way, or not seen |
|---|---|---|
"""

NOTHING_OF_A_STEP = {
    "seed": "numbers",
    **dict.fromkeys(("steps", "epochs"), "of them one step is rehearsed"),
    **dict.fromkeys(
        (
            "learning_rate",
            "lr_schedule",
            "min_lr",
            "warmup_steps",
            "decay_steps",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "muon_weight_decay",
            "muon_momentum",
        ),
        "numbers of the update",
    ),
    **dict.fromkeys(("data", "tokenizer", "sft", "chat_template"), "what the tokens are"),
    **dict.fromkeys(("data_workers", "prefetch", "gc_every", "log_every"), "the host's work"),
    **dict.fromkeys(("metrics", "prometheus", "tensorboard", "wandb", "mlflow"), "what is told"),
    **dict.fromkeys(
        ("checkpoint_every", "checkpoint_keep", "checkpoint_async", "resume", "allow_changes"),
        "of checkpoint_dir",
    ),
    **dict.fromkeys(("profile_stacks", "profile_ranks"), "of profile"),
    **dict.fromkeys(("eval_every", "eval_tokens"), "of eval_data"),
    **dict.fromkeys(("hang_seconds", "preflight", "numbers", "preflight_seconds"), "the watch"),
    **dict.fromkeys(("plan", "given", "run_folder", "rehearse", "report", "build"), "no option"),
}
"""Fields of the trainer's options that change no tensor and no collective of a step."""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "cores", lambda: 1)


def found_of(choice: Choice) -> Rehearsal:
    """What `fsdpplan rehearse` finds of a choice, the program in this process and with the choice's
    words of the command line."""

    def report(plan: Plan, ranks: Any, build: Any, python: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            write_plan(plan, path)
            numbers = ",".join(map(str, ranks))
            words = ["--plan", str(path), "--rehearse", numbers, *choice.options]
            options = parse_options(words)
            read = load_plan(options.plan)
            require_runnable(read)
            return json.loads(json.dumps(rehearsal.report_of_plan(read, options)))

    original, program._report = program._report, report
    try:
        plan = choice.plan
        return program.rehearse(plan, chosen_ranks(plan.model, plan.layout, "0,last"))
    finally:
        program._report = original


def row_of(choice: Choice, found: Rehearsal) -> str:
    """A line of the page."""
    verdict = "as predicted" if found.agrees else "; ".join(found.said)
    if "--on-spike" in choice.options and not (found.errors or found.mismatches):
        verdict = "goes through a step; its all-reduce is the run's own, and in no prediction"
    more = [words for words in found.not_seen if words != rehearsal.OUTSIDE]
    return f"| `{choice.name}` | {verdict} | {'; '.join((*found.differences[1:], *more)) or '-'} |"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALL)
def test_it_rehearses_as_predicted_and_says_what_is_not_seen(name: str) -> None:
    choice = ALL[name]
    found = found_of(choice)
    assert found.errors == ()
    assert found.mismatches == ()
    assert row_of(choice, found) in PAGE.read_text(encoding="utf-8").splitlines()
    for words in found.not_seen:
        assert words in json.loads(rehearsal_json(found))["not_seen"]
        assert words[:20] in rehearsal_screen(found, width=200)


def test_every_choice_of_a_plan_is_in_the_table() -> None:
    closed = {
        "precision": get_args(Precision),
        "optimizer": get_args(Optimizer),
        "param_dtype": get_args(ParamDtype),
        "reduce_dtype": get_args(ReduceDtype),
        "schedule": set(get_args(Schedule)) - {"none"},
    }
    assert {f"{key} {value}" for key, values in closed.items() for value in values} <= set(ALL)
    said = {key for choice in CHOICES for key in (*choice.training, *choice.layout)}
    # the first are numbers or what is asked, not what is done; the last three other programs' own
    sizes = {"seq_len", "global_batch", "tokens", "torch", "headroom_fraction", "fits_fraction"}
    sizes |= {"micro_batch", "stage_blocks", "mean_document_tokens"}
    others = {"runtime", "program", "experts_over_tp"}
    names = {one.name for one in (*fields(Training), *fields(Layout))}
    assert names - said == sizes | others


def test_every_option_of_the_trainer_is_in_the_table_or_outside_of_a_step() -> None:
    rehearsed = {
        word.removeprefix("--").removeprefix("no-").replace("-", "_")
        for choice in TRAINER_OPTIONS
        for word in choice.options
        if word.startswith("--")
    }
    known = rehearsed | set(NOTHING_OF_A_STEP) | set(OUTSIDE_OF_STEPS)
    assert {one.name for one in fields(Options)} == known


def test_what_happens_between_steps_is_named_where_it_is_asked_for(tmp_path: Path) -> None:
    kept = Choice(name="kept", options=("--checkpoint-dir", str(tmp_path)))
    assert OUTSIDE_OF_STEPS["checkpoint_dir"] in found_of(kept).not_seen
    assert OUTSIDE_OF_STEPS["checkpoint_dir"] not in found_of(Choice(name="none")).not_seen


def test_only_a_ring_is_called_one() -> None:
    ring, ulysses = (found_of(ALL[f"cp_attention {each}"]) for each in ("ring", "ulysses"))
    assert rehearsal.RING in ring.differences
    assert rehearsal.RING not in ulysses.differences


def page() -> str:
    """The whole of docs/reference/rehearsed.md."""
    rehearsal.cores = lambda: 1
    rows = []
    for choice in ALL.values():
        rows.append(row_of(choice, found_of(choice)))
        print(rows[-1], flush=True)
    return HEAD.format(outside=rehearsal.OUTSIDE) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
