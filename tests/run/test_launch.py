from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.slurm.script import render_launch
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json, write_plan
from fsdpplan.run.launch import (
    checkpoints_word,
    emit_script,
    launch_text,
    read_launch,
    resolve_launch,
)
from fsdpplan.spec.plan import RankedLayout
from tests.emit.plans import make_plan

PLAN = make_plan("cpu", nodes=2)
OTHER = make_plan("cpu", nodes=2, micro_batch=2)


def test_without_a_script_one_is_emitted_from_the_plan(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "fsdpplan.json")
    job = Job(program=Trainer(steps=7))
    launch = resolve_launch(tmp_path, job=job)
    assert launch.script == emit_script(PLAN, job)
    assert launch.plan == PLAN
    assert "emitted from" in launch.origin


PACKED = replace(PLAN, training=replace(PLAN.training, packed=True, mean_document_tokens=20))


def test_a_plan_of_packed_documents_tells_the_trainer(tmp_path: Path) -> None:
    for target in ("slurm", "kubernetes", "ray"):
        plain, packed = (
            launch_text(target, plan=plan, job=Job(), pods=Pods(image="i"))  # type: ignore[arg-type]
            if target == "kubernetes"
            else launch_text(target, plan=plan, job=Job())  # type: ignore[arg-type]
            for plan in (PLAN, PACKED)
        )
        assert "--pack" not in plain
        assert "--pack" in packed
    with pytest.raises(SpecError, match=r"leave --no-pack out, or .* recommend --no-pack"):
        emit_script(PACKED, Job(program=Trainer(pack=False)))
    script = emit_script(PACKED, Job(program=UserProgram(script="mine.py")))
    assert "--pack" not in script
    (tmp_path / "job.sbatch").write_text(emit_script(PACKED, Job()))
    assert read_launch(tmp_path / "job.sbatch").plan.training == PACKED.training


def test_documents_that_a_layout_cannot_keep_apart_are_refused_before_the_queue() -> None:
    ring = make_plan("cuda", nodes=2, per_node=4, cp=2, dp_shard=4, dp_replicate=1)
    emit_script(ring, Job())
    with pytest.raises(SpecError, match="ring attention knows no documents"):
        emit_script(ring, Job(program=Trainer(pack=True)))
    assert "--pack" in emit_script(make_plan("cuda"), Job(program=Trainer(pack=True)))


