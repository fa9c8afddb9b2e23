"""Machines as JSON: how a node tells another one what it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fsdpplan.files.table import parse_json_object
from fsdpplan.spec.machine import Machine

SCHEMA_VERSION = 1


def machine_document(machine: Machine) -> dict[str, Any]:
    """The machine as a JSON object."""
    return {"schema_version": SCHEMA_VERSION, "machine": asdict(machine)}


def machine_from_document(values: dict[str, Any]) -> Machine:
    """The machine in `values`. Raises SpecError naming the first field that is wrong."""
    from fsdpplan.files.documents import validate_machine  # pydantic, only where one is read

    return validate_machine(values).machine


def machine_from_json(text: str, *, where: str) -> Machine:
    """The machine in `text`, which came from `where`. Raises SpecError where it is none."""
    return machine_from_document(parse_json_object(text, where=where))
