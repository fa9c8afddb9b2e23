"""JSON Schemas of what fsdpplan writes and reads, from the types that hold it: the fields, types
and docstrings of dataclasses and of TypedDicts.

`docs/reference/schemas/` has one file for saved plans, one for what commands print with `--json`,
and one for profiles and cluster files (`docs/profile_schema.py`). What is printed may gain fields,
so unknown ones are allowed there; what is read is as strict as the reader.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

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


def shape(kind: Any, defs: dict[str, Schema]) -> Schema:
    """The schema of values of the type `kind`; dataclasses and TypedDicts go to `defs`, each
    once."""
    if kind in PLAIN:
        return dict(PLAIN[kind])
    if has_fields(kind):
        name = OTHER_NAMES.get(f"{kind.__module__}.{kind.__name__}", kind.__name__)
        if _NAMED.setdefault(name, kind) is not kind:
            raise TypeError(f"{_NAMED[name]} and {kind} would be one definition: see OTHER_NAMES")
        if name not in defs:
            defs[name] = {}  # it may hold itself
            defs[name] = fields_shape(kind, defs)
        return ref(name)
    parts = get_args(kind)
    match get_origin(kind):
        case origin if origin is Annotated:  # `Annotated[dict[str, Any], Layout]`: its asdict()
            said = kind.__metadata__
            return shape(said[0], defs) if len(said) == 1 else merged(said, defs)
        case origin if origin is NotRequired:
            return shape(parts[0], defs)
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


_NAMED: dict[str, Any] = {}
"""Which type a definition is of."""


OTHER_NAMES = {"fsdpplan.files.table.Finding": "FindingInFile"}
"""Types whose definition is not called as they are: another one is."""


def has_fields(kind: Any) -> bool:
    """Whether it is a dataclass or a TypedDict."""
    return dataclasses.is_dataclass(kind) or is_typeddict(kind)


def fields_shape(kind: Any, defs: dict[str, Schema]) -> Schema:
    """An object with the fields of `kind`."""
    return (typed_shape if is_typeddict(kind) else dataclass_shape)(kind, defs)


def merged(kinds: tuple[Any, ...], defs: dict[str, Schema]) -> Schema:
    """An object with the fields of all `kinds`; of those of one name the last one's."""
    from fsdpplan.files.plans import EACH_MAY_BE_NULL

    found: Schema = {"type": "object", "properties": {}, "required": []}
    for kind in kinds:
        if kind == EACH_MAY_BE_NULL:
            old = found["properties"]
            found["properties"] = {name: maybe(field) for name, field in old.items()}
            continue
        one = fields_shape(kind, defs)
        found.setdefault("description", one["description"])
        found["properties"] |= one["properties"]
        found["required"] = [*dict.fromkeys([*found["required"], *one["required"]])]
    return found


def lineage(kind: Any) -> list[Any]:
    """A TypedDict and those that it is made from, which it does not know itself, itself last."""
    from docs.generate import parsed

    module = sys.modules[kind.__module__]
    classes = (node for node in parsed(source_of(kind)).body if isinstance(node, ast.ClassDef))
    own = next(node for node in classes if node.name == kind.__name__)
    bases = (getattr(module, base.id) for base in own.bases if isinstance(base, ast.Name))
    return [*(one for base in bases if is_typeddict(base) for one in lineage(base)), kind]


def typed_shape(kind: Any, defs: dict[str, Schema]) -> Schema:
    """An object with the keys of a TypedDict."""
    hints = get_type_hints(kind, include_extras=True)
    told = {name: text for one in lineage(kind) for name, text in field_words(one).items()}
    properties = {}
    for name, hint in hints.items():
        words = {"description": told[name]} if told.get(name) else {}
        properties[name] = {**words, **shape(hint, defs)}
    needed = [name for name, hint in hints.items() if get_origin(hint) is not NotRequired]
    summary = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return {
        "type": "object",
        "description": summary,
        "properties": properties,
        "required": needed if kind.__total__ else [],
    }


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
    ]
    summary = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return {"type": "object", "description": summary, "properties": properties, "required": needed}


def source_of(kind: Any) -> str:
    """The module of a type, as `docs.generate` names it: `spec/plan`."""
    module: str = kind.__module__
    return module.removeprefix("fsdpplan.").replace(".", "/")


@cache
def field_words(kind: Any) -> dict[str, str]:
    """What stands under each field of a dataclass."""
    from docs.generate import documented_fields

    rows = documented_fields(source_of(kind), kind.__name__, [])
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
    from fsdpplan.spec.plan import BrokenRule, Estimate, Failures, RankedLayout, Terms
    from fsdpplan.spec.training import Training

    defs: dict[str, Schema] = {}
    beside = (RankedLayout, BrokenRule, Failures, Terms)
    for kind in (Model, Cluster, Training, Layout, Estimate, *beside):
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
        "terms": ref("Terms"),
    }
    since = ("torch_needed", "rules", "failures", "terms")
    return {
        **head("plan", "A saved plan of fsdpplan", "fsdpplan.json, as `recommend` saves it."),
        **table(properties, may_lack=since),
        "additionalProperties": False,
        "$defs": defs,
    }


