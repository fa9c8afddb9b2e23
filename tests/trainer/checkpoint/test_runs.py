"""Saving beside training, resuming from what is good, and saying what is not."""

from __future__ import annotations

import json
import random
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdpplan.trainer.checkpoint import runs
from fsdpplan.trainer.checkpoint import storage as checkpoint_storage
from fsdpplan.trainer.checkpoint.files import checkpoint_path, resumable
from fsdpplan.trainer.checkpoint.progress import Progress
from fsdpplan.trainer.checkpoint.runs import Checkpoints
from fsdpplan.trainer.checkpoint.state import named_tensors
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.model.moe import MixtureOfExperts
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import Assembled, assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import plans

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("alone")]

CPU = torch.device("cpu")
SMALL = {"layers": 2, "hidden": 16, "ffn_hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8}
RECIPE = Recipe(steps=9, learning_rate=1e-2, warmup_steps=0, weight_decay=0.1, clip_norm=1.0)
PROGRESS = Progress(
    step=0, sequences=0, seed=0, seq_len=24, steps=9, learning_rate=1e-2, warmup_steps=0
)


class Training:
    """One process that trains, and its checkpoints."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 9,
        background: bool = True,
        run_folder: Path | None = None,
        **plan: Any,
    ) -> None:
        model = SMALL | plan.pop("model", {})
        self.plan: PlanConfig = parse_plan(plans.plan_text(model=model, **plan))
        self.assembled: Assembled = assemble(self.plan, CPU, seed=0)
        self.optimizer = make_optimizer(
            self.model, replace(RECIPE, optimizer=self.plan.training.optimizer)
        )
        self.sequences = open_sequences(self.plan, None, seed=0)
        self.progress = PROGRESS
        self.checkpoints = Checkpoints(
            folder, self.plan, keep=keep, background=background, run_folder=run_folder
        )

    @property
    def model(self) -> nn.Module:
        return self.assembled.model

    def begin(self, resume: str = "auto") -> list[str]:
        """Resume and return what is said."""
        found, remarks = self.checkpoints.begin(self.model, self.optimizer, seed=0, resume=resume)
        self.progress = found or self.progress
        return remarks

    def step(self) -> float:
        """Train one step."""
        batches = micro_batches(
            self.sequences, self.plan, first=self.progress.sequences, rank=0, device=CPU
        )
        output = train_step(self.assembled, self.optimizer, batches, self.plan, clip_norm=1.0)
        self.progress = replace(
            self.progress, step=self.progress.step + 1, sequences=self.progress.sequences + 8
        )
        return output.loss.item()

    def save(self) -> None:
        """Begin to save."""
        self.checkpoints.save(self.model, self.optimizer, self.progress)

    def save_now(self) -> str:
        """Save, and return why that failed."""
        self.save()
        saved = self.checkpoints.wait()
        assert saved is not None
        return saved.problem

    def weights(self) -> list[Tensor]:
        """Copies of all parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def trained(folder: Path, *, saves: int = 2, **arguments: Any) -> Training:
    """A run that saved after each of its steps."""
    training = Training(folder, **arguments)
    training.begin()
    for _ in range(saves):
        training.step()
        assert training.save_now() == ""
    return training


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether values are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_what_older_trainers_kept_of_a_mixture_besides_is_left_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares of the step before, by which they pressed routers in pipelines."""
    experts = {"experts": {"experts": 4, "active": 2, "hidden": 16}}

    def older(model: nn.Module, *given: Any, **named: Any) -> Any:
        return named_tensors(model, *given, **named) + [
            (("model", f"{name}.expert_shares"), torch.full((4,), 0.5))
            for name, module in model.named_modules()
            if isinstance(module, MixtureOfExperts)
        ]

    with monkeypatch.context() as patched:
        patched.setattr(runs, "named_tensors", older)
        before = trained(tmp_path, saves=1, model=experts)
    saved = checkpoint_storage.read_index(checkpoint_path(tmp_path, 1)).state_dict_metadata
    assert any(name.endswith("expert_shares") for name in saved)
    after = Training(tmp_path, model=experts)
    after.begin("required")
    assert same(before.weights(), after.weights())
    after.step()


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    gate = threading.Event()
    publish = checkpoint_storage.publish

    def publish_later(*arguments: Any) -> None:
        assert gate.wait(timeout=120)
        publish(*arguments)
        events.append("published")

    monkeypatch.setattr(checkpoint_storage, "publish", publish_later)
    training = Training(tmp_path)
    training.begin()
    training.step()
    at_the_save = training.weights()
    training.save()
    events.append("begun")
    for _ in range(2):
        training.step()
        events.append(f"step {training.progress.step}")
    assert training.checkpoints.ended() is None
    gate.set()
    assert training.checkpoints.wait() is not None
    assert events == ["begun", "step 2", "step 3", "published"]

    resumed = Training(tmp_path)
    resumed.begin("required")
    assert resumed.progress.step == 1
    assert same(resumed.weights(), at_the_save)
    assert not same(training.weights(), at_the_save)


def test_the_next_save_waits_for_the_last(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.begin()
    training.step()
    training.save()
    training.step()
    ended = training.checkpoints.save(training.model, training.optimizer, training.progress)
    assert ended is not None
    assert (ended.step, ended.problem) == (1, "")
    assert checkpoint_path(tmp_path, 1).is_dir()
    assert training.checkpoints.wait() is not None
    assert training.checkpoints.wait() is None


@pytest.mark.parametrize("background", [True, False])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, background: bool) -> None:
    training = trained(tmp_path, background=background)
    losses = [training.step() for _ in range(3)]
    resumed = Training(tmp_path, background=background)
    assert resumed.begin("required") == []
    assert [resumed.step() for _ in range(3)] == losses


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """A disk on which no file can be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_said_and_the_last_good_one_stays(tmp_path: Path, background: bool) -> None:
    training = trained(tmp_path, saves=1, background=background)
    training.step()
    with largest_file(20_000):
        assert training.save_now() == "File too large"
    assert training.checkpoints.good_step == 1
    assert [path.name for path in resumable(tmp_path)] == ["step-00000001"]

    training.step()
    assert training.save_now() == "", "the next save finds the disk as it is then"
    assert training.checkpoints.good_step == 3
    resumed = Training(tmp_path)
    assert resumed.begin("required") == []
    assert resumed.progress.step == 3


def test_a_failed_publication_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device", "manifest.json")

    training = trained(tmp_path, saves=1)
    monkeypatch.setattr(checkpoint_storage, "publish", full)
    training.step()
    assert training.save_now() == "No space left on device (manifest.json)"
    assert not list(tmp_path.rglob("*.partial")), "it would take the next one's room"


def test_a_folder_that_vanishes_is_not_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    training = trained(folder)
    folder.rename(tmp_path / "elsewhere")
    training.step()
    assert "is not the folder that this run began in" in training.save_now()
    assert not folder.exists()
    folder.mkdir()  # the place where another disk was mounted
    training.step()
    assert "is not the folder that this run began in" in training.save_now()
    assert list(folder.iterdir()) == []


def test_of_two_runs_in_one_folder_the_later_one_saves(tmp_path: Path) -> None:
    first = trained(tmp_path)
    second = Training(tmp_path)
    second.begin()
    first.step()
    assert "another run has begun in" in first.save_now()
    second.step()
    assert second.save_now() == ""


def test_a_folder_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match=r"Not a directory .*take a folder that can be written"):
        Training(tmp_path / "file" / "saved").begin()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("__0_0.distcp", flip),
        ("__0_0.distcp", cut),
        ("__0_0.distcp", Path.unlink),
        (".metadata", flip),
        (".metadata", Path.unlink),
        ("trainer.json", cut),
        ("trainer.json", Path.unlink),
        ("manifest.json", cut),
        ("manifest.json", Path.unlink),
    ],
)
def test_the_next_older_good_one_is_taken(tmp_path: Path, name: str, harm: Any) -> None:
    trained(tmp_path, saves=2)
    harm(checkpoint_path(tmp_path, 2) / name)
    resumed = Training(tmp_path)
    (remark,) = resumed.begin("required")
    assert remark.startswith("step-00000002 is damaged: ")
    assert name in remark
    assert resumed.progress.step == 1


