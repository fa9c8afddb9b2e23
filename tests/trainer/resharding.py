"""Save in one layout, load in another: `python resharding.py FOLDER PAIR...`.

All ranks are forked from one process that has imported torch and run none of it. Each layout trains
two steps, saves, and trains two more; then others read what it saved and train the same two.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from fsdpplan.trainer.checkpoint.progress import Progress
from fsdpplan.trainer.checkpoint.runs import Checkpoints
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.groups import parse_group
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.parallel.distributed import leave
from fsdpplan.trainer.parallel.tied_tables import copied_parameters
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.torch_versions import lacking
from tests.trainer import plans
from tests.trainer.ranks import fork_ranks

CPU = torch.device("cpu")
GLOBAL_BATCH = 12
STEPS_BEFORE = 2
STEPS_AFTER = 2
RECIPE = Recipe(steps=4, learning_rate=3e-3, warmup_steps=0, weight_decay=0.1, clip_norm=0.5)
BEGINNING = Progress(
    step=0, sequences=0, seed=0, seq_len=24, steps=4, learning_rate=3e-3, warmup_steps=0
)

WIDTHS = {"hidden": 24, "ffn_hidden": 24, "heads": 2, "kv_heads": 2, "vocab": 60}
DENSE = {"model": WIDTHS}
TIED = {"model": WIDTHS | {"tied_embeddings": True, "attention_bias": True}}
EXPERTS = {
    "model": WIDTHS
    | {
        "experts": {
            "experts": 4,
            "active": 2,
            "hidden": 16,
            "shared_hidden": 24,
            "router_bias": True,
            "dense_layers": 1,
        }
    }
}
PADDED = {"model": WIDTHS | {"vocab": 59}}
"""Two tensor-parallel ranks have 64 rows of it, four of them 64 too."""
PADDED_MORE = {"model": PADDED["model"] | {"vocab_multiple": 40}}
PADDED_TIED = {"model": PADDED["model"] | {"tied_embeddings": True}}
MUON = DENSE | {"training": {"optimizer": "muon"}}

GROUPS = ("tok_embeddings*:lr=0.2", "layers.0.*:lr=2,weight_decay=0.5", "*norm*:weight_decay=0.3")

SPLIT = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
PIPED = {
    "pp": 2,
    "schedule": "1f1b",
    "num_microbatches": 2,
    "gradient_sync": "last",
    "reshard_after_forward": "never",
}
WHOLE = {"sharding": "ddp", "reshard_after_forward": "always"}
INTERLEAVED = PIPED | {"schedule": "interleaved_1f1b", "virtual_stages": 2}
ZBV = PIPED | {"schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout of one model."""

    world: int
    plan: dict[str, Any]
    reads: tuple[str, ...] = field(default=())
    """Cases whose checkpoints it loads."""
    groups: tuple[str, ...] = ()
    """Parameters with settings of their own."""


def plan_of(case: Case) -> PlanConfig:
    """Its plan."""
    return parse_plan(plans.plan_text(micro_batch=micro_batch(case), **case.plan))


def micro_batch(case: Case) -> int:
    """Sequences of a forward pass, so that all cases see the same ones in a step."""
    data_parallel = case.plan.get("dp_shard", 1) * case.plan.get("dp_replicate", 1)
    return GLOBAL_BATCH // int(data_parallel * case.plan.get("num_microbatches", 1))


