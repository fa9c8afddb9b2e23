"""Brute force: the fastest layout of a small problem, from the whole product of its settings.

It shares nothing with the search but the rules and the cost model: every field of `Layout` takes
every value here, whatever bound or heuristic would leave it out. `make brute` tries all problems.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

from fsdpplan.cost.estimate import step_time
from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.pins import program_defaults
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.spec.adapters import Adapters, BaseFormat
from fsdpplan.spec.layout import DDP_BUCKET_BYTES, SPLIT_BACKWARD_SCHEDULES, Layout, Schedule
from fsdpplan.spec.model import Experts
from fsdpplan.spec.training import ProgramName
from tests.cost.problems import DELTA, SMALL, STATES
from tests.search.questions import Question, question

MOST_LAYOUTS = 200_000
"""Legal ones of a problem: more would not be tried in minutes."""

BUCKETS_BYTES = (DDP_BUCKET_BYTES, 100 * 2**20, 400 * 2**20)
LONG_CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest that fits."""

    seconds: float
    layout: Layout
    legal: int
    """Layouts that were looked at."""


def fastest(asked: Question, *, any_split: bool = False) -> Best:
    """The fastest layout of all that are legal and fit; `any_split`: with any number of blocks in
    each stage of a pipeline."""
    best: tuple[float, Layout] | None = None
    legal = 0
    layouts = every_layout(asked)
    for layout in _split(layouts, asked.model.layers) if any_split else layouts:
        case = asked.case(layout)
        if first_problem(case) is not None:
            continue
        legal += 1
        memory = rank_memory(case)
        if memory.peak_device_bytes > asked.asked.available_bytes:
            continue
        seconds = step_time(case).time.total_seconds
        if best is None or seconds < best[0]:
            best = (seconds, layout)
    assert best is not None
    assert legal <= MOST_LAYOUTS, f"{legal} layouts: a smaller problem, please"
    return Best(seconds=best[0], layout=best[1], legal=legal)