@pytest.mark.parametrize(
    ("above", "says"),
    [
        ("# a note\n", "has '# a note' above its #!/bin/bash"),
        ("\n", "has an empty line above its #!/bin/bash"),
        ("\nexport A=1\n", "has 'export A=1' above its #!/bin/bash"),
    ],
)
def test_a_line_above_the_first_of_a_job_script_is_named(
    above: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(above + emit_script(PLAN, Job()), encoding="utf-8")
    with pytest.raises(SpecError, match=f"{says}.*first line of a job script: remove"):
        read_launch(path)


def test_a_job_script_keeps_what_sbatch_reads(tmp_path: Path) -> None:
    path, script = tmp_path / "job.sbatch", emit_script(PLAN, Job())
    path.write_text(script.replace("#!/bin/bash\n", "", 1))
    with pytest.raises(SpecError, match="does not begin with #!/bin/bash: put that"):
        read_launch(path)
    path.write_text(script.replace("#!/bin/bash\n", "#!/bin/bash\nmodule load x\n", 1))
    with pytest.raises(SpecError, match=r"line 2 \('module load x'\) above its #SBATCH"):
        read_launch(path)
    path.write_text(script.replace("#!/bin/bash\n", "#!/bin/bash\n# note\n\n", 1))
    assert read_launch(path).kind == "script"
    for target in ("kubernetes", "jobset"):
        path.write_text(launch_text(target, plan=PLAN, job=Job(), pods=Pods(image="i")))
        assert read_launch(path).kind == "manifest"


def test_what_a_script_runs_is_known_of_it(tmp_path: Path) -> None:
    own = Job(program=UserProgram(script="mine.py"))
    for job, program in ((Job(), None), (own, "mine.py")):
        launch = resolve_launch(tmp_path, job=job, plan_file=saved(tmp_path))
        assert launch.own_program == program
        assert launch.predicts
        assert replace(launch, shrunk=True).predicts == (program is None)


def saved(folder: Path) -> Path:
    write_plan(PLAN, folder / "plan.json")
    return folder / "plan.json"


def test_a_script_that_stands_here_is_run_as_it_is(tmp_path: Path) -> None:
    script = emit_script(PLAN, Job(program=Trainer(steps=7)))
    (tmp_path / "job.sbatch").write_text(script)
    assert resolve_launch(tmp_path).script == script
    write_plan(PLAN, tmp_path / "fsdpplan.json")
    assert resolve_launch(tmp_path).script == script
    assert resolve_launch(tmp_path).plan == PLAN


def test_a_plan_with_its_ranked_list_is_still_the_plan_of_the_script(tmp_path: Path) -> None:
    line = RankedLayout(rank=1, layout=PLAN.layout, estimate=PLAN.estimate, reason="fastest")
    (tmp_path / "job.sbatch").write_text(emit_script(PLAN, Job()))
    write_plan(replace(PLAN, alternatives=(line,)), tmp_path / "fsdpplan.json")
    assert resolve_launch(tmp_path).plan == PLAN


def test_the_plan_takes_few_lines_and_scripts_with_many_are_read(tmp_path: Path) -> None:
    script = emit_script(PLAN, Job())
    assert script.count("\n", script.index("FSDPPLAN_PLAN=$("), script.index("\nexport FSDP")) < 20
    older = render_launch(plan=PLAN, plan_json=plan_json(PLAN), job=Job(), version="0.1.0")
    for text in (script, older):
        (tmp_path / "job.sbatch").write_text(text)
        assert read_launch(tmp_path / "job.sbatch").plan == PLAN


def test_a_script_of_another_plan_is_refused_until_one_of_them_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(emit_script(PLAN, Job()))
    write_plan(OTHER, tmp_path / "fsdpplan.json")
    with pytest.raises(SpecError, match=r"--from script .* --from plan"):
        resolve_launch(tmp_path)
    assert resolve_launch(tmp_path, source="script").plan == PLAN
    assert resolve_launch(tmp_path, source="plan").plan == OTHER


def edited(script: str) -> str:
    return script.replace('"micro_batch": 1', '"micro_batch": 9')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("#!/bin/bash\necho hello\n", "no header of ours"),
        (edited(emit_script(PLAN, Job())), "changed after it was emitted"),
        (emit_script(PLAN, Job()).replace("FSDPPLAN_PLAN=$(cat", "X=$(cat"), "no header of ours"),
    ],
    ids=["empty", "blank", "foreign", "edited", "without its plan"],
)
def test_a_script_that_is_not_as_emitted_is_refused_naming_the_choices(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "job.sbatch").write_text(text)
    with pytest.raises(SpecError, match=says) as refused:
        resolve_launch(tmp_path)
    assert "--from plan" in str(refused.value)
    assert "emit-launch" in str(refused.value)


def test_nobody_is_told_to_give_a_manifest_to_bash(tmp_path: Path) -> None:
    path = tmp_path / "trainjob.yaml"
    path.write_text("apiVersion: v1\n")
    with pytest.raises(SpecError, match="--target kubernetes") as refused:
        read_launch(path)
    assert "bash" not in str(refused.value)


@pytest.mark.parametrize("folder", ["saved", "/shared/a b", "it's"])
def test_scripts_save_to_the_same_folder_where_their_words_are_the_same(folder: str) -> None:
    scripts = [
        emit_script(PLAN, Job(program=Trainer(steps=steps, checkpoint_dir=folder)))
        for steps in (1, 2)
    ]
    other = emit_script(PLAN, Job(program=Trainer(checkpoint_dir=f"{folder} too")))
    assert checkpoints_word(scripts[0]) == checkpoints_word(scripts[1]) is not None
    assert checkpoints_word(other) != checkpoints_word(scripts[0])
    assert checkpoints_word(emit_script(PLAN, Job())) is None


def test_job_options_do_not_go_with_a_script_that_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(emit_script(PLAN, Job()))
    with pytest.raises(SpecError, match="options of its own"):
        resolve_launch(tmp_path, job=Job(program=Trainer(steps=3)))


def test_an_empty_folder_is_told_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="fsdpplan recommend"):
        resolve_launch(tmp_path)


def test_changing_the_rest_of_a_script_is_the_users_right(tmp_path: Path) -> None:
    script = emit_script(PLAN, Job()).replace("#SBATCH --nodes=2", "#SBATCH --nodes=2\n#SBATCH -v")
    (tmp_path / "job.sbatch").write_text(script)
    assert resolve_launch(tmp_path).script == script


def test_a_script_that_says_to_save_nothing_is_not_taken_for_one_that_saves() -> None:
    assert checkpoints_word(emit_script(PLAN, Job())) is None