def output_schema() -> Schema:
    """What each command prints with `--json`, under `$defs`."""
    from docs.command_schemas import printed_schemas
    from fsdpplan.cli.views.check import DiffersJson
    from fsdpplan.cli.views.configuration import ConfigurationJson
    from fsdpplan.cli.views.difference import ComparedJson, DifferenceJson, PricedJson
    from fsdpplan.cli.views.failures import GoodputJson
    from fsdpplan.cli.views.goal import GoalJson
    from fsdpplan.emit.nccl.rules import Kind
    from fsdpplan.errors import ErrorJson
    from fsdpplan.search.advice.difference import Changed, Term
    from fsdpplan.search.question import NextRun
    from fsdpplan.search.scaling import Knee

    defs = nouns()
    nouns_asked = {"model": ref("Model"), "cluster": ref("Cluster"), "training": ref("Training")}
    question = {"schema_version": {"const": 1}, **nouns_asked}
    said = {"assumptions": TEXTS, "warnings": TEXTS}
    told = {"sources": values(TEXT), **said}
    whole = {**told, "rules": rows(ref("BrokenRule"))}
    priced = typed_shape(PricedJson, defs)["properties"]
    unpriced = {name: maybe(field) for name, field in priced.items()}
    may_fit = tuple(name for name in priced if name not in ("layout", "estimate"))
    compared = shape(ComparedJson, defs)
    difference = typed_shape(DifferenceJson, defs)["properties"]
    terms = rows(shape(Term, defs))
    estimate = {**defs["Estimate"]["properties"]}
    configuration = {"configuration": shape(ConfigurationJson, defs)}
    asked = {
        "goal": shape(GoalJson, defs),
        "goodput": shape(GoodputJson, defs),
        "left_out": TEXT,
    }
    if_asked = tuple(asked)
    one = {
        **question,
        "layout": ref("Layout"),
        "torch_needed": ref("TorchNeeded"),
        **estimate,
        "available_bytes": WHOLE,
        "fits": FLAG,
        **whole,
        **asked,
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
    changed = rows(shape(Changed, defs))
    differs = rows(shape(DiffersJson, defs))
    model = {
        **defs["Model"]["properties"],
        "parameters": WHOLE,
        "active_parameters": WHOLE,
    }
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
                "next_run": maybe(shape(NextRun, defs)),
                "near_miss": maybe(
                    table(
                        {
                            "layout": ref("Layout"),
                            "torch_needed": ref("TorchNeeded"),
                            "estimate": ref("Estimate"),
                            "faster_fraction": NUMBER,
                        }
                    )
                ),
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
                **asked,
            },
            may_lack=if_asked,
        ),
        "estimate": table({**one, **configuration}, may_lack=(*if_asked, *configuration)),
        "explain": table(
            {
                **one,
                "step_terms": rows(formula),
                "memory_terms": rows(formula),
                "runners_up": rows(
                    table({"rank": WHOLE, "lost": terms, "won": terms, **difference})
                ),
            },
            may_lack=if_asked,
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
                            "kind": {"enum": list(get_args(Kind))},
                            "reason": TEXT,
                            "versions": TEXT,
                            "source": TEXT,
                        }
                    )
                ),
                "scripts": rows(
                    table(
                        {
                            "path": TEXT,
                            "reason": TEXT,
                            "versions": TEXT,
                            "source": TEXT,
                            "required": FLAG,
                        }
                    )
                ),
                "left_unset": rows(table({"names": TEXTS, "why": TEXT, "source": TEXT})),
            }
        ),
        "what_if": table(
            {
                **question,
                "changed": changed,
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
                    table(
                        {
                            "name": TEXT,
                            "file": maybe(TEXT),
                            **nouns_asked,
                            **unpriced,
                            "problem": maybe(TEXT),
                            **whole,
                        },
                        may_lack=may_fit,
                    )
                ),
                "differences": rows(
                    table(
                        {
                            "from": TEXT,
                            "to": TEXT,
                            "changed": changed,
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
                            "knee": maybe(shape(Knee, defs)),
                            "points": rows(
                                table(
                                    {
                                        "gpus": WHOLE,
                                        "global_batch": WHOLE,
                                        "training": maybe(ref("Training")),
                                        **unpriced,
                                        "efficiency_fraction": maybe(NUMBER),
                                        "efficiency_error_fraction": maybe(NUMBER),
                                        "price_to_train": maybe(NUMBER),
                                        "over_first": maybe(shape(DifferenceJson, defs)),
                                        "problem": maybe(TEXT),
                                    },
                                    may_lack=may_fit,
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
                "signal_seconds": maybe(WHOLE),
                "signal_seconds_reason": maybe(TEXT),
            }
        ),
        "models": {
            "anyOf": [
                table({**model, "source": TEXT}),
                table({"models": rows(table(model))}),
            ]
        },
        **printed_schemas(defs),
        "error": table({"error": shape(ErrorJson, defs)}),
    }
    words = (
        "What fsdpplan prints with --json: under $defs an entry for each command, such as "
        "#/$defs/recommend. Fields are added, never renamed: ignore those that are not here."
    )
    used = {*nouns(), *named_in(list(commands.values()), defs)}
    return {
        **head("output", "What fsdpplan prints with --json", words),
        "anyOf": [ref(name) for name in commands],
        "$defs": {**commands, **{name: defs[name] for name in defs if name in used}},
    }


def named_in(schema: Any, defs: dict[str, Schema], found: set[str] | None = None) -> set[str]:
    """The definitions that a schema needs, and those that they need."""
    found = set() if found is None else found
    if isinstance(schema, dict):
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found.add(name)
            named_in(defs[name], defs, found)
    parts = schema.values() if isinstance(schema, dict) else schema
    for part in parts if isinstance(schema, dict | list) else ():
        named_in(part, defs, found)
    return found


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
