"""Plans on disk and as JSON: written canonically, read with distrust, also those of earlier
releases.

A field that has come since has its default, which is what plans before it meant without saying it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fsdpplan.errors import SpecError
from fsdpplan.files.table import MAX_INTEGER, parse_json_object, path_text, read_text, short
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.cluster import Cluster, DeviceFit, Level
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import BrokenRule, Case, Estimate, Plan, RankedLayout
from fsdpplan.spec.torch_features import torch_need
from fsdpplan.spec.training import Training

THEN: dict[type, str] = {
    Layout: "dp_replicate dp_shard cp tp pp ep experts_over_tp sharding reshard_after_forward "
    "gradient_sync wrap_blocks ddp_bucket_bytes micro_batch num_microbatches schedule "
    "virtual_stages stage_blocks activation_checkpointing checkpoint_blocks "
    "sequence_parallel loss_parallel async_tp offload compile loss_chunks",
    Model: "mlp norm norm_bias positions max_positions tied_embeddings attention_bias "
    "attention_output_bias mlp_bias qk_norm qk_norm_width post_norms embedding_norm "
    "attention_sinks sliding_window full_attention_every experts latent rope_theta "
    "norm_epsilon",
    Training: "precision reduce_dtype optimizer tokens runtime torch program fp8_recipe "
    "fp8_all_gather headroom_fraction fits_fraction",
    DeviceFit: "lasting_fragments_fraction peak_memory_stack_fraction peak_memory_base_fraction "
    "matmul_fill_depth matmul_wave_fraction matmul_start_seconds fp8_fraction "
    "unaligned_fraction native_attention_ratio throttled_fraction throttle_seconds "
    "sustained_fraction straggler_fraction megatron_pace early_megatron_pace "
    "other_pace",
    Level: "base_seconds start_seconds multicast_fraction crowding_exponent low_latency",
}
"""Fields with a default that stand in every plan of 0.2.0, the first release: one without them was
edited."""


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """`document` with today's fields; the same where it has them, or is no plan at all."""
    kinds = get_type_hints(Plan)
    filled = {key: _filled(kinds.get(key), value) for key, value in document.items()}
    return filled if "rules" in filled or not filled else {**filled, "rules": []}


def _filled(kind: Any, value: Any) -> Any:
    """`value`, which is of the type `kind`, with today's fields at all depths."""
    if isinstance(value, list) and get_origin(kind) is tuple:
        return [_filled(get_args(kind)[0], item) for item in value]
    table = next((one for one in (kind, *get_args(kind)) if is_dataclass(one)), None)
    if table is None or not isinstance(value, dict):
        return value
    kinds = get_type_hints(table)
    return {
        **{name: default for name, default in _defaults(table) if name not in value},
        **{name: _filled(kinds.get(name), item) for name, item in value.items()},
    }


def _defaults(kind: Any) -> Iterator[tuple[str, Any]]:
    """What a field means where it is not said, of those that were not in every plan."""
    for field in fields(kind):
        if field.name in THEN.get(kind, "").split():
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = asdict(field.default_factory())
        if default is not MISSING:
            yield field.name, list(default) if isinstance(default, tuple) else default


SCHEMA_VERSION = 1
LIMIT_BYTES = 8 * 1024 * 1024
_AGREEMENT_FRACTION = 1e-3
_MEMORY_TOTALS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
_AGAIN = "plan again with `fsdpplan recommend`, or undo the edit"


EACH_MAY_BE_NULL = "each may be null"
"""Behind a value's type in what stands for its JSON: it is also of what is not known."""

ModelJson = Annotated[dict[str, Any], Model]
"""What `model_document` returns, and so on: a value's fields, as schemas of JSON read it."""
ClusterJson = Annotated[dict[str, Any], Cluster]
TrainingJson = Annotated[dict[str, Any], Training]
LayoutJson = Annotated[dict[str, Any], Layout]
EstimateJson = Annotated[dict[str, Any], Estimate]


def model_document(model: Model) -> dict[str, Any]:
    """`model` as JSON has it."""
    return asdict(model)


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """`cluster` as JSON has it, with the number of nodes."""
    return asdict(cluster) | {"nodes": cluster.nodes}


def training_document(training: Training) -> dict[str, Any]:
    """`training` as JSON has it."""
    return asdict(training)


def layout_document(layout: Layout) -> dict[str, Any]:
    """`layout` as JSON has it."""
    return asdict(layout)


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """`estimate` as JSON has it, with the totals that its parts add up to."""
    document = asdict(estimate)
    document["time"]["total_seconds"] = estimate.time.total_seconds
    for total in _MEMORY_TOTALS:
        document["memory"][total] = getattr(estimate.memory, total)
    return document


