"""The XML of nvidia-smi, read with the standard library and without what makes XML dangerous.

Every document names a DTD (`<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">`), which is
never fetched; one with definitions of its own, or with an entity that they would have to define,
is refused.
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers.expat import ExpatError, ParserCreate

MAX_CHARACTERS = 8 * 2**20
MAX_DEPTH = 32


class _Refused(ValueError):
    """The document holds what nvidia-smi never writes."""


def read_xml(text: str) -> Element | None:
    """The root element, all tags in lower case; None where `text` is no such document."""
    if len(text) > MAX_CHARACTERS:
        return None
    builder, depth = TreeBuilder(), 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise _Refused
        builder.start(tag.lower(), attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag.lower())

    parser = ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = _refuse_definitions
    parser.EntityDeclHandler = _refuse
    parser.SkippedEntityHandler = _refuse
    try:
        parser.Parse(text, True)
    except (ExpatError, ValueError):
        return None
    return builder.close()


def _refuse_definitions(
    name: str, system: str | None, public: str | None, has_internal_subset: bool
) -> None:
    if has_internal_subset:
        raise _Refused


def _refuse(*_: object) -> None:
    raise _Refused
