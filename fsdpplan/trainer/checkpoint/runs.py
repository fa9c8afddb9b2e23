"""Checkpoints that lose nothing: written beside training, published whole, checked when read.

How they lie on disk, and why a killed run leaves only whole ones: files.py. Any layout
reads what any other wrote. DIR must be one that all nodes share.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..config import PlanConfig
from ..errors import TrainerError
from ..model.weights import VOCABULARIES
from ..optimizer import Recipe
from ..parallel.tied_tables import copied_parameters
from ..rng import generator_states, restore_generators, seed_generators
from .files import (
    MANIFEST,
    FileRecord,
    Unreadable,
    checkpoint_path,
    damage,
    partial_path,
    prepare_folder,
    read_manifest,
    reason,
    remove,
    resumable,
)
from .owner import leave_folder, note_saved, require_free, require_kept, take_folder
from .progress import (
    SCHEMA_VERSION,
    Progress,
    changes,
    read_progress,
    require_same_base,
    require_same_run,
    written_by,
)
from .state import (
    Named,
    Staging,
    TensorTree,
    equalise_copies,
    fill_optimizer,
    flat,
    named_tensors,
    tree,
)
from .storage import (
    CheckedReader,
    OwnTensors,
    Padding,
    PublishingWriter,
    TensorsOnly,
    read_index,
    with_padding,
)

GROUP_TIMEOUT = timedelta(hours=2)
"""How long ranks wait for the slowest one to write."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """How a save ended."""

    step: int
    path: Path
    seconds: float
    """From the end of the step until it was published."""
    problem: str
    """Why it was not published; empty when it was."""
    blocking_seconds: float
    """Part of it in which training stood still."""


class CheckpointFailed(TrainerError):
    """The run's last state could not be saved."""

    exit_code = 1


