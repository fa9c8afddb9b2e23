"""Express: a row of a table as the nouns of the planner, or why that cannot be done."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.validate.runs.candidates import checkpointing_of, layouts_of
from fsdpplan.validate.runs.degrees import as_wrapped, degrees_of, global_batch_of
from fsdpplan.validate.runs.fabric import ClusterRequest, cluster_request
from fsdpplan.validate.runs.recipe import training_of
from fsdpplan.validate.runs.runtimes import software_of
from fsdpplan.validate.runs.shape import model_of
from fsdpplan.validate.runs.skipped import NotExpressed, Skipped
from fsdpplan.validate.runs.stages import halved_dual_pipe
from fsdpplan.validate.runs.unknown import Unknown, unknowns


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """A row that the cost model can be asked about."""

    model: Model
    cluster_request: ClusterRequest
    training: Training
    layouts: tuple[Layout, ...]
    """What the row may mean: of the recomputation that comes first, the fastest that fits."""
    unknown: tuple[Unknown, ...] = ()
    """What the row leaves open, and what else it could be."""
    recomputed_share: float | None
    """Share of the blocks that the layouts' recomputation applies to; None: all of them."""
    allocator: str
    """How the allocator's segments were set, as in `MeasuredRun`."""
    assumptions: tuple[str, ...]
    """Sentences on what the row does not say and what is taken instead."""


@lru_cache(maxsize=8192)
def express(run: MeasuredRun) -> Expressed | Skipped:
    """`run` in the planner's words."""
    try:
        return _expressed(run)
    except NotExpressed as error:
        return error.skipped
    except SpecError as error:
        return Skipped(reason="the row contradicts itself", detail=str(error))


def _expressed(run: MeasuredRun) -> Expressed:
    run, of_schedule = halved_dual_pipe(run)
    software = as_wrapped(run, software_of(run))
    request, of_cluster = cluster_request(run)
    degrees, of_degrees = degrees_of(run, software)
    model, of_model = model_of(run)
    global_batch, of_batch = global_batch_of(run, degrees)
    training, of_training = training_of(
        run,
        software=software,
        seq_len=model.max_positions,
        global_batch=global_batch,
        is_fsdp=degrees.sharding == "fsdp",
    )
    checkpointing, of_checkpointing = checkpointing_of(run, software)
    layouts, of_layout = layouts_of(
        run,
        model=model,
        software=software,
        degrees=degrees,
        global_batch=global_batch,
        modes=checkpointing.modes,
    )
    assumptions = (
        *of_schedule,
        *of_model,
        *of_cluster,
        *of_training,
        *of_degrees,
        *of_batch,
        *of_checkpointing,
        *of_layout,
    )
    return Expressed(
        model=model,
        cluster_request=request,
        training=training,
        layouts=layouts,
        unknown=unknowns(run, software=software, profile=request.profile),
        recomputed_share=checkpointing.recomputed_share,
        allocator=run.allocator,
        assumptions=assumptions,
    )
