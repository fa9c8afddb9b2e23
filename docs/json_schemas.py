"""JSON Schemas of what fsdpplan writes and reads, from the dataclasses that hold it: their fields,
types and docstrings.

`docs/reference/schemas/` has one file for saved plans, one for what commands print with `--json`,
and one for profiles and cluster files (`docs/profile_schema.py`). What is printed may gain fields,
so unknown ones are allowed there; what is read is as strict as the reader.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

DRAFT = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS = Path(__file__).resolve().parent / "reference" / "schemas"
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
PLAIN = {
    str: TEXT,
    float: NUMBER,
    int: WHOLE,
    bool: FLAG,
    type(None): {"type": "null"},
    Any: {},
    object: {},
}
TEXTS: Schema = {"type": "array", "items": TEXT}


SINCE = {"Device": ("error",), "DeviceFit": ("attention_backward_ratio",)}
"""Fields without a default that plans of 0.1.0 lack: `files/plans.py` fills them in."""


def shape(kind: Any, defs: dict[str, Schema]) -> Schema:
    """The schema of values of the type `kind`; dataclasses go to `defs`, each once."""
    if kind in PLAIN:
        return dict(PLAIN[kind])
    if dataclasses.is_dataclass(kind):
        name = kind.__name__
        if name not in defs:
            defs[name] = {}  # it may hold itself
            defs[name] = dataclass_shape(kind, defs)
        return {"$ref": f"#/$defs/{name}"}
    parts = get_args(kind)
    match get_origin(kind):
        case origin if origin is Literal:
            return {"enum": list(parts)}
        case origin if origin in (Union, types.UnionType):
            return {"anyOf": [shape(part, defs) for part in parts]}
        case origin if origin is tuple and parts[1:] != (...,):
            items = [shape(part, defs) for part in parts]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
        case origin if origin in (tuple, list):
            return {"type": "array", "items": shape(parts[0], defs)}
        case origin if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": shape(parts[1], defs)}
    raise TypeError(f"no schema is known for {kind}")


def dataclass_shape(kind: Any, defs: dict[str, Schema]) -> Schema:
    """An object with the fields of a dataclass. Those with a default may be left out: plans of
    before have them not."""
    hints = get_type_hints(kind)
    told = field_words(kind)
    properties = {}
    for field in dataclasses.fields(kind):
        words = {"description": told[field.name]} if told.get(field.name) else {}
        properties[field.name] = {**words, **shape(hints[field.name], defs)}
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name not in SINCE.get(kind.__name__, ())
    ]
    summary = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return {"type": "object", "description": summary, "properties": properties, "required": needed}


@cache
def field_words(kind: Any) -> dict[str, str]:
    """What stands under each field of a dataclass."""
    from docs.generate import documented_fields

    module = kind.__module__.removeprefix("fsdpplan.").replace(".", "/")
    rows = documented_fields(module, kind.__name__, [])
    return {name: " ".join(told.split()) for name, _, told in rows}


def table(properties: dict[str, Any], *, may_lack: tuple[str, ...] = ()) -> Schema:
    """An object that has `properties`, but for `may_lack`."""
    needed = [name for name in properties if name not in may_lack]
    return {"type": "object", "properties": properties, "required": needed}


def rows(item: Schema) -> Schema:
    """A list of `item`."""
    return {"type": "array", "items": item}


def maybe(schema: Schema) -> Schema:
    """`schema`, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def values(item: Schema) -> Schema:
    """An object whose keys are names, not fields."""
    return {"type": "object", "additionalProperties": item}


def nouns() -> dict[str, Schema]:
    """The definitions that documents share: the nouns, with what is derived beside their fields."""
    from fsdpplan.spec.cluster import Cluster
    from fsdpplan.spec.layout import Layout
    from fsdpplan.spec.model import Model
    from fsdpplan.spec.plan import BrokenRule, Estimate, Failures, RankedLayout
    from fsdpplan.spec.training import Training

    defs: dict[str, Schema] = {}
    for kind in (Model, Cluster, Training, Layout, Estimate, RankedLayout, BrokenRule, Failures):
        shape(kind, defs)
    defs["Cluster"]["properties"]["nodes"] = {**WHOLE, "description": "Nodes of the job."}
    totals = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
    for total in totals:
        defs["MemoryBreakdown"]["properties"][total] = dict(WHOLE)
    defs["TimeBreakdown"]["properties"]["total_seconds"] = dict(NUMBER)
    defs["TorchNeeded"] = table({"oldest": TEXT, "because": TEXT})
    return defs


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def plan_schema() -> Schema:
    """A plan as `recommend --save` writes it, and as those before it did."""
    defs = nouns()
    properties = {
        "schema_version": {"const": 1},
        "model": ref("Model"),
        "cluster": ref("Cluster"),
        "training": ref("Training"),
        "layout": ref("Layout"),
        "torch_needed": ref("TorchNeeded"),
        "estimate": ref("Estimate"),
        "alternatives": rows(ref("RankedLayout")),
        "sources": values(TEXT),
        "assumptions": TEXTS,
        "warnings": TEXTS,
        "rules": rows(ref("BrokenRule")),
        "versions": values(TEXT),
        "failures": ref("Failures"),
    }
    since = ("torch_needed", "rules", "failures")
    return {
        **head("plan", "A saved plan of fsdpplan", "fsdpplan.json, as `recommend` saves it."),
        **table(properties, may_lack=since),
        "additionalProperties": False,
        "$defs": defs,
    }