def test_if_none_is_good_nothing_is_begun_anew(tmp_path: Path) -> None:
    trained(tmp_path)
    for step in (1, 2):
        cut(checkpoint_path(tmp_path, step) / "__0_0.distcp")
    with pytest.raises(TrainerError, match=r"step-00000002 is damaged.*step-00000001 is damaged"):
        Training(tmp_path).begin()


def test_what_resume_allows(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="no checkpoint to resume from"):
        Training(tmp_path / "new").begin("required")
    assert not (tmp_path / "new").exists()
    assert Training(tmp_path / "new").begin("never") == []
    trained(tmp_path / "new")
    with pytest.raises(TrainerError, match="has a checkpoint already"):
        Training(tmp_path / "new").begin("never")


def test_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(TrainerError, match="this model: ffn_hidden 16 there, 32 in the plan"):
        Training(tmp_path, model={"ffn_hidden": 32}).begin()


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(TrainerError, match="trained with adamw, the plan's optimizer is muon"):
        Training(tmp_path, training={"optimizer": "muon"}).begin()


def test_another_precision_is_said_and_taken(tmp_path: Path) -> None:
    training = trained(tmp_path)
    resumed = Training(tmp_path, training={"precision": "bf16"})
    assert resumed.begin() == ["precision fp32 there, bf16 from here on"]
    assert same(resumed.weights(), training.weights())