def every_layout(asked: Question, *, offloads: tuple[str, ...] = ("none",)) -> Iterator[Layout]:
    """The product of all settings, legal or not, as far as a `Layout` can be made of them;
    `offloads`: where FSDP's state may be."""
    runs_zero = asked.training.runtime != "fsdp2"
    shardings = [(one, "none") for one in ("ddp", *(("zero1", "zero2") if runs_zero else ()))]
    shardings += [("fsdp", offload) for offload in ("none", "cpu")]
    for degrees, (sharding, offload) in product(_degrees(asked), shardings):
        data_parallel = degrees["dp_replicate"] * degrees["dp_shard"]
        if asked.training.global_batch % data_parallel:
            continue
        for micro_batch in _parts(asked.training.global_batch // data_parallel):
            number = asked.training.global_batch // (data_parallel * micro_batch)
            base = {
                **degrees,
                "sharding": sharding,
                "offload": offload,
                "micro_batch": micro_batch,
                "num_microbatches": number,
                "sequence_parallel": degrees["tp"] > 1,
                "loss_parallel": degrees["tp"] > 1,
            }
            held = offloads if sharding == "fsdp" else ("none",)
            for policies, offload in product(_policies(asked, base), held):
                try:
                    yield Layout(**{**base, **policies, "offload": offload})  # type: ignore[arg-type]
                except SpecError:
                    continue


def _split(layouts: Iterator[Layout], layers: int) -> Iterator[Layout]:
    """Each with its blocks split over its stages in every way."""
    for layout in layouts:
        yield layout
        stages = layout.pp * layout.virtual_stages
        if layout.pp > 1 and stages <= layers + 2:
            for bars in combinations(range(layers + stages - 1), stages - 1):
                ends = (-1, *bars, layers + stages - 1)
                blocks = tuple(right - left - 1 for left, right in pairwise(ends))
                yield replace(layout, stage_blocks=blocks)


def _degrees(asked: Question) -> Iterator[dict[str, int]]:
    gpus, model = asked.cluster.gpus, asked.model
    experts = model.experts.experts if model.experts else 1
    for pp, dp_shard, cp, tp in product(_parts(gpus), repeat=4):
        dp_replicate, left = divmod(gpus, pp * dp_shard * cp * tp)
        if left or not dp_replicate:
            continue
        for ep in _parts(experts):
            yield {
                "pp": pp,
                "dp_replicate": dp_replicate,
                "dp_shard": dp_shard,
                "cp": cp,
                "tp": tp,
                "ep": ep,
            }


def _parts(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _policies(asked: Question, base: dict[str, object]) -> Iterator[dict[str, object]]:
    """Everything else that a layout says; what could only be refused is left out here and there."""
    is_fsdp, pp, layers = base["sharding"] == "fsdp", base["pp"], asked.model.layers
    assert isinstance(pp, int)
    ranks = base["dp_shard"] * base["cp"]  # type: ignore[operator]
    reshards: list[object] = ["always"]
    if is_fsdp:
        reshards = ["never", *([] if pp > 1 else ["always", *_parts(ranks)[1:]])]
        if pp > 1 and asked.training.traits.reshards_stages:
            reshards.append("always")
    syncs = ["last"] if pp > 1 else ["every", "reduce_scatter_only", "last"]
    axes = product(
        _schedules(pp, layers),
        reshards,
        syncs,
        _recomputation(layers),
        (1, 2, 4) if is_fsdp else (1,),
        BUCKETS_BYTES if base["sharding"] == "ddp" and base["dp_replicate"] != 1 else (25 * 2**20,),
        (False, True) if base["tp"] != 1 else (False,),
        LONG_CHUNKS,
    )
    for (schedule, stages), reshard, sync, recomputed, wrap, bucket, overlaps, chunks in axes:
        yield {
            "schedule": schedule,
            "virtual_stages": stages,
            "reshard_after_forward": reshard,
            "gradient_sync": sync,
            "activation_checkpointing": recomputed[0],
            "checkpoint_blocks": recomputed[1],
            "wrap_blocks": wrap,
            "ddp_bucket_bytes": bucket,
            "async_tp": overlaps,
            "loss_chunks": chunks,
            "compile": schedule not in SPLIT_BACKWARD_SCHEDULES,
        }


def _schedules(pp: int, layers: int) -> Iterable[tuple[Schedule, int]]:
    if pp == 1:
        return [("none", 1)]
    ones: list[tuple[Schedule, int]] = [("gpipe", 1), ("1f1b", 1), ("zbv", 2), ("dualpipev", 2)]
    looped: tuple[Schedule, ...] = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
    most = (layers + 2) // pp
    return [*ones, *((schedule, n) for schedule in looped for n in range(2, most + 1))]


def _recomputation(layers: int) -> list[tuple[str, object]]:
    """What is recomputed, and in how many blocks."""
    numbers: list[object] = ["all", *range(1, layers)]
    return [("none", "all"), *product(("attention", "op", "full"), numbers)]


FOUR = replace(SMALL, name="four blocks", layers=4)
FIVE = replace(SMALL, name="five blocks", layers=5)
MIXTURE = replace(FOUR, name="mixture", experts=Experts(experts=4, active=2, hidden=2048))


HYBRID = replace(DELTA, name="hybrid", layers=4)
STATES_5 = replace(STATES, name="five kinds", layers=5)


def tight(asked: Question, gib: float) -> Question:
    """The same on devices with less memory."""
    device = replace(asked.cluster.device, memory_bytes=int(gib * 2**30))
    return replace(asked, cluster=replace(asked.cluster, device=device))


def in_fours(asked: Question, profile: str) -> Question:
    """The same on nodes of four."""
    cluster = load_cluster(profile, gpus=asked.cluster.gpus, gpus_per_node=4).cluster
    return replace(asked, cluster=cluster)


def by_megatron(asked: Question) -> Question:
    """The same by a runtime that has ZeRO-1 and ZeRO-2."""
    return replace(asked, training=replace(asked.training, runtime="megatron"))


def by_program(asked: Question, name: ProgramName) -> Question:
    """The same for a program of others, with its defaults."""
    said = program_defaults(name, precision=asked.training.precision, gpus=asked.cluster.gpus)
    training = replace(asked.training, program=name, **said)  # type: ignore[arg-type]
    return replace(asked, training=training)


def with_adapters(asked: Question, *, base: BaseFormat) -> Question:
    """The same with adapters over a frozen base."""
    adapters = Adapters(rank=16, alpha=32.0, base=base)
    return replace(asked, training=replace(asked.training, adapters=adapters))


def changing(asked: Question, switch: str) -> Question:
    """The same with a change of precision in mid-run."""
    return replace(asked, training=replace(asked.training, precision_switch=switch))


IN_CI = {
    "dense on 2": tight(question(FOUR, 2, seq_len=1024, global_batch=4), 4.2),
    "PCIe on 2": tight(question(FIVE, 2, "pcie-8xl40s", seq_len=2048, global_batch=4), 6.0),
    "mixture on 2": tight(question(MIXTURE, 2, seq_len=1024, global_batch=4), 5.5),
    "cards on 2": tight(question(FOUR, 2, "pcie-8xrtx4090", seq_len=2048, global_batch=4), 2.9),
    "torchtitan on 2": by_program(
        tight(question(FOUR, 2, seq_len=1024, global_batch=4), 4.2), "torchtitan"
    ),
    "Megatron-LM on 2": by_program(question(FOUR, 2, seq_len=1024, global_batch=4), "megatron"),
    "Accelerate on 2": by_program(
        tight(question(MIXTURE, 2, seq_len=1024, global_batch=4), 5.5), "accelerate"
    ),
}
MORE = {
    "hybrid on 2": tight(question(HYBRID, 2, seq_len=1024, global_batch=4), 3.6),
    "states on 2": tight(question(STATES_5, 2, seq_len=1024, global_batch=4), 3.6),
    "mixture on 2 cards": tight(
        question(MIXTURE, 2, "pcie-8xrtx4090", seq_len=2048, global_batch=4), 3.5
    ),
    "states on 4": tight(question(STATES_5, 4, seq_len=1024, global_batch=4), 3.0),
    "bf16, then fp8 on 2": changing(
        tight(question(MIXTURE, 2, seq_len=1024, global_batch=4), 5.5), "fp8@0.8"
    ),
    "fp8 soon on 4": changing(
        tight(question(FOUR, 4, seq_len=1024, global_batch=4), 4.2), "fp8@0.3"
    ),
    "room on 4": question(FOUR, 4, seq_len=1024, global_batch=8),
    "dense on 4": tight(question(SMALL, 4, seq_len=1024, global_batch=4), 4.2),
    "PCIe on 4": tight(question(FOUR, 4, "pcie-8xl40s", seq_len=2048, global_batch=8), 4.5),
    "long sequences on 4": tight(question(FOUR, 4, seq_len=16384, global_batch=4), 8.0),
    "mixture on 4": tight(question(MIXTURE, 4, seq_len=1024, global_batch=4), 4.2),
    "two levels on 8": tight(
        in_fours(question(FOUR, 8, seq_len=1024, global_batch=8), "dgx-a100-80g-hdr1"), 3.2
    ),
    "long sequences on 8": tight(question(FOUR, 8, seq_len=16384, global_batch=2), 6.0),
    "few sequences on 8": tight(question(SMALL, 8, seq_len=4096, global_batch=2), 4.0),
    "Megatron-LM and experts on 4": by_program(
        question(MIXTURE, 4, seq_len=1024, global_batch=4), "megatron"
    ),
    "adapters on 2": with_adapters(
        tight(question(FOUR, 2, seq_len=1024, global_batch=4), 2.0), base="bf16"
    ),
    "adapters over 4 bits on 2 cards": with_adapters(
        tight(question(FOUR, 2, "pcie-8xrtx4090", seq_len=2048, global_batch=4), 2.0), base="nf4"
    ),
    "ZeRO on 4": by_megatron(question(FOUR, 4, seq_len=1024, global_batch=8)),
}
ANY_SPLIT = frozenset(IN_CI)
"""Tried with any split of their blocks over stages, too."""


def main(names: list[str]) -> int:
    """Say of each problem what brute force and the search find; how many differ."""
    problems = IN_CI | MORE
    different = 0
    for name in names or list(problems):
        found, best = problems[name].answer(), fastest(problems[name], any_split=name in ANY_SPLIT)
        assert found.fastest is not None
        share = found.fastest.estimate.step_seconds.expected / best.seconds - 1
        different += share > 1e-9
        print(f"{name}: {best.legal} layouts, {best.seconds:.6f} s, the search {share:+.3%}")
        if share > 1e-9:
            print(f"  {best.layout}\n  not {found.fastest.layout}")
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