def needed_document(case: Case) -> dict[str, str]:
    """The oldest torch that a plan can be trained under, as JSON has it, and what needs it."""
    need = torch_need(case)
    return {"oldest": str(need.oldest), "because": need.because}


def ranked_document(ranked: RankedLayout) -> dict[str, Any]:
    """One line of the answer as JSON has it."""
    return {
        "rank": ranked.rank,
        "layout": layout_document(ranked.layout),
        "estimate": estimate_document(ranked.estimate),
        "reason": ranked.reason,
    }


def rules_document(rules: Iterable[BrokenRule] | None) -> list[dict[str, Any]]:
    """Broken rules of the field as JSON has them."""
    return [asdict(rule) for rule in rules or ()]


def plan_document(plan: Plan) -> dict[str, Any]:
    """`plan` as JSON has it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(plan.model),
        "cluster": cluster_document(plan.cluster),
        "training": training_document(plan.training),
        "layout": layout_document(plan.layout),
        "torch_needed": needed_document(plan.case),
        "estimate": estimate_document(plan.estimate),
        "alternatives": [ranked_document(ranked) for ranked in plan.alternatives],
        "sources": dict(plan.sources),
        "assumptions": list(plan.assumptions),
        "warnings": list(plan.warnings),
        "rules": rules_document(plan.rules),
        "versions": dict(plan.versions),
        # left out where nothing was said, as in plans of before
        **({} if plan.failures is None else {"failures": asdict(plan.failures)}),
        **({} if plan.terms is None else {"terms": asdict(plan.terms)}),
    }


def plan_json(plan: Plan) -> str:
    """The canonical text of a plan: ASCII, stable order, the same for equal plans."""
    return json.dumps(plan_document(plan), indent=1, allow_nan=False) + "\n"


def carried_json(plan: Plan) -> str:
    """The text of a plan as a job carries it: one line for each of its parts."""
    return _by_parts(plan_document(plan))


def _by_parts(document: dict[str, Any]) -> str:
    parts = (f'"{name}": {json.dumps(part, allow_nan=False)}' for name, part in document.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_plan(plan: Plan, path: Path | str) -> None:
    """Write the whole plan or nothing."""
    advice = "choose another place with --save"
    write_text_atomically(Path(path), plan_json(plan), advice=advice)


def read_plan(path: Path | str) -> Plan:
    """The plan in a file. Raises SpecError in one line when it is not a sound one."""
    text = read_text(Path(path), limit_bytes=LIMIT_BYTES, what="plan")
    return plan_from_json(text, where=path_text(path))


def carried_like(plan: Plan, path: Path | str) -> str:
    """The text by which a job of the fsdpplan that wrote the plan in a file carries `plan`: fields
    that have come since are left out, so that equal plans keep their digest."""
    text = read_text(Path(path), limit_bytes=LIMIT_BYTES, what="plan")
    written = parse_json_object(text, where=path_text(path))
    return _by_parts(_known(json.loads(plan_json(plan)), written))


def _known(value: Any, written: Any) -> Any:
    if isinstance(value, dict) and isinstance(written, dict):
        return {
            key: _known(value[key], written[key]) if key in value else written[key]
            for key in written
            if key in value
        }
    if isinstance(value, list) and isinstance(written, list):
        return [_known(one, other) for one, other in zip(value, written, strict=False)]
    return value


def plan_from_json(text: str, *, where: str) -> Plan:
    """The plan in `text`; `where` names it in messages.

    Types, unknown and missing keys, the limits of every value, and the agreement of all numbers
    that follow from others are checked.
    """
    if len(text) > LIMIT_BYTES:
        raise SpecError(
            f"{where} is larger than {LIMIT_BYTES // 2**20} MiB: not a plan; name another file"
        )
    values = parse_json_object(text, where=where)
    if values.get("schema_version") != SCHEMA_VERSION:
        raise SpecError(
            f"{where}: schema_version is {short(values.get('schema_version'))}, and this fsdpplan "
            f"reads {SCHEMA_VERSION}; {_AGAIN}"
        )
    try:
        _refuse_extremes(values, path="")
        values = upgraded(values)
        plan = _build(_without_totals(values))
        check_plan(plan)
        derived = json.loads(plan_json(plan))
        # what is known of torch grows: another fsdpplan may have thought another release needed
        del derived["torch_needed"]
        _refuse_differences(values, derived, path="")
    except SpecError as error:
        raise SpecError(f"{where}: {error}; {_AGAIN}") from error
    return plan


def check_plan(plan: Plan) -> None:
    """Raise SpecError naming the field when numbers that follow from others do not."""
    _check_estimate(plan.estimate, plan, path="estimate")
    for index, ranked in enumerate(plan.alternatives):
        path = f"alternatives.{index}"
        if ranked.rank != index + 1:
            raise SpecError(f"{path}.rank is {ranked.rank}, but it stands at place {index + 1}")
        if ranked.layout.world != plan.cluster.gpus:
            raise SpecError(
                f"{path}.layout has {ranked.layout.world} ranks, the cluster "
                f"{plan.cluster.gpus} GPUs"
            )
        _check_estimate(ranked.estimate, plan, path=f"{path}.estimate")
    pairs = [(ranked.layout, ranked.estimate) for ranked in plan.alternatives]
    if pairs and (plan.layout, plan.estimate) not in pairs:
        raise SpecError("layout and estimate are not together in any line of alternatives")


def _check_estimate(estimate: Estimate, plan: Plan, *, path: str) -> None:
    for field, value in _numbers(asdict(estimate), path):
        if value < 0:
            raise SpecError(f"{field} cannot be negative, but is {value}")
    step = estimate.step_seconds
    if not 0 < step.lower <= step.expected <= step.upper:
        raise SpecError(
            f"{path}.step_seconds must have 0 < lower <= expected <= upper, not "
            f"{step.lower}, {step.expected}, {step.upper}"
        )
    for name in ("mfu_fraction", "hfu_fraction"):
        if getattr(estimate, name) > 1:
            raise SpecError(f"{path}.{name} must be at most 1, not {getattr(estimate, name)}")
    tokens_per_second = plan.training.tokens_per_step / step.expected
    factor = 1.0 if estimate.learned is None else estimate.learned.factor
    for name, value, expected in (
        ("time", estimate.time.total_seconds, step.expected / factor),
        ("tokens_per_second", estimate.tokens_per_second, tokens_per_second),
        (
            "tokens_per_second_per_gpu",
            estimate.tokens_per_second_per_gpu,
            tokens_per_second / plan.cluster.gpus,
        ),
    ):
        if not math.isclose(value, expected, rel_tol=_AGREEMENT_FRACTION):
            raise SpecError(
                f"{path}.{name} comes to {value:.6g}, but step_seconds.expected, training and "
                f"cluster make it {expected:.6g}"
            )


def _build(values: dict[str, Any]) -> Plan:
    from fsdpplan.files.documents import validate_plan  # pydantic, only where a plan is read

    document = validate_plan(values)
    return Plan(
        model=document.model,
        cluster=document.cluster,
        training=document.training,
        layout=document.layout,
        estimate=document.estimate,
        alternatives=document.alternatives,
        sources=tuple(document.sources.items()),
        assumptions=document.assumptions,
        warnings=document.warnings,
        versions=tuple(document.versions.items()),
        rules=document.rules,
        failures=document.failures,
        terms=document.terms,
    )


def _without_totals(values: dict[str, Any]) -> dict[str, Any]:
    """A copy without the totals and counts that are derived."""
    copy: dict[str, Any] = json.loads(json.dumps(values))
    copy.pop("torch_needed", None)
    _drop(copy, "cluster", ("nodes",))
    lines = copy.get("alternatives")
    for holder in (copy, *(lines if isinstance(lines, list) else ())):
        estimate = holder.get("estimate") if isinstance(holder, dict) else None
        if isinstance(estimate, dict):
            _drop(estimate, "time", ("total_seconds",))
            _drop(estimate, "memory", _MEMORY_TOTALS)
    return copy


def _drop(holder: dict[str, Any], key: str, derived: tuple[str, ...]) -> None:
    table = holder.get(key)
    if isinstance(table, dict):
        for name in derived:
            table.pop(name, None)


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    """All numbers in a document with their paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _refuse_extremes(values: dict[str, Any], *, path: str) -> None:
    """Numbers that no field can hold: they would break the checks themselves."""
    for field, value in _numbers(values, path):
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise SpecError(f"{field} is beyond 2**63")
        if not math.isfinite(value):
            raise SpecError(f"{field} is beyond the range of a number")


def _refuse_differences(written: Any, derived: Any, *, path: str) -> None:
    """Raise at the first place where the document is not what the plan in it would write."""
    if isinstance(derived, dict) and isinstance(written, dict):
        for key, value in derived.items():
            here = f"{path}.{key}" if path else key
            if key not in written:
                raise SpecError(f"{here} is missing")
            _refuse_differences(written[key], value, path=here)
    elif isinstance(derived, list) and isinstance(written, list):
        for index, (one, other) in enumerate(zip(written, derived, strict=True)):
            _refuse_differences(one, other, path=f"{path}.{index}")
    elif written != derived:
        raise SpecError(f"{path} is {short(written)}, but the rest makes it {short(derived)}")