def output_schema() -> Schema:
    """What each planning command prints with `--json`, under `$defs`."""
    from fsdpplan.search.advice.difference import Changed

    defs = nouns()
    shape(Changed, defs)
    nouns_asked = {"model": ref("Model"), "cluster": ref("Cluster"), "training": ref("Training")}
    question = {"schema_version": {"const": 1}, **nouns_asked}
    said = {"assumptions": TEXTS, "warnings": TEXTS}
    told = {"sources": values(TEXT), **said}
    whole = {**told, "rules": rows(ref("BrokenRule"))}
    seconds = {"seconds_to_train": maybe(NUMBER), "gpu_seconds_to_train": maybe(NUMBER)}
    priced = {"layout": ref("Layout"), "estimate": ref("Estimate"), **seconds}
    unpriced = {"layout": maybe(ref("Layout")), "estimate": maybe(ref("Estimate"))}
    term = table({"name": TEXT, "before": NUMBER, "after": NUMBER, "change": NUMBER})
    difference = {
        "time_seconds": rows(term),
        "memory_bytes": rows(term),
        "ratio": NUMBER,
        "error_fraction": NUMBER,
        "faster_chance": NUMBER,
        "told_apart": FLAG,
        "first": TEXT,
    }
    compared = table({**priced, "difference": table(difference)})
    estimate = {**defs["Estimate"]["properties"]}
    one = {
        **question,
        "layout": ref("Layout"),
        "torch_needed": ref("TorchNeeded"),
        **estimate,
        "available_bytes": WHOLE,
        "fits": FLAG,
        **whole,
    }
    formula = table(
        {
            "name": TEXT,
            "value": NUMBER,
            "unit": TEXT,
            "formula": TEXT,
            "inputs": rows(table({"symbol": TEXT, "value": {}, "unit": TEXT, "words": TEXT})),
            "source": TEXT,
        }
    )
    differs = rows(table({"is_unknown": FLAG}))
    condition = table({"condition": TEXT, "holds": maybe(FLAG), "compared": rows(table({}))})
    model = {
        **defs["Model"]["properties"],
        "parameters": WHOLE,
        "active_parameters": WHOLE,
    }
    profile = table({"kind": TEXT, "name": TEXT, "description": TEXT, "sources": values(TEXT)})
    commands: dict[str, Schema] = {
        "recommend": table(
            {
                **question,
                "plans": rows(
                    table(
                        {
                            "rank": WHOLE,
                            "layout": ref("Layout"),
                            "torch_needed": ref("TorchNeeded"),
                            "estimate": ref("Estimate"),
                            "reason": TEXT,
                            "behind_fastest_fraction": NUMBER,
                            "difference_error_fraction": maybe(NUMBER),
                        }
                    )
                ),
                "fastest_rank": WHOLE,
                "not_told_apart": rows(WHOLE),
                "next_run": maybe(table({})),
                "search": table(
                    {
                        "candidates": WHOLE,
                        "feasible": WHOLE,
                        "priced": WHOLE,
                        "pruned": WHOLE,
                        "rejected": values(WHOLE),
                        "seconds": NUMBER,
                    }
                ),
                **whole,
            }
        ),
        "estimate": table(one),
        "explain": table(
            {
                **one,
                "step_terms": rows(formula),
                "memory_terms": rows(formula),
                "runners_up": rows(table({"rank": WHOLE, **difference})),
            }
        ),
        "explain_rules": table({"rules": rows(ref("BrokenRule"))}),
        "explain_nccl": table(
            {
                "gpudirect": maybe(FLAG),
                "lacks": maybe(
                    table({"what": TEXT, "needs": TEXTS, "remedy": TEXT, "source": TEXT})
                ),
                "variables": rows(
                    table(
                        {
                            "name": TEXT,
                            "value": TEXT,
                            "literal": FLAG,
                            "where": {"enum": ["node", "script"]},
                            "reason": TEXT,
                            "versions": TEXT,
                            "source": TEXT,
                        }
                    )
                ),
                "left_unset": rows(table({"names": TEXTS, "why": TEXT, "source": TEXT})),
            }
        ),
        "what_if": table(
            {
                **question,
                "changed": rows(ref("Changed")),
                "plan": table(priced),
                "same_layout": maybe(compared),
                "same_layout_problem": maybe(TEXT),
                "best": maybe(compared),
                "same_is_best": FLAG,
                **whole,
            }
        ),
        "compare": table(
            {
                "schema_version": {"const": 1},
                "compared": rows(
                    table({"name": TEXT, "file": maybe(TEXT), **nouns_asked, **unpriced, **whole})
                ),
                "differences": rows(
                    table(
                        {
                            "from": TEXT,
                            "to": TEXT,
                            "changed": rows(ref("Changed")),
                            **difference,
                        }
                    )
                ),
            }
        ),
        "sweep": table(
            {
                "schema_version": {"const": 1},
                "model": ref("Model"),
                "curves": rows(
                    table(
                        {
                            "hardware": TEXT,
                            "scaling": {"enum": ["strong", "weak"]},
                            "price_per_gpu_hour": maybe(NUMBER),
                            "knee": maybe(table({})),
                            "points": rows(
                                table(
                                    {
                                        "gpus": WHOLE,
                                        "global_batch": WHOLE,
                                        **unpriced,
                                        "efficiency_fraction": maybe(NUMBER),
                                        "problem": maybe(TEXT),
                                    }
                                )
                            ),
                        }
                    )
                ),
            }
        ),
        "replan": table(
            {
                **question,
                "saved": maybe(TEXT),
                "before": table(priced),
                "after": compared,
                "global_batch_kept": FLAG,
                "even_batch": maybe(table({"global_batch": WHOLE, **priced})),
                "checkpoint": table(
                    {
                        "saved_bytes": NUMBER,
                        "saved_bytes_known": FLAG,
                        "read_bytes": NUMBER,
                        "seconds": NUMBER,
                        "seconds_by": {"enum": ["network", "storage"]},
                        "step": maybe(WHOLE),
                        "steps": maybe(WHOLE),
                        "said": TEXTS,
                    }
                ),
                "command": TEXT,
                **told,
            }
        ),
        "check": table(
            {
                "schema_version": {"const": 1},
                "plan": TEXT,
                "predicted_again": FLAG,
                "conditions": rows(condition),
                "lock": maybe(TEXT),
                "lock_written": FLAG,
                "differences": maybe(differs),
            }
        ),
        "diff": table(
            {
                "schema_version": {"const": 1},
                "plans": TEXTS,
                "same": FLAG,
                "differences": differs,
                "terms": table(difference),
            }
        ),
        "emit_launch": table(
            {
                "script": TEXT,
                "target": TEXT,
                "folder": maybe(TEXT),
                "plan_sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                "job_name": TEXT,
                "nodes": WHOLE,
                "ranks": WHOLE,
                "checkpoint_every": maybe(WHOLE),
                "checkpoint_every_reason": maybe(TEXT),
            }
        ),
        "validate": table(
            {
                "rows": rows(
                    table(
                        {
                            "row": WHOLE,
                            "source_id": TEXT,
                            "status": {"enum": ["predicted", "skipped"]},
                            "reason": maybe(TEXT),
                            "measured_step_seconds": maybe(NUMBER),
                            "predicted_step_seconds": maybe(ref("Interval")),
                            "measured_peak_memory_bytes": maybe(WHOLE),
                            "memory_kind": maybe(TEXT),
                            "predicted_peak_memory_bytes": maybe(WHOLE),
                            "predicted_fits": maybe(FLAG),
                            "layout": maybe(ref("Layout")),
                            "assumptions": TEXTS,
                        }
                    )
                ),
                "sources": rows(
                    table(
                        {
                            "source_id": TEXT,
                            "rows": WHOLE,
                            "predicted": WHOLE,
                            "median_abs_error_fraction": maybe(NUMBER),
                            "mean_abs_error_fraction": maybe(NUMBER),
                            "bias_fraction": maybe(NUMBER),
                            "coverage_fraction": maybe(NUMBER),
                        }
                    )
                ),
            }
        ),
        "models": table({"models": rows(table(model))}),
        "profiles": {"anyOf": [profile, table({"profiles": rows(profile)})]},
        "learn": table(
            {
                "ledger": TEXT,
                "runs": WHOLE,
                "added": WHOLE,
                "known_before": WHOLE,
                "stacks": rows(
                    table({"software": TEXT, "precision": TEXT, "device": TEXT, "runs": WHOLE})
                ),
                "refused": rows(table({"where": TEXT, "why": TEXT})),
            }
        ),
        "ledger": table(
            {
                "ledger": TEXT,
                "clusters": rows(table({})),
                "runs": rows(table({})),
                "unread_rows": WHOLE,
            }
        ),
        "error": table(
            {
                "error": table(
                    {"kind": TEXT, "message": TEXT, "exit_code": {"enum": [2, 3, 4, 5, 6]}}
                )
            }
        ),
    }
    words = (
        "What fsdpplan prints with --json: under $defs an entry for each command, such as "
        "#/$defs/recommend. Fields are added, never renamed: ignore those that are not here."
    )
    return {
        **head("output", "What fsdpplan prints with --json", words),
        "anyOf": [ref(name) for name in commands],
        "$defs": {**commands, **defs},
    }


def head(name: str, title: str, words: str) -> Schema:
    """How a schema begins."""
    return {
        "$schema": DRAFT,
        "$id": f"urn:fsdpplan:{name}:1",
        "title": title,
        "description": words,
    }


def schema_texts() -> dict[Path, str]:
    """Each file of schemas and what it holds."""
    from docs.profile_schema import profile_schema

    found = {"plan": plan_schema(), "output": output_schema(), "profile": profile_schema()}
    return {
        SCHEMAS / f"{name}.schema.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for name, schema in found.items()
    }
