"""Rehearse many recommended plans: what is put first must be what its own program does.

    python -m tests.benchmarks.rehearse_many --plans 100 --seed 0
    python -m tests.benchmarks.rehearse_many --plans 60 --wraps

Draws questions of many models, sizes and machines by the seed, plans each as `recommend` does with
its defaults, and rehearses the first layout. With `--wraps` FSDP's units have several blocks each,
so that the last one is often short, and the peak is held to 1 %. One line a plan, and the counts in
the end; exits 1 where a plan does not pass.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.files.clusters import load_cluster
from fsdpplan.run.plans import with_stages
from fsdpplan.search.defaults import legal_global_batch
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import Training

PROFILES = (
    "dgx-h100",
    "dgx-a100-80g-hdr",
    "azure-nd-h100-v5",
    "p4d-24xlarge",
    "dgx-h100-superpod-unit",
    "pcie-8xl40s",
    "pcie-8xrtx4090",
)
GPUS = (1, 2, 4, 6, 8, 14, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)
SEQUENCES = (1024, 2048, 4096, 8192, 16384, 32768)
BATCH_SHARES = (None, None, 1, 2, 4)
"""Of the GPUs, sequences a step; None: the default batch."""
MOST_LAYERS = 16
"""Of deeper models so many blocks: a rehearsal's time grows with them, and they are alike."""
PEAK_ERROR_FRACTION = 0.01
"""How far a rehearsed peak may be from the predicted one where nothing is a pipeline's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A question."""

    model: Model
    cluster: Cluster
    training: Training
    pins: Pins = field(default_factory=Pins)

    @property
    def words(self) -> str:
        """What is asked."""
        training = self.training
        return (
            f"{self.model.name} x {self.model.layers} on {self.cluster.gpus} of "
            f"{self.cluster.name}, {training.global_batch} x {training.seq_len}"
        )


def questions(seed: int, most_layers: int = MOST_LAYERS) -> Iterator[Drawn]:
    """Questions without end, the same for the same seed."""
    chance = random.Random(seed)
    while True:
        try:
            yield _drawn(chance, most_layers)
        except SpecError:  # such machines are not sold in that number
            continue


def _drawn(chance: random.Random, most_layers: int) -> Drawn:
    model = load_model(chance.choice(model_names()))
    model = replace(
        model, layers=min(model.layers, chance.choice((4, 8, MOST_LAYERS)), most_layers)
    )
    cluster = load_cluster(chance.choice(PROFILES), gpus=chance.choice(GPUS)).cluster
    seq_len = min(chance.choice(SEQUENCES), model.max_positions)
    draft = Training(seq_len=seq_len, global_batch=1)
    share = chance.choice(BATCH_SHARES)
    batch = legal_global_batch(
        model=model,
        cluster=cluster,
        training=draft,
        pins=Pins(),
        usual=None if share is None else share * cluster.gpus,
    )
    return Drawn(model=model, cluster=cluster, training=replace(draft, global_batch=batch))


def wrapped(seed: int, most_layers: int = MOST_LAYERS) -> Iterator[Drawn]:
    """The same questions of FSDP alone, with several blocks a unit and what changes its peak."""
    chance = random.Random(seed)
    for asked in questions(seed, most_layers):
        pins = Pins(
            sharding="fsdp",
            dp_replicate=1,
            pp=1,
            wrap_blocks=chance.randint(2, max(2, asked.model.layers - 1)),
            reshard_after_forward=chance.choice(("always", "always", "never")),
            activation_checkpointing=chance.choice(("none", "op", "full")),
            gradient_sync=chance.choice(("every", "every", "last")),
            offload="none",
        )
        yield replace(asked, pins=pins)


def planned(asked: Drawn) -> Plan | None:
    """The plan that is recommended; None where nothing fits."""
    found = recommend(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins, limit=1
    )
    if not found.ranked:
        return None
    first = found.ranked[0]
    plan = Plan(
        model=asked.model,
        cluster=asked.cluster,
        training=asked.training,
        layout=first.layout,
        estimate=first.estimate,
        alternatives=(),
        sources=(),
        assumptions=(),
        warnings=(),
        versions=(),
    )
    return with_stages(plan)


def plans(
    seed: int, most_layers: int = MOST_LAYERS, *, wraps: bool = False
) -> Iterator[tuple[Drawn, Plan]]:
    """Questions with an answer that the trainer can run."""
    for asked in (wrapped if wraps else questions)(seed, most_layers):
        plan = planned(asked)
        if plan is not None and plan.estimate.runnable:
            yield asked, plan


def problems_of(plan: Plan, *, peak_error: float | None = None) -> tuple[str, ...]:
    """What its rehearsal finds wrong; a peak, too, that is further off than `peak_error`."""
    from fsdpplan.run.rehearse.ranks import DEFAULT_RANKS, chosen_ranks
    from fsdpplan.run.rehearse.rehearse import rehearse

    found = rehearse(plan, chosen_ranks(plan.model, plan.layout, DEFAULT_RANKS))
    said = () if found.agrees else tuple(found.said)
    errors = [rank.peak_error_fraction for rank in found.ranks if rank.peak_error_fraction]
    if peak_error is None or not errors or max(map(abs, errors)) <= peak_error:
        return said
    return (*said, f"the peak is predicted {max(errors, key=abs):+.1%} off")


def kinds_of(plan: Plan) -> list[str]:
    """What of a layout may go wrong apart from the rest."""
    layout = plan.layout
    degrees = ("tp", "cp", "pp", "ep", "loss_chunks", "virtual_stages", "wrap_blocks")
    kinds = [name for name in degrees if getattr(layout, name) > 1]
    kinds += (
        [layout.sharding] if layout.sharding != "fsdp" or layout.dp_replicate == 1 else ["hsdp"]
    )
    kinds += ["integer reshard"] if isinstance(layout.reshard_after_forward, int) else []
    kinds += ["few micro-batches"] if 1 < layout.pp >= layout.num_microbatches else []
    mode = layout.activation_checkpointing
    return kinds + ([f"recomputes {mode}"] if mode != "none" else [])


def main() -> int:
    """Rehearse so many plans."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wraps", action="store_true", help="FSDP units of several blocks")
    options = parser.parse_args()
    allowed = PEAK_ERROR_FRACTION if options.wraps else None
    asked_plans = plans(options.seed, wraps=options.wraps)
    passed, kinds, failed = 0, Counter[str](), []
    for (asked, plan), _ in zip(asked_plans, range(options.plans), strict=False):
        problems = problems_of(plan, peak_error=allowed)
        passed += not problems
        kinds.update(kinds_of(plan))
        said = "passes" if not problems else f"FAILS: {problems[0]}"
        print(f"{asked.words}: {', '.join(kinds_of(plan))}: {said}", flush=True)
        failed += [asked.words] if problems else []
    print(f"{passed} of {options.plans} plans pass their rehearsal")
    print(", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
