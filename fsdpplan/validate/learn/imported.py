"""Imported: rows of a table of measured runs as rows of the ledger."""

from __future__ import annotations

from fsdpplan import __version__
from fsdpplan.cost.model.params import mfu_fraction
from fsdpplan.files.runs.table import Cells, MeasuredRun
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.ledger import LEAST_STEPS, LedgerRow, Machines, Observed, Predicted, Workload
from fsdpplan.validate.compare.predict import Prediction, predict
from fsdpplan.validate.learn.evidence import software_name
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request
from fsdpplan.validate.runs.skipped import Skipped

TABLE = "table"
"""Target of a row that came from a table."""


def imported(run: MeasuredRun, cells: Cells, *, origin: str) -> LedgerRow | Skipped:
    """The ledger's row of a row of a table, or why it says nothing of speed.

    What the table leaves open is settled as `validate` does it today; the cells stay with the row,
    and are read again whenever it is learned from.
    """
    if not run.is_timed:
        return Skipped(reason="it has no step time to compare")
    expressed = express(run)
    if isinstance(expressed, Skipped):
        return expressed
    predicted = predict(expressed)
    if isinstance(predicted, Skipped):
        return predicted
    cluster = load_request(expressed.cluster_request)
    return LedgerRow(
        ended_at=run.date,
        plan_sha256="",
        run_folder="",
        target=TABLE,
        job=Workload(model=expressed.model, training=expressed.training, layout=predicted.layout),
        machines=Machines.of(cluster),
        predicted=_predicted(expressed, predicted, cluster),
        observed=_observed(run, expressed, cluster),
        versions=(("fsdpplan", __version__),),
        origin=origin,
        software=software_name(run),
        cells=cells,
    )


def _predicted(expressed: Expressed, predicted: Prediction, cluster: Cluster) -> Predicted:
    seconds = predicted.step_seconds.expected
    return Predicted(
        step_seconds=predicted.step_seconds,
        time=predicted.time,
        mfu_fraction=_mfu_fraction(expressed, cluster, seconds),
        peak_allocated_bytes=predicted.memory.peak_allocated_bytes,
        peak_reserved_bytes=predicted.memory.peak_reserved_bytes,
        corrected_by_runs=0,
    )


def _observed(run: MeasuredRun, expressed: Expressed, cluster: Cluster) -> Observed:
    seconds, kind = run.measured_step_seconds, run.memory_kind
    assert seconds is not None
    return Observed(
        steps=LEAST_STEPS,  # a published time is one of a steady state
        measured_steps=LEAST_STEPS,
        step_seconds=seconds,
        tokens_per_second=expressed.training.tokens_per_step / seconds,
        mfu_fraction=_mfu_fraction(expressed, cluster, seconds),
        peak_allocated_bytes=run.peak_memory_bytes if kind == "alloc" else None,
        peak_reserved_bytes=run.peak_memory_bytes if kind == "reserved" else None,
        memory_kind=kind,
        exit_code=0,
        failure=None,
    )


def _mfu_fraction(expressed: Expressed, cluster: Cluster, seconds: float) -> float:
    training = expressed.training
    return mfu_fraction(
        model=expressed.model,
        seq_len=training.seq_len,
        tokens_per_second_per_gpu=training.tokens_per_step / seconds / cluster.gpus,
        peak_flops_per_second=cluster.device.peak_flops_per_second(training.precision),
    )
