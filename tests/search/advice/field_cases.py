"""The situations of `tests/golden/field_rules.toml` as cases."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.model.shape import infer_model
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice.field_rules import broken_rules
from fsdpplan.search.defaults import named_layout
from fsdpplan.search.pins import Pins, default_global_batch
from fsdpplan.spec.plan import BrokenRule, Case, Estimate
from fsdpplan.spec.training import Training

TABLE: Mapping[str, Any] = tomllib.loads(
    (Path(__file__).parents[2] / "golden" / "field_rules.toml").read_text(encoding="utf-8")
)
SITUATIONS: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in TABLE["situations"]}


@cache
def situation(name: str) -> tuple[Case, Estimate, tuple[BrokenRule, ...]]:
    """A row as it is priced, and what it breaks."""
    case = case_of(SITUATIONS[name])
    priced = estimate(case)
    return case, priced, broken_rules(case, priced)


def case_of(row: Mapping[str, Any]) -> Case:
    """The case of a row, with the defaults of the command line."""
    model = infer_model(int(row["params"])) if "params" in row else load_model(row["model"])
    links = row.get("inter_bandwidth")
    cluster = load_cluster(
        row["hardware"], gpus=row["gpus"], inter_bandwidth_bytes_per_second=links
    ).cluster
    seq_len = row.get("seq_len", 4096)
    batch = row.get("global_batch") or default_global_batch(seq_len=seq_len, gpus=row["gpus"])
    training = Training(seq_len=seq_len, global_batch=batch, **row.get("training", {}))
    pins = Pins(**row["layout"])
    found = named_layout(pins, cluster=cluster, training=training, model=model)
    return Case(model=model, cluster=cluster, training=training, layout=found.layout)