CASES: dict[str, Case] = {
    "one": Case(world=1, plan=DENSE, reads=("tp", "cp_fsdp", "bare")),
    "bare": Case(world=1, plan=DENSE | WHOLE, reads=("one", "ddp")),
    "ddp": Case(world=2, plan=DENSE | WHOLE | {"dp_replicate": 2}, reads=("fsdp",)),
    "tp": Case(world=2, plan=DENSE | WHOLE | SPLIT, reads=("pp_interleaved",)),
    "pp_interleaved": Case(world=2, plan=DENSE | WHOLE | INTERLEAVED, reads=("ddp",)),
    "fsdp3": Case(
        world=3,
        plan=DENSE | {"dp_shard": 3},
        reads=("hsdp",),
    ),
    "fsdp": Case(world=4, plan=DENSE | {"dp_shard": 4}, reads=("tp_fsdp",)),
    "hsdp": Case(world=4, plan=DENSE | {"dp_shard": 2, "dp_replicate": 2}, reads=("ddp",)),
    "tp_fsdp": Case(world=4, plan=DENSE | SPLIT | {"dp_shard": 2}, reads=("hsdp",)),
    "pp_fsdp": Case(world=4, plan=DENSE | PIPED | {"dp_shard": 2}, reads=("tp_fsdp",)),
    "cp_fsdp": Case(world=4, plan=DENSE | {"cp": 2, "dp_shard": 2}, reads=("pp_fsdp",)),
    "tied_one": Case(world=1, plan=TIED, reads=("tied_zbv",)),
    "tied_pp": Case(world=2, plan=TIED | WHOLE | PIPED, reads=("tied_fsdp",)),
    "tied_zbv": Case(world=2, plan=TIED | ZBV, reads=("tied_pp",)),
    "tied_fsdp": Case(world=2, plan=TIED | {"dp_shard": 2}, reads=("tied_pp",)),
    "experts_one": Case(world=1, plan=EXPERTS, reads=("ep", "ep_tp")),
    "ep": Case(world=4, plan=EXPERTS | {"dp_shard": 4, "ep": 2}, reads=("ep_pp",)),
    "ep_tp": Case(
        world=4,
        plan=EXPERTS | SPLIT | {"dp_shard": 2, "ep": 2},
        reads=("experts_one",),
    ),
    "ep_pp": Case(world=4, plan=EXPERTS | PIPED | {"dp_shard": 2, "ep": 2}, reads=("ep_tp",)),
    "padded_one": Case(world=1, plan=PADDED, reads=("padded_tp", "padded_tp_fsdp")),
    "padded_tp": Case(world=2, plan=PADDED | WHOLE | SPLIT, reads=("padded_one", "padded_pp")),
    "padded_tp_fsdp": Case(
        world=4,
        plan=PADDED | SPLIT | {"dp_shard": 2},
        reads=("padded_fsdp3", "padded_tp", "padded_multiple"),
    ),
    "padded_fsdp3": Case(world=3, plan=PADDED | {"dp_shard": 3}, reads=("padded_tp_fsdp",)),
    "padded_multiple": Case(
        world=2, plan=PADDED_MORE | {"dp_shard": 2}, reads=("padded_tp", "padded_one")
    ),
    "padded_pp": Case(world=4, plan=PADDED | SPLIT | PIPED, reads=("padded_tp_fsdp",)),
    "padded_tied_one": Case(world=1, plan=PADDED_TIED, reads=("padded_tied_pp",)),
    "padded_tied_pp": Case(
        world=4, plan=PADDED_TIED | SPLIT | PIPED, reads=("padded_tied_one", "padded_tied_tp")
    ),
    "padded_tied_tp": Case(world=2, plan=PADDED_TIED | WHOLE | SPLIT, reads=("padded_tied_pp",)),
    "muon_one": Case(world=1, plan=MUON, reads=("muon_tp_fsdp",)),
    "muon_fsdp": Case(world=4, plan=MUON | {"dp_shard": 4}, reads=("muon_one",)),
    "muon_tp_fsdp": Case(world=4, plan=MUON | SPLIT | {"dp_shard": 2}, reads=("muon_fsdp",)),
    "groups_tied_pp": Case(
        world=2, plan=TIED | WHOLE | PIPED, reads=("groups_tied_fsdp",), groups=GROUPS
    ),
    "groups_tied_fsdp": Case(
        world=2, plan=TIED | {"dp_shard": 2}, reads=("groups_tied_pp",), groups=GROUPS
    ),
    "groups_muon_one": Case(world=1, plan=MUON, reads=("groups_muon_tp_fsdp",), groups=GROUPS),
    "groups_muon_tp_fsdp": Case(
        world=4,
        plan=MUON | SPLIT | {"dp_shard": 2},
        reads=("groups_muon_one",),
        groups=GROUPS,
    ),
}

MISSING = {name: why for name, case in CASES.items() for why in lacking(plan_of(case))}
"""What the torch that is here cannot run of them."""

PAIRS = {
    f"{source}-{name}": (source, name) for name, case in CASES.items() for source in case.reads
}
WORLDS = sorted({case.world for case in CASES.values()})


def train(case: Case, saved: Path, *, resumes: bool) -> list[float]:
    """Losses of the last two steps: of a run that saved before them, or of one that resumed."""
    plan = plan_of(case)
    assembled = assemble(plan, CPU, seed=0)
    groups = tuple(map(parse_group, case.groups))
    recipe = replace(RECIPE, optimizer=plan.training.optimizer, groups=groups)
    optimizer = make_optimizer(assembled.model, recipe, copied_parameters(plan))
    sequences = open_sequences(plan, None, seed=0)
    checkpoints = Checkpoints(saved, plan, keep=1, background=False)
    found, _ = checkpoints.begin(
        assembled.model, optimizer, seed=0, resume="required" if resumes else "never"
    )
    progress = found or BEGINNING
    losses = []
    while progress.step < STEPS_BEFORE + STEPS_AFTER:
        batches = micro_batches(
            sequences, plan, first=progress.sequences, rank=dist.get_rank(), device=CPU
        )
        output = train_step(assembled, optimizer, batches, plan, clip_norm=RECIPE.clip_norm)
        loss = output.loss.clone()
        dist.all_reduce(loss)
        losses.append(loss.item() * plan.layout.pp / dist.get_world_size())
        progress = replace(
            progress,
            step=progress.step + 1,
            sequences=progress.sequences + plan.training.global_batch,
        )
        if progress.step == STEPS_BEFORE and not resumes:
            checkpoints.save(assembled.model, optimizer, progress)
            ended = checkpoints.wait()
            assert ended is not None
            assert not ended.problem, ended.problem
    return losses[-STEPS_AFTER:]


def run_all(folder: Path, jobs: list[tuple[str, Case, Path, bool]]) -> None:
    """Some cases on these ranks, one after the other; each leaves its losses in a file."""
    dist.init_process_group("gloo")
    for name, case, saved, resumes in jobs:
        losses = train(case, saved, resumes=resumes)
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(losses))
    leave(0)


def main(folder: Path, pairs: list[str]) -> None:
    """Save what the pairs need, then load it."""
    saving: dict[int, list[Any]] = {world: [] for world in WORLDS}
    loading: dict[int, list[Any]] = {world: [] for world in WORLDS}
    can = {pair: PAIRS[pair] for pair in pairs if not MISSING.keys() & {*PAIRS[pair]}}
    for source in dict.fromkeys(source for source, _ in can.values()):
        case = CASES[source]
        saving[case.world].append((source, case, folder / "saved" / source, False))
    for pair, (source, target) in can.items():
        case = CASES[target]
        loading[case.world].append((pair, case, folder / "saved" / source, True))
    for jobs in (saving, loading):
        for world in filter(jobs.get, WORLDS):
            code = fork_ranks(world, partial(run_all, folder, jobs[world]))
            if code:
                raise SystemExit(f"{world} ranks ended with {code}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
