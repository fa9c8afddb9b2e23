"""What a command printed obeys its published JSON Schema: `obeys("verify", document)`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from docs.json_schemas import SCHEMAS

try:
    import jsonschema
except ImportError:  # as where another release of torch is tried
    jsonschema = None


def obeys(entry: str, document: Any) -> None:
    """It has the shape of its schema, and no field that is not told there."""
    output = schema("output")
    if jsonschema is not None:
        assert not problems(document, {**output["$defs"][entry], "$defs": output["$defs"]}), entry
    assert not list(unsaid(document, output["$defs"][entry])), entry


@cache
def schema(name: str) -> Any:
    """A published file."""
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))


def problems(found: Any, of: Any) -> list[str]:
    """Where `found` does not obey the schema."""
    faults = jsonschema.Draft202012Validator(of).iter_errors(found)
    return [f"{fault.json_path}: {fault.message[:200]}" for fault in faults]


def unsaid(value: Any, of: Any, name: str = "output", where: str = "$") -> Iterator[str]:
    """Fields that `value` has and the schema has not: nobody can look them up."""
    while "$ref" in of:
        of = schema(name)["$defs"][of["$ref"].rpartition("/")[2]]
    if "anyOf" in of:
        said = [list(unsaid(value, arm, name, where)) for arm in of["anyOf"]]
        yield from min(said, key=len)
        return
    if not of.keys() - {"description"}:
        return  # anything
    if isinstance(value, dict):
        fields, others = of.get("properties", {}), of.get("additionalProperties")
        for key, item in value.items():
            if key not in fields and others is None:
                yield f"{where}.{key}"
            else:
                yield from unsaid(item, fields.get(key, others), name, f"{where}.{key}")
    if isinstance(value, list):
        if not {"items", "prefixItems"} & of.keys():
            yield where
        for number, item in enumerate(value):
            parts = of.get("prefixItems", ())
            part = parts[number] if number < len(parts) else of.get("items") or {}
            yield from unsaid(item, part, name, f"{where}[]")
