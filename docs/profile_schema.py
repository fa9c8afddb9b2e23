"""The JSON Schema of profiles and cluster files, from the fields that their readers know.

An editor that knows TOML checks a file by it (`#:schema` in the first line, or a setting of taplo
or Even Better TOML). `fsdpplan profiles FILE --check` says more: what a relative lends, which
sources are named, whether numbers are plausible.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

from docs.json_schemas import TEXT, TEXTS, Schema, field_words, head, shape

UNTYPED = {"type": "object"}


def sourced(value: Schema, words: str = "") -> Schema:
    """`{ value = ..., source = "..." }`."""
    told = {"description": words} if words else {}
    return {
        **told,
        "type": "object",
        "properties": {"value": value, "source": TEXT},
        "required": ["value", "source"],
        "additionalProperties": False,
    }


def closed(properties: dict[str, Any], required: tuple[str, ...], **more: Any) -> Schema:
    """A table with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def numbers_of(kind: Any, *, besides: frozenset[str] = frozenset()) -> dict[str, Schema]:
    """The fields of a dataclass, each with its source."""
    hints, told = get_type_hints(kind), field_words(kind)
    return {
        field.name: sourced(_value(hints[field.name]), told.get(field.name, ""))
        for field in dataclasses.fields(kind)
        if field.name not in besides
    }


def _value(kind: Any) -> Schema:
    """What may stand for a field in TOML, which has no null."""
    found = shape(kind, {})
    arms = [arm for arm in found.get("anyOf", [found]) if arm != {"type": "null"}]
    return arms[0] if len(arms) == 1 else {"anyOf": arms}


def profile_schema() -> Schema:
    """A device, a node type, a cluster, or what all devices share."""
    from fsdpplan.files.profiles.devices import NO_NUMBERS, POWER, TABLE_WORDS, WORDS
    from fsdpplan.files.profiles.levels import Joins
    from fsdpplan.files.profiles.nodes import HOST_MEMORY, HOST_RATE
    from fsdpplan.spec.cluster import (
        Device,
        DeviceFit,
        DeviceKind,
        Evidence,
        Level,
        LowLatency,
        StepError,
        Vendor,
    )
    from fsdpplan.spec.nodes import Network

    number: Schema = {"type": "number"}
    count: Schema = {"type": "integer", "minimum": 1}
    source = closed(
        {name: TEXT for name in ("what", "url", "how", "from", "measured_on", "date")}, ("what",)
    )
    header = {
        "schema_version": {"const": 1},
        "name": TEXT,
        "description": TEXT,
        "sources": {"type": "object", "additionalProperties": {"$ref": "#/$defs/source"}},
    }
    must = tuple(header)
    error = closed(numbers_of(StepError), ())
    device_keys: dict[str, Schema] = {
        "torch_device": {"enum": list(get_args(DeviceKind))},
        "vendor": {"enum": list(get_args(Vendor))},
        "nvml_names": TEXTS,
        **{word: TEXT for word in (*WORDS, *TABLE_WORDS)},
        "evidence": {"enum": list(get_args(Evidence))},
        "fitted_as": {**TEXT, "description": "The device profile that lends what is not given."},
        "numbers": closed(numbers_of(Device, besides=NO_NUMBERS), ()),
        "fit": closed(numbers_of(DeviceFit), ()),
        "error": error,
        POWER: sourced(number, "Power limit as a share of the relative's."),
    }
    device_must = ("torch_device", "nvml_names", "evidence", "numbers")
    own_level = frozenset({"name", "domain_gpus", "whole_gpus", "gpudirect", "low_latency"})
    level = closed(
        {
            "name": TEXT,
            "joins": {"enum": list(get_args(Joins))},
            "fitted_as": {**TEXT, "description": "NODE:LEVEL that lends what is not given."},
            "gpudirect": sourced({"type": "boolean"}, field_words(Level)["gpudirect"]),
            "low_latency": sourced({"enum": list(get_args(LowLatency))}),
            **{name: sourced(count) for name in ("domain_gpus", "domain_nodes", "usable_gpus")},
            "oversubscription": sourced(number, "Ports of the level below over those of this one."),
            **numbers_of(Level, besides=own_level),
        },
        ("name", "joins", "gpudirect"),
    )
    weak = closed(
        {"nodes": TEXTS, "level": TEXT, "remaining_fraction": sourced(number), "text": TEXT},
        ("nodes", "remaining_fraction", "text"),
    )
    network = numbers_of(Network, besides=frozenset({"evidence"}))
    links: dict[str, Schema] = {
        "levels": {"type": "array", "items": {"$ref": "#/$defs/level"}},
        "network": closed(network, ("transport",)),
        "weak": {"type": "array", "items": weak},
    }
    own_device = closed({"name": TEXT, "description": TEXT, **device_keys}, ("name", *device_must))
    node_type = closed(
        {"node": TEXT, "num_nodes": sourced(count), "names": TEXTS}, ("node", "num_nodes")
    )
    kinds = {
        "device": closed(
            {**header, "kind": {"const": "device"}, **device_keys}, (*must, "kind", *device_must)
        ),
        "node": closed(
            {
                **header,
                "kind": {"const": "node"},
                "device": {"anyOf": [TEXT, own_device]},
                "gpus_per_node": {"anyOf": [{"const": "any"}, sourced(count)]},
                HOST_MEMORY: sourced(count),
                HOST_RATE: sourced(number),
                **links,
            },
            (*must, "kind", "device", "gpus_per_node", "levels"),
        ),
        "cluster": closed(
            {
                **header,
                "kind": {"const": "cluster"},
                "node": TEXT,
                "gpus": sourced(count),
                "node_types": {"type": "array", "items": node_type, "minItems": 1},
                **links,
            },
            (*must, "kind"),
            oneOf=[{"required": ["node", "gpus"]}, {"required": ["node_types"]}],
        ),
        "physics": closed(
            {
                **header,
                "kind": {"const": "physics"},
                "fit": closed(numbers_of(DeviceFit), ()),
                "error": closed(dict.fromkeys(get_args(Evidence), error), get_args(Evidence)),
            },
            (*must, "kind", "fit", "error"),
        ),
    }
    # by its kind first, so that a fault is said of that kind alone
    chosen = [
        {"if": {"properties": {"kind": {"const": kind}}}, "then": {"$ref": f"#/$defs/{kind}"}}
        for kind in kinds
    ]
    return {
        **head("profile", "A profile of fsdpplan", "A device, a node type or a cluster, in TOML."),
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(kinds)}},
        "allOf": chosen,
        "$defs": {"source": source, "level": level, **kinds},
    }