class Checkpoints:
    """The checkpoints of a run, one under way at most.

    In the background, the values are copied to CPU memory and a thread writes them: its messages go
    over a group of its own, which never mixes with training's, and which works without a GPU. A
    save that fails is told about and training goes on: it loses nothing, and the disk may be back
    at the next one. The last good checkpoint stays until another one is published.
    """

    def __init__(
        self,
        folder: Path,
        plan: PlanConfig,
        *,
        keep: int,
        background: bool,
        run_folder: Path | None = None,
    ) -> None:
        """All ranks call this. In `run_folder` the run notes what it has saved."""
        self.folder = folder
        self.run_folder = run_folder
        self.plan = plan
        self.keep = keep
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self.staging = Staging() if background else None
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.under_way: Future[Saved] | None = None
        self.good_step = 0
        """Step of the newest checkpoint of this run of which this rank has heard; where it began if
        it has written none. Equal on all ranks after `wait`."""
        self.owner = ""
        """What says on the disk that the folder is this run's."""

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
    ) -> Saved | None:
        """Begin to write and publish; all ranks call this.

        Waits for the last save, and returns how that ended if nobody heard yet. To be called after
        `begin`, which makes the folder this run's.
        """
        assert self.owner, "begin comes first"
        ended = self.wait()
        began = time.perf_counter()
        tensors = tree(self._named(model, optimizer))
        tensors["rng"] = {str(dist.get_rank()): generator_states()}
        copies = None if self.staging is None else self.staging.take(tensors)
        planner = OwnTensors(padding_of(tensors, self.plan), copies)
        path = checkpoint_path(self.folder, progress.step)
        document = {"schema_version": SCHEMA_VERSION, **asdict(progress), **written_by(self.plan)}
        partial = partial_path(path)
        writer = PublishingWriter(
            *(partial, path, document),
            keep=self.keep,
            owner=self.owner,
            run_folder=self.run_folder,
        )
        held = time.perf_counter() - began

        def write() -> Saved:
            problem = ""
            try:
                dcp.save(  # type: ignore[attr-defined]
                    tensors, storage_writer=writer, planner=planner, process_group=self.group
                )
            except dcp.api.CheckpointException as error:
                problem = reason(next(iter(error.failures.values()))[0])
            except Exception as error:
                problem = reason(error)
            problem = self._first_problem(problem)
            if problem and dist.get_rank() == 0:
                # What is left of it would take the next one's room.
                remove(partial)
            seconds = time.perf_counter() - began
            return Saved(
                step=progress.step,
                path=path,
                seconds=seconds,
                problem=problem,
                blocking_seconds=seconds if self.staging is None else held,
            )

        self.under_way = self.worker.submit(write)
        if self.staging is None:
            self.under_way.exception()
        return ended

    def ended(self) -> Saved | None:
        """How the save under way ended, once: as soon as it did; does not wait."""
        if self.under_way is None or not self.under_way.done():
            return None
        return self.wait()

    def wait(self) -> Saved | None:
        """How the save under way ended, if nobody heard yet."""
        if self.under_way is None:
            return None
        saved, self.under_way = self.under_way.result(), None
        if not saved.problem:
            self.good_step = saved.step
        return saved

    def leave(self) -> None:
        """The run has ended, and saves nothing more."""
        if dist.get_rank() == 0:
            leave_folder(self.folder, self.owner)

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int,
        resume: str,
        recipe: Recipe | None = None,
        allow_changes: bool = False,
        base: str = "",
    ) -> tuple[Progress | None, list[str]]:
        """Read the best checkpoint into place, as `resume` (auto, required, never) allows, and get
        the folder ready; all ranks call this. Without a `recipe` nobody asks whether it is another
        than the checkpoint's. `base` is the fingerprint of what is frozen beside adapters.

        Returns where that checkpoint stands, None where there is none at all, and what is to be
        said. Raises TrainerError where there are some and none is good: starting over is not for
        us to decide.
        """
        self._on_first_rank(lambda: require_free(self.folder))
        paths = self._on_first_rank(lambda: resumable(self.folder))
        if not paths:
            self._on_first_rank(lambda: require_kept(self.run_folder, self.folder))
        if resume == "never" and paths:
            raise TrainerError(
                f"{self.folder} has a checkpoint already: take another --checkpoint-dir"
            )
        if resume == "required" and not paths:
            raise TrainerError(f"{self.folder} has no checkpoint to resume from; use --resume auto")
        self._require_shared()
        remarks: list[str] = []
        for path in paths:
            problem = self._damage(path)
            if problem:
                remarks.append(f"{path.name} is damaged: {problem}")
                continue
            progress = read_progress(path)
            steps = None if recipe is None else recipe.steps
            remarks += require_same_run(path, progress, self.plan, seed=seed, steps=steps)
            require_same_base(path, progress, base)
            if recipe is not None:
                remarks += changes(path, progress, self.plan, recipe, allowed=allow_changes)
            remarks += self._load(path, model, optimizer, progress)
            self.good_step = progress.step
            self._on_first_rank(functools.partial(note_saved, self.run_folder, path))
            return progress, remarks
        if paths:
            raise TrainerError(
                f"{self.folder} has no whole checkpoint left ({'; '.join(remarks)}): take another "
                "--checkpoint-dir to begin anew"
            )
        return None, remarks

    def has_any(self) -> bool:
        """Whether the first rank sees a checkpoint; all ranks call this, before `begin`."""
        return self._on_first_rank(lambda: bool(resumable(self.folder)))

    def go_back(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Progress, list[str]]:
        """Read the last good checkpoint into place again; returns where that stands, and what is
        to be said. All ranks call this, with none under way and one that is good."""
        path = checkpoint_path(self.folder, self.good_step)
        progress = read_progress(path)
        return progress, self._load(path, model, optimizer, progress)

    def _load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
    ) -> list[str]:
        """Read a good checkpoint into place, whatever layout wrote it; returns what is to be said.

        Generators go on where they were on the same layout. On another there is no such place:
        they begin anew, from the seed, the step and the rank.
        """
        if not optimizer.state:
            fill_optimizer(optimizer)
        index = read_index(path)
        named = self._named(model, optimizer)
        tensors = tree(named)
        padding = padding_of(tensors, self.plan)
        rank = dist.get_rank()
        same_layout = progress.layout == written_by(self.plan)["layout"]
        generators = empty_generators(index, rank) if same_layout else {}
        if generators:
            tensors["rng"] = {str(rank): generators}
        try:
            dcp.load(  # type: ignore[attr-defined]
                tensors,
                storage_reader=CheckedReader(path, with_padding(index, padding)),
                planner=TensorsOnly(),
                process_group=self.group,
            )
        except dcp.api.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise TrainerError(
                f"{path} does not hold this model: {first}; take another --checkpoint-dir"
            ) from error
        equalise_copies(named)
        if generators:
            restore_generators(generators)
            return []
        seed_generators(seed=progress.seed, step=progress.step, rank=rank)
        return ["random numbers begin anew: another layout or an older trainer wrote it"]

    def _named(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
        """What a checkpoint holds: of a run with adapters not the base beside them."""
        copies, adapters = copied_parameters(self.plan), self.plan.training.adapters
        return named_tensors(model, optimizer, copies, leaves_frozen=adapters is not None)

    def _damage(self, path: Path) -> str:
        """What is wrong with a checkpoint, as any rank sees it: each checks its share of it."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        try:
            records = require_manifest(path)
            problem = damage(records, path, rank=rank, ranks=ranks)
        except Unreadable as error:
            problem = str(error)
        return self._first_problem(problem)

    def _first_problem(self, problem: str) -> str:
        """The first rank's that has one, on all ranks; "" where none has."""
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=self.group)
        return next((problem for problem in problems if problem), "")

    def _require_shared(self) -> None:
        """Raise unless all ranks see what the first one writes."""
        trial: Path = self._on_first_rank(lambda: prepare_folder(self.folder))
        seen = [False] * dist.get_world_size()
        dist.all_gather_object(seen, trial.exists(), group=self.group)
        self._on_first_rank(lambda: remove(trial))
        self.owner = self._on_first_rank(lambda: take_folder(self.folder))
        if not all(seen):
            raise TrainerError(
                f"rank {seen.index(False)} does not see what rank 0 writes into {self.folder}: "
                "take a --checkpoint-dir that all nodes share"
            )

    def _on_first_rank(self, ask: Callable[[], Answer]) -> Answer:
        """What `ask` returns on the first rank, on all ranks; so is the error that it raises."""
        told: list[Any] = [None, ""]
        if dist.get_rank() == 0:
            try:
                told[0] = ask()
            except TrainerError as error:
                told[1] = str(error)
            except OSError as error:
                told[1] = (
                    f"--checkpoint-dir {self.folder} cannot be used: {reason(error)}; take a "
                    "folder that can be written"
                )
        dist.broadcast_object_list(told, src=0, group=self.group)
        if told[1]:
            raise TrainerError(told[1])
        answer: Answer = told[0]
        return answer


def padding_of(tensors: TensorTree, plan: PlanConfig) -> Padding:
    """What of the tensors of a run is there for its tensor parallelism only."""
    vocab, rows = plan.model.vocab, plan.model.vocab_rows(plan.layout.tp)
    names = (
        name
        for name, tensor in flat(tensors)
        if any(table in name for table in VOCABULARIES) and tensor.shape[:1] == (rows,)
    )
    return Padding(names=frozenset(names if rows > vocab else ()), rows=rows, vocab=vocab)


def empty_generators(index: Metadata, rank: int) -> dict[str, torch.Tensor]:
    """Room for the states of `rank`'s generators, where the checkpoint has them."""
    prefix = f"rng.{rank}."
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=torch.uint8)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def require_manifest(path: Path) -> list[FileRecord]:
    """What to check of a checkpoint; none of one that was written without checksums."""
    progress = read_progress(path)
    records = read_manifest(path)
    if records is None and progress.model:
        raise Unreadable(f"{MANIFEST} is missing")
    files = {info.relative_path for info in read_index(path).storage_data.values()}
    if records is not None and not files.issubset(record.name for record in records):
        raise Unreadable(f"{MANIFEST} does not name all files of tensors")
    return records or []
