"""Strings about pods become one value of a manifest, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings

from fsdpplan.emit.job import Job
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target, render
from fsdpplan.errors import SpecError
from tests.emit.plans import make_plan
from tests.safety.hostile import PIECES, WORDS
from tests.safety.reading import every_document

KINDS: tuple[Target, ...] = ("kubernetes", "pytorchjob", "jobset", "volcano")
PLAN = make_plan("cpu", nodes=2)
PLAN_JSON = '{"a": 1}'
"""Not the plan's, whose text takes long to read and is not the matter here."""
FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "image": lambda text: {"image": text},
    "namespace": lambda text: {"namespace": text},
    "queue": lambda text: {"queue": text},
    "volumes": lambda text: {"volumes": (f"claim:/{text}",)},
    "claim": lambda text: {"volumes": (f"c{text}:/data",)},
    "rdma": lambda text: {"rdma": (f"{text}=8",)},
    "topology": lambda text: {"topology": text, "queue": "q"},
    "secret": lambda text: {"secret_env": (f"A=secret:{text}",)},
    "memory": lambda text: {"memory": text},
    "service_account": lambda text: {"service_account": text},
    "priority_class": lambda text: {"priority_class": text},
    "pull_secret": lambda text: {"pull_secret": (text,)},
    "selector": lambda text: {"node_selector": (f"a={text}",)},
    "toleration": lambda text: {"toleration": (f"a={text}",)},
    "annotation": lambda text: {"annotation": (f"a.b/c={text}",)},
}
PLAIN = {"rdma": "a/b", "memory": "1Gi", "topology": "1", "volumes": "x", "selector": "x"}


@cache
def manifest(target: Target, field: str, text: str) -> list[Any]:
    """What a reader of YAML finds, each document in it."""
    pods = Pods(**{"image": "i", **FIELDS[field](text)})
    order = Order(plan=PLAN, plan_json=PLAN_JSON, job=Job(), version="1.2.3", pods=pods)
    return every_document(render(target, order))


def shape(found: Any, texts: set[str]) -> Any:
    """The document without its strings, and with each key of `texts` left out."""
    match found:
        case dict():
            return {"" if k in texts else k: shape(v, texts) for k, v in found.items()}
        case list():
            return [shape(each, texts) for each in found]
    return type(found)


def strings(found: Any) -> Iterator[Any]:
    """All keys and values."""
    match found:
        case dict():
            yield from found
            yield from (each for value in found.values() for each in strings(value))
        case list():
            yield from (each for value in found for each in strings(value))
        case _:
            yield str(found)


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=12, deadline=None)
@given(text=WORDS)
def test_a_string_stays_one_string_or_is_refused(field: str, text: str) -> None:
    require_one_string("jobset", field, text)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("field", FIELDS)
def test_each_piece(field: str) -> None:
    for piece in PIECES:
        require_one_string("jobset", field, f"a{piece}b")


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("field", FIELDS)
def test_every_kind_of_manifest(target: Target, field: str) -> None:
    for text in ("".join(PIECES), "a\nb", "a: b", "yes", "$(a)"):
        require_one_string(target, field, text)


def require_one_string(target: Target, field: str, text: str) -> None:
    """The manifest is that of a plain string but for this one, which stands there as it is."""
    plain = PLAIN.get(field, "x")
    try:
        found = manifest(target, field, text)
    except SpecError as refused:
        assert "\n" not in str(refused)  # noqa: PT017 - either outcome is right
        return
    said = manifest(target, field, plain)
    either = ways(text) | ways(plain)  # a manifest has keys of its own, such as `key`
    assert shape(found, either) == shape(said, either)
    assert ways(text) & {*strings(found)}


def ways(text: str) -> set[str]:
    """How a field of FIELDS may have it."""
    return {text, f"/{text}", f"c{text}"}
