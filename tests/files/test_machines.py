"""Machines as JSON: read back exactly, and refused with the field where they are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.machines import machine_document, machine_from_document, machine_from_json
from fsdpplan.topology.conclude.machine import machine_of
from tests.topology.recorded import NAMES, recorded


def document(name: str = "dgx-h100") -> Any:
    return json.loads(json.dumps(machine_document(machine_of(recorded(name)))))


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_comes_back_as_it_was(name: str) -> None:
    machine = machine_of(recorded(name))
    text = json.dumps(machine_document(machine), allow_nan=False)
    assert machine_from_json(text, where="n1") == machine


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["schema_version"], 2, "schema_version must be 1"),
        (["machine", "extra"], 1, "unknown key machine.extra"),
        (["machine", "nics", 0, "port"], "1", "machine.nics.0.port must be a valid integer"),
        (["machine", "nics", 0, "state"], "on", "machine.nics.0.state must be"),
        (["machine", "kubernetes"], 0, "machine.kubernetes must be a valid boolean"),
        (["machine", "host", "name"], None, "machine.host.name must be a valid string"),
    ],
)
def test_a_wrong_field_is_named(place: list[Any], value: object, message: str) -> None:
    values = document()
    inner = values
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    with pytest.raises(SpecError, match=message):
        machine_from_document(values)


def test_a_missing_field_is_named() -> None:
    values = document()
    del values["machine"]["host"]["cores"]
    with pytest.raises(SpecError, match=r"machine\.host\.cores is missing"):
        machine_from_document(values)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema_version": NaN}', "[" * 100_000])
def test_what_is_no_object_is_refused_with_its_source(text: str) -> None:
    with pytest.raises(SpecError, match="the answer of n1"):
        machine_from_json(text, where="the answer of n1")
