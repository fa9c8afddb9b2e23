"""The inputs on the fewest GPUs on which a layout fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from fsdpplan.cli import working
from fsdpplan.cli.options.files import EvidenceOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.resolve import Resolved
from fsdpplan.cli.resolve.cluster import (
    DEFAULT_HARDWARE,
    larger_clusters,
    node_gpus,
    resolve_cluster,
)
from fsdpplan.cli.resolve.inputs import Inputs, Known, question_of, resolve_around
from fsdpplan.cli.resolve.model import published_dropout, resolve_model
from fsdpplan.cli.resolve.torch import resolve_torch
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.search.scaling import fits_at_all, node_counts
from fsdpplan.spec.training import TorchRelease

MOST_GPUS = 4096
"""More are not looked at."""


def on_the_fewest(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
) -> Inputs:
    """What `resolve` says for the fewest GPUs on which some layout fits: numbers of whole nodes,
    and equal parts of one, are tried from below, so that none is overlooked.

    Raises NoFeasibleLayout where none up to `MOST_GPUS` does, SpecError where none can be asked.
    """
    if cluster.gpus is not None:
        raise SpecError(
            f"--min-gpus asks how many, and --gpus {cluster.gpus} says it: leave one of them out"
        )
    machines = replace(cluster, hardware=cluster.hardware or DEFAULT_HARDWARE)
    the_model, published = resolve_model(model), published_dropout(model)

    @cache
    def release() -> Resolved[TorchRelease]:
        return resolve_torch(torch)

    tried: list[int] = []
    refused: SpecError | None = None
    for gpus in node_counts(node_gpus(machines) or 1, most=MOST_GPUS):
        options = replace(machines, gpus=gpus)
        working.say(f"searching: whether anything fits on {gpus:,} GPUs")
        try:
            inputs = resolve_around(
                Known(
                    model=the_model,
                    cluster=resolve_cluster(options),
                    larger=larger_clusters(options),
                    dropout=published,
                ),
                training=training,
                layout=layout,
                torch=release,
                evidence=evidence,
            )
        except SpecError as error:  # such as of degrees that do not divide so many
            refused = error
            continue
        if fits_at_all(question_of(inputs)):
            return replace(inputs, assumptions=(*inputs.assumptions, _said(gpus, tried)))
        tried.append(gpus)
    if not tried and refused is not None:
        raise refused
    raise NoFeasibleLayout(
        f"no layout of {the_model.value.name} fits on up to {MOST_GPUS:,} GPUs of "
        f"{machines.hardware}: take GPUs with more memory, or fix less of the layout",
        rejected={},
    )


def _said(gpus: int, tried: Sequence[int]) -> str:
    if not tried:
        return f"{gpus:,} GPUs, the fewest that can be asked for (--min-gpus)"
    last = f"{tried[-1]:,}"
    some = f"{', '.join(f'{one:,}' for one in tried[:4])} to {last}" if len(tried) > 4 else None
    words = some or ", ".join(f"{one:,}" for one in tried)
    return f"{gpus:,} GPUs, the fewest: nothing fits on {words} (--min-gpus)"
