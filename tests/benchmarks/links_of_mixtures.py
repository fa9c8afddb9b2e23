"""Whether recommended plans of mixtures have the time that their links need.

    python -m tests.benchmarks.links_of_mixtures --plans 500 --seed 0

Draws questions of mixtures of experts by the seed and plans each as `recommend` does. One line a
plan whose collectives take longer than its step on one level of the network, or whose floor does;
the counts in the end; exits 1 where there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator

from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.read.exposed import level_seconds
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.defaults import legal_global_batch
from fsdpplan.search.pins import Pins
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Estimate
from fsdpplan.spec.training import Training

PROFILES = (
    "dgx-h100",
    "dgx-a100-80g-hdr",
    "p4d-24xlarge",
    "p5-48xlarge",
    "gcp-a3-highgpu-8g",
    "gcp-g2-standard-96",
    "oci-bm-gpu-a10-4",
    "pcie-8xl40s",
)
GPUS = (4, 8, 16, 32, 64, 128, 256)
SEQUENCES = (1024, 2048, 4096, 8192)
SEQUENCES_A_GPU = (1, 2, 4)
"""Few: what experts exchange and what FSDP gathers then take about as long."""
STATE_BYTES_A_PARAMETER = 16
"""In fp32: itself, its gradient and both moments of AdamW."""
ROUNDING = 1 + 1e-9


def mixtures() -> list[str]:
    """Models of the catalogue with experts."""
    return [name for name in model_names() if load_model(name).experts is not None]


def holds_state(model: Model, cluster: Cluster, training: Training) -> bool:
    """Whether all devices together do: elsewhere nothing is recommended, and the search for what
    comes nearest takes as long as that of two plans."""
    room = cluster.gpus * available_bytes(cluster=cluster, training=training)
    return STATE_BYTES_A_PARAMETER * parameter_count(model) <= room


def priced(seed: int) -> Iterator[tuple[Case, Estimate]]:
    """What is recommended of questions without end, the same for the same seed."""
    chance, names = random.Random(seed), mixtures()
    while True:
        model = load_model(chance.choice(names))
        profile, gpus = chance.choice(PROFILES), chance.choice(GPUS)
        draft = Training(seq_len=min(chance.choice(SEQUENCES), model.max_positions), global_batch=1)
        share, pins = chance.choice(SEQUENCES_A_GPU), Pins(offload="none")
        try:
            cluster = load_cluster(profile, gpus=gpus).cluster
            if not holds_state(model, cluster, draft):
                continue
            batch = legal_global_batch(
                model=model, cluster=cluster, training=draft, pins=pins, usual=share * gpus
            )
            training = Training(seq_len=draft.seq_len, global_batch=batch)
            found = recommend(model=model, cluster=cluster, training=training, pins=pins, limit=1)
        except SpecError:  # such machines are not sold in that number
            continue
        if found.ranked:
            first = found.ranked[0]
            case = Case(model=model, cluster=cluster, training=training, layout=first.layout)
            yield case, first.estimate


def sold_twice(estimate: Estimate) -> dict[str, float]:
    """Seconds of what passes each level of the network over those of the step, where that is more
    than all."""
    step = estimate.step_seconds.expected
    shares = {level: sent / step for level, sent in level_seconds(estimate.communication).items()}
    return {level: share for level, share in shares.items() if share > ROUNDING}


def main() -> int:
    """Plan so many questions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = full = 0
    for (case, estimate), done in zip(priced(options.seed), range(options.plans), strict=False):
        if done and done % 50 == 0:
            print(f"{done} plans, {wrong} wrong", file=sys.stderr, flush=True)
        over = sold_twice(estimate)
        wrong += bool(over)
        passing = level_seconds(estimate.communication).values()
        full += max(passing, default=0.0) * ROUNDING >= estimate.step_seconds.expected
        if over:
            words = ", ".join(f"{level} {share:.0%}" for level, share in over.items())
            print(f"{case.model.name} on {case.cluster.gpus} of {case.cluster.name}: {words}")
    print(f"{options.plans} plans: {wrong} with a link sold twice, {full} as long as a link takes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
