"""Every message has a next step, and each kind of error its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.next_steps import Message, has_next_step, messages

ROOT = Path(__file__).resolve().parent.parent

RAISED = dict.fromkeys(
    (
        *("SpecError", "ProfileNotFound", "NoFeasibleLayout", "ProbeError", "LaunchError"),
        *("GateFailed", "Forgotten", "TrainerError", "RankError", "OutOfMemory"),
        *("TrainingDiverged", "PreflightFailed", "WrongTorch", "RehearsalFailed"),
        *("CheckpointFailed", "Unreadable", "ArgumentTypeError", "Problem"),
    ),
    0,
)

PASSED_ON = {
    "api.py:recommend": "a sentence of search/rules/legality.py",
    "api.py:estimate": "a sentence of search/rules/legality.py",
    "cli/views/unfit.py:nothing_fits": "a remedy; tests/search/advice/test_remedy.py",
    "cli/resolve/inputs.py:refuse_question": "a sentence of search/rules/legality.py",
    "cli/commands/estimate.py:one_layout": "a sentence of search/rules/legality.py",
    "cli/commands/replan.py:replan": "a sentence of cli/resolve/other_gpus.py",
    "cli/resolve/job.py:_require_computed": "a sentence of trainer/huggingface/same.py or load.py",
    "cli/resolve/job.py:require_its_recipe": "a sentence of trainer/options.py or its recipe",
    "cli/options/parse.py:release": "a sentence of spec/training.py",
    "cli/options/parse.py:nodes": "a sentence of spec/nodes.py",
    "cost/schedule/order.py:require_simulated": "a sentence of stages_refusal",
    "search/rules/rule.py:_stages": "a sentence of cost/schedule/order.py",
    "files/documents.py:_validate": "a sentence of the value's own __post_init__",
    "files/huggingface/config.py:parse_hf_config": "a sentence of spec/model.py",
    "files/profiles/numbers.py:checked": "a sentence of the value's own __post_init__",
    "run/engines/allocation.py:_machine": "what a node said; it becomes a finding about the node",
    "run/detect.py:_recorded": "a sentence of topology/read/recording.py",
    "topology/read/matrix.py:_wrong": "each of that file says what to paste",
    "topology/read/pasted.py:_parts": "a sentence of the readers beside it",
    "cli/resolve/job.py:ranked": "a sentence of search/rules/program.py",
    "run/engines/kubernetes.py:Kubernetes._required_job": "a sentence of kubernetes_text.py",
    "run/engines/kubernetes.py:Kubernetes._apply": "a sentence of run/engines/kubernetes_text.py",
    "run/engines/slurm.py:_submission": "a sentence of run/engines/slurm_text.py",
    "topology/measure/settings.py:_told.read": "a sentence of spec/values.py",
    "run/elastic.py:standing": "a sentence of the trainer's own",
    "validate/check/conditions.py:_Wrong.said": "each of that file says what to type",
    "trainer/checkpoint/runs.py:Checkpoints._on_first_rank": "the sentence of rank 0, on all ranks",
    "trainer/preflight/program.py:Preflight._act": "its step is bad_nodes_words of report.py",
    "trainer/rehearse/rehearsal.py:rehearse_ranks": "what a rank would raise in the job",
    "trainer/options.py:parameter_group": "a sentence of spec/trainer_options.py, as what follows",
    "trainer/options.py:step_window": "the same",
    "emit/trainer_program.py:Trainer.__post_init__": "the same",
    "emit/trainer_program.py:Trainer._window": "the same",
    "emit/trainer_program.py:_check": "the same",
    "trainer/text/chats.py:ChatReader.write": "a sentence of ChatReader._nothing",
    "trainer/text/chats.py:ChatReader._said": "what there is to give in place of a template",
    "trainer/train.py:train": "save_the_end of this file; empty where all is saved",
    "validate/learn/known.py:_table_priced": "a sentence of validate/compare/predict.py",
    "validate/learn/peaks.py:_table_priced": "a sentence of validate/compare/predict.py",
}
"""Place -> where the sentence that is passed on is made, and seen by this test or another."""

ENDED_ABOVE = {
    "emit/doors/words.py:require_sayable": "each problem in it ends in what to plan again with",
    "files/plans.py:": "inside plan_from_json, which ends them: plan again, or undo the edit",
    "files/table.py:read_data": "_require_file ends it",
    "files/writing.py:": "inside _explained, which ends them in its caller's advice",
    "run/export.py:export_checkpoint": "what the trainer's program says, with its advice",
    "topology/probe.py:run_command": "no error to the user, but a finding about this machine",
    "trainer/checkpoint/runs.py:require_manifest": "one of the remarks on checkpoints left aside",
    "trainer/checkpoint/files.py:read_manifest": "one of the remarks on checkpoints left aside",
    "trainer/checkpoint/storage.py:read_index": "one of the remarks on checkpoints left aside",
    "trainer/checkpoint/progress.py:read_progress": "one of the remarks on checkpoints left aside",
}
"""Place -> who adds the next step."""


def raised(path: Path) -> list[Message]:
    """Those of a file. Problems that are listed: of the doors only, since the trainer's are nouns
    in one sentence, whose end says to plan again."""
    found = messages(path, ROOT / "fsdpplan", RAISED)
    return [one for one in found if one.is_raised or one.place.startswith("emit/doors/")]


def all_messages() -> list[Message]:
    paths = sorted((ROOT / "fsdpplan").rglob("*.py"))
    return [message for path in paths for message in raised(path)]


def excused(message: Message) -> bool:
    ended = any(message.place.startswith(place) for place in ENDED_ABOVE)
    return ended or message.place in PASSED_ON


def test_every_message_says_what_to_do() -> None:
    found = all_messages()
    assert len(found) > 600, "the messages are not found any more"
    lacking = [m for m in found if not has_next_step(m.text) and not excused(m)]
    assert not lacking, "\n".join(f"{m.place}, line {m.line}: {m.text}" for m in lacking)


def test_no_excuse_is_idle() -> None:
    lacking = [message.place for message in all_messages() if not has_next_step(message.text)]
    for place in (*PASSED_ON, *ENDED_ABOVE):
        assert any(each.startswith(place) for each in lacking), place


@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        ("--gpus: 'x' is not a whole number; type one such as 64", True),
        ("torch 2.8 has no grouped matmuls: use --ep 1, or --torch 2.10", True),
        ("model.json is not JSON: at line 1, column 2; correct it there", True),
        ("hidden must be a whole number of at least 1, not 0", True),
        ("run 3 goes on elsewhere: fsdpplan logs --follow shows what it prints", True),
        ("this trainer cannot run ep 3. Plan again with these pinned", True),
        ("run 3 of this folder has ended, and left nothing", False),
        ("the layout has 8 ranks, the cluster 16 GPUs", False),
        ("2 stages do not fill 3 ranks: the plan is wrong", False),
        ("the plan cannot be read: use of closed file", True),  # the rule knows words, not sense
    ],
)
def test_what_counts_as_a_next_step(message: str, is_one: bool) -> None:
    assert has_next_step(message) is is_one
