"""DDP: the buckets are those that torch itself makes."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.traffic.replica import FIRST_BUCKET_BYTES, ddp_buckets_bytes
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.cost.clusters import golden
from tests.strategies import models


def buckets(model: Model, *, bucket_bytes: int = 25 * 2**20) -> tuple[int, ...]:
    """Buckets of a whole model."""
    return ddp_buckets_bytes(model=model, stage=whole_model(model), tp=1, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("row", golden("traffic")["all_reduces"], ids=lambda row: row["claim"])
def test_golden_counts(row: dict[str, object]) -> None:
    model = load_model(str(row["model"]))
    assert len(buckets(model, bucket_bytes=int(str(row["bucket_mib"])) * 2**20)) == row["count"]


@settings(max_examples=15, deadline=None)
@given(models(max_layers=6), st.sampled_from([2**18, 2**20, 25 * 2**20]))
def test_torch_assigns_the_same_buckets(model: Model, bucket_bytes: int) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from fsdpplan.trainer.model.decoder import Decoder, ModelConfig

    names = ModelConfig.__dataclass_fields__
    config = ModelConfig(**{key: value for key, value in asdict(model).items() if key in names})
    with torch.device("meta"):
        parameters = list(reversed(list(Decoder(config).parameters())))
    limits = [min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes]
    indices, _ = dist._compute_bucket_assignment_by_size(parameters, limits)
    expected = sorted(4 * sum(parameters[i].numel() for i in bucket) for bucket in indices)
    assert sorted(buckets(model, bucket_bytes=bucket_bytes)) == expected


def test_torch_makes_the_golden_buckets_of_gpt2_large() -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from fsdpplan.trainer.model.decoder import Decoder, ModelConfig

    model = load_model("gpt2-large")
    names = ModelConfig.__dataclass_fields__
    config = ModelConfig(**{key: value for key, value in asdict(model).items() if key in names})
    with torch.device("meta"):
        parameters = list(reversed(list(Decoder(config).parameters())))
    indices, _ = dist._compute_bucket_assignment_by_size(parameters, [2**20, 25 * 2**20])
    sizes = [4 * sum(parameters[i].numel() for i in bucket) for bucket in indices]
    assert tuple(sizes) == buckets(model)


@given(models(), st.integers(1, 2**28))
def test_every_gradient_is_reduced_once(model: Model, bucket_bytes: int) -> None:
    assert sum(buckets(model, bucket_bytes=bucket_bytes)) == 4 * parameter_count(model)


@given(models(max_layers=8), st.integers(2**20, 2**26))
def test_larger_buckets_are_never_more(model: Model, bucket_bytes: int) -> None:
    more = len(buckets(model, bucket_bytes=bucket_bytes))
    assert len(buckets(model, bucket_bytes=2 * bucket_bytes)) <= more


def test_the_last_stage_has_no_embedding_to_reduce() -> None:
    model = load_model("llama-3.1-8b")
    last = replace(whole_model(model), has_embedding=False)
    sizes = ddp_buckets_bytes(model=model, stage=last, tp=1, bucket_bytes=25 * 2**20)
    assert sum(sizes) == sum(buckets(model)) - 4 * model.vocab * model.hidden