def test_parameters_in_another_dtype_are_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    half = {"precision": "bf16", "param_dtype": "bf16"}
    with pytest.raises(TrainerError, match="holds parameters in fp32, the plan keeps them in bf16"):
        Training(tmp_path, training=half).begin()


def test_parameters_kept_in_bf16_go_on_to_the_bit(tmp_path: Path) -> None:
    half = {"precision": "bf16", "param_dtype": "bf16"}
    training = trained(tmp_path, training=half)
    losses = [training.step() for _ in range(3)]
    resumed = Training(tmp_path, training=half)
    assert resumed.begin("required") == []
    assert {weight.dtype for weight in resumed.weights()} == {torch.bfloat16}
    assert [resumed.step() for _ in range(3)] == losses


def test_longer_texts_are_said_and_taken(tmp_path: Path) -> None:
    trained(tmp_path)
    resumed = Training(tmp_path, model={"rope_theta": 5e5})
    assert resumed.begin() == ["rope_theta 10000.0 there, 500000.0 in the plan"]


@pytest.mark.parametrize(("seed", "seq_len"), [(1, 24), (0, 16)])
def test_other_data_is_refused(tmp_path: Path, seed: int, seq_len: int) -> None:
    trained(tmp_path)
    training = Training(tmp_path, training={"seq_len": seq_len})
    with pytest.raises(TrainerError, match="the data would not go on"):
        training.checkpoints.begin(training.model, training.optimizer, seed=seed, resume="auto")


