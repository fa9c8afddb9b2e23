"""The text for Prometheus, read by Prometheus's own parser."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parsed

from fsdpplan.trainer.watch.prometheus import HELP, Sample, exposition, write_exposition

NUMBERS = st.floats()
LABELS = st.dictionaries(st.sampled_from(("model", "plan", "axis")), st.text())


@given(values=st.dictionaries(st.sampled_from(sorted(HELP)), NUMBERS), labels=LABELS)
def test_every_value_and_label_arrives(values: dict[str, float], labels: dict[str, str]) -> None:
    # carriage returns are no line ends of the format, but of the parser's splitlines()
    labels = {name: "".join(text.split()) for name, text in labels.items()}
    text = exposition([Sample(name, value) for name, value in values.items()], labels)
    found = {one.name: one for family in parsed(text) for one in family.samples}
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].labels == labels
        assert found[name].value == value or (math.isnan(value) and math.isnan(found[name].value))


def test_a_label_may_have_quotes_backslashes_and_lines() -> None:
    text = exposition([Sample("training_step", 3.0)], {"model": 'a"b\\c\nd'})
    ((sample,),) = [family.samples for family in parsed(text)]
    assert sample.labels == {"model": 'a"b\\c\nd'}


def test_the_samples_of_a_metric_stand_together() -> None:
    name, other = "training_communication_seconds", "training_step"
    samples = [Sample(name, 1.0, {"axis": "tp"}), Sample(other, 1.0), Sample(name, 2.0)]
    families = list(parsed(exposition(samples, {})))
    assert [(family.name, len(family.samples)) for family in families] == [(name, 2), (other, 1)]


def test_the_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    for text in ("first\n", "second\n"):
        write_exposition(path, text)
    assert path.read_text() == "second\n"
    assert list(tmp_path.iterdir()) == [path]
