"""Tensor parallelism: what it refuses, and what DDP is given of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.rules.legality import problems
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.local_parameters import LocalParameters, hand_over_gradients
from fsdpplan.trainer.parallel.support import parallel_problems, require_runnable
from fsdpplan.trainer.parallel.tensor_parallel import require_peer_access
from tests.cost.problems import SMALL
from tests.trainer import plans
from tests.trainer.parallel_layouts import MODELS, TP2


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ({}, TP2 | {"sequence_parallel": False}, "tp 2 without sequence_parallel"),
        ({"vocab": 60}, TP2 | {"tp": 4}, "tp 4 with key/value heads of 2"),
        ({"ffn_hidden": 97}, TP2, "tp 2 with feed-forward width of 97"),
        ({}, TP2 | {"async_tp": True}, "async_tp without compile"),
        ({}, {"sequence_parallel": True}, "sequence_parallel \\(it needs tensor parallelism"),
    ],
)
def test_what_cannot_be_split_is_refused_in_words(
    model: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    document = plans.plan_document(model=MODELS["llama"] | model, **layout)
    with pytest.raises(TrainerError, match=words):
        require_runnable(parse_plan(json.dumps(document)))


@pytest.mark.parametrize(
    ("profile", "gpus"),
    [
        ("pcie-8xrtx4090", 8),
        ("gcp-g2-standard-96", 16),
        ("dgx-h100", 16),
        ("gb200-nvl72", 8),
        ("cpu", 4),
    ],
)
def test_async_tp_without_peer_access_is_refused_in_the_words_of_the_search(
    profile: str, gpus: int
) -> None:
    model = replace(SMALL, heads=16, kv_heads=16)
    for tp in (2, 4, 8, 16):
        if gpus % tp:
            continue
        cluster = load_cluster(profile, gpus=gpus).cluster
        said: dict[str, Any] = {"tp": tp, "sequence_parallel": True, "loss_parallel": True}
        said |= {"async_tp": True, "compile": True, "dp_replicate": gpus // tp, "sharding": "ddp"}
        document = plans.plan_document(model=asdict(model), training={"seq_len": 64}, **said)
        document["cluster"] = json.loads(json.dumps(asdict(cluster)))
        plan = parse_plan(json.dumps(document))
        case = Case(
            model=model,
            cluster=cluster,
            training=Training(seq_len=64, global_batch=gpus // tp),
            layout=Layout(**said),
        )
        refused = [p.sentence for p in problems(case) if p.reason.startswith("async TP without")]
        assert [text for text in parallel_problems(plan) if "async_tp" in text] == refused
        joined = tp <= cluster.gpus_per_node or profile.startswith("gb200")
        assert (not refused) == (profile == "cpu" or (joined and cluster.levels[0].gpudirect))


def test_a_driver_that_maps_no_peers_is_said_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = {(2, 3): True, (2, 0): False, (2, 1): True}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: mapped[a, b])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)
    mesh = SimpleNamespace(mesh=torch.tensor([6, 7]), size=lambda: 2)
    require_peer_access(mesh)  # type: ignore[arg-type]
    mesh = SimpleNamespace(mesh=torch.tensor([2, 4, 6]), size=lambda: 3)
    with pytest.raises(TrainerError, match="GPUs 2 and 0 cannot map each other's"):
        require_peer_access(mesh)  # type: ignore[arg-type]


def test_local_parameters_call_the_model_and_hand_over_its_gradients() -> None:
    model = torch.nn.Linear(3, 2)
    wrapped = LocalParameters(model)
    x = torch.randn(4, 3)
    assert torch.equal(wrapped(x), model(x))
    wrapped(x).sum().backward()
    assert model.weight.grad is None
    hand_over_gradients([wrapped])
    assert model.weight.grad is not None
    assert all(local.grad is None for local in wrapped.parameters())
    with torch.no_grad():
        model.weight.zero_()
    assert not wrapped(x).sub(model.bias).any()