def test_states_of_data_and_scaler_come_back(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.begin()
    states = {"data_state": {"offset": 12, "files": ["a"]}, "scaler_state": {"scale": 1024.0}}
    training.progress = replace(training.progress, step=1, **states)  # type: ignore[arg-type]
    training.step()
    assert training.save_now() == ""
    resumed = Training(tmp_path)
    resumed.begin()
    assert resumed.progress.data_state == states["data_state"]
    assert resumed.progress.scaler_state == states["scaler_state"]


def draws() -> list[float]:
    """The next random numbers of each generator."""
    return [random.random(), random.gauss(0, 1), float(torch.rand(()))]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.begin()
    draws()
    training.step()
    assert training.save_now() == ""
    expected = draws()
    draws()
    resumed = Training(tmp_path)
    assert resumed.begin() == []
    assert draws() == expected


def test_on_another_layout_random_numbers_begin_anew_and_alike(tmp_path: Path) -> None:
    trained(tmp_path)
    seen = []
    for _ in range(2):
        (remark,) = Training(tmp_path, wrap_blocks=2).begin()
        assert "random numbers begin anew" in remark
        seen.append(draws())
        draws()
    assert seen[0] == seen[1]


def old_checkpoint(folder: Path, training: Training) -> Path:
    """What trainers wrote whose trainer.json had no version."""
    path = checkpoint_path(folder, training.progress.step)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    kept = ("step", "sequences", "seed", "seq_len", "steps", "learning_rate", "warmup_steps")
    said = {name: getattr(training.progress, name) for name in kept}
    (path / "trainer.json").write_text(json.dumps(said))
    (folder / "latest").write_text(path.name + "\n")
    return path


@pytest.mark.parametrize("model", [{}, plans.GPT2_STYLE | {"kv_heads": 2}], ids=["plain", "tied"])
def test_checkpoints_of_version_1_still_load(tmp_path: Path, model: dict[str, Any]) -> None:
    training = Training(tmp_path, model=model)
    training.begin()
    training.step()
    old_checkpoint(tmp_path, training)
    losses = [training.step() for _ in range(2)]
    resumed = Training(tmp_path, model=model)
    resumed.begin("required")
    assert [resumed.step() for _ in range(2)] == losses
    assert resumed.save_now() == ""


def test_version_1_of_another_model_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.begin()
    training.step()
    old_checkpoint(tmp_path, training)
    with pytest.raises(TrainerError, match="does not hold this model: Size mismatch"):
        Training(tmp_path, model={"ffn_hidden": 32}).begin()


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, saves=1)
    path = checkpoint_path(tmp_path, 1)
    document = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps(document | {"schema_version": 4}))
    with pytest.raises(TrainerError, match="resume with the fsdpplan that wrote it"):
        Training(tmp_path).begin()


def test_torch_reads_it_too(tmp_path: Path) -> None:
    training = trained(tmp_path, saves=1)
    weight = torch.zeros_like(dict(training.model.named_parameters())["norm.weight"])
    state = {"model": {"norm.weight": weight}}
    dcp.load(state, checkpoint_id=checkpoint_path(tmp_path, 1))
    assert torch.equal(weight, dict(training.model.named_parameters())["norm.weight"])


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    trained(tmp_path, saves=4, keep=2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [".run", "latest", "step-00000003", "step-00000004"]


def test_a_run_that_has_saved_does_not_begin_anew_where_its_folder_is_not_mounted(
    tmp_path: Path,
) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    run.mkdir()
    first = Training(saved, background=False, run_folder=run)
    first.begin()
    first.step()
    assert first.save_now() == ""
    first.checkpoints.leave()
    saved.rename(tmp_path / "elsewhere")
    again = Training(saved, run_folder=run)
    with pytest.raises(TrainerError, match=r"has saved step-00000001 in .*not mounted"):
        again.begin()
    assert not saved.exists(), "nothing may lie where the disk is mounted later"
    assert Training(saved, run_folder=tmp_path / "of another run").begin() == []
    # One that went on from a checkpoint, and has saved nothing itself yet, knows it, too.
    shutil.rmtree(saved)
    (tmp_path / "elsewhere").rename(saved)
    (run / "saves.jsonl").unlink()
    later = Training(saved, run_folder=run)
    later.begin()
    later.checkpoints.leave()
    shutil.rmtree(saved)
    with pytest.raises(TrainerError, match="this run has saved step-00000001"):
        Training(saved, run_folder=run).begin()
