"""Packing: what a sequence of several documents is made into."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdpplan.trainer import train
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.step import model_inputs
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.text.packing import IGNORED, counted_fraction, divide_gradients, joined, pack
from tests.trainer import plans

CPU = torch.device("cpu")


def test_positions_begin_anew_and_no_target_is_of_another_document() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    starts = torch.tensor([[False, False, True, True, False, False]])
    packed = pack(tokens, starts)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.targets.tolist() == [[6, IGNORED, IGNORED, 9, 10]]
    assert packed.positions is not None
    assert packed.documents is not None
    assert packed.positions.tolist() == [[0, 1, 0, 0, 1]]
    assert packed.documents.tolist() == [[2, 3, 5, 5]]


@given(starts=st.lists(st.booleans(), min_size=2, max_size=40))
def test_a_document_is_a_stretch_whose_positions_count_up(starts: list[bool]) -> None:
    tokens = torch.arange(len(starts))[None]
    packed = pack(tokens, torch.tensor([starts]))
    assert packed.positions is not None
    assert packed.documents is not None
    assert packed.longest is not None
    positions, ends = packed.positions[0].tolist(), packed.documents[0].tolist()
    assert ends == sorted(ends)
    assert ends[-1] == len(positions)
    assert max(positions) < packed.longest.shape[1] <= len(positions)
    for at in range(1, len(positions)):
        if at not in ends:
            assert positions[at] == positions[at - 1] + 1
            assert packed.targets[0, at - 1] == tokens[0, at]
        else:
            assert positions[at] == 0
            assert packed.targets[0, at - 1] == IGNORED


def test_batches_of_other_numbers_of_documents_are_joined() -> None:
    few, many = torch.zeros(2, 13, dtype=torch.bool), torch.zeros(1, 13, dtype=torch.bool)
    many[0, 3:9] = True
    batches = [pack(torch.zeros(len(s), 13, dtype=torch.int64), s) for s in (few, many)]
    whole = joined(batches)
    assert whole["documents"].tolist() == [[12] * 8, [12] * 8, [3, 4, 5, 6, 7, 8, 12, 12]]
    assert whole["longest"].shape == (3, 12, 0)
    assert whole["tokens"].shape == (3, 12)


def test_what_is_not_packed_counts_whole() -> None:
    plan = parse_plan(plans.plan_text())
    sequences = open_sequences(plan, None, seed=0)
    batches = micro_batches(sequences, plan, first=0, rank=0, device=CPU)
    assert counted_fraction(batches) is None


def test_gradients_are_divided_in_place() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    divide_gradients(model, torch.tensor(0.5))
    assert [parameter.grad for parameter in model.parameters()] == before
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("layout", [{"dp_shard": 4}, {"cp": 2, "dp_shard": 2}, {"pp": 2}])
def test_every_layout_gets_the_same_documents(layout: dict[str, int]) -> None:
    if "pp" in layout:
        layout = layout | {"schedule": "1f1b", "num_microbatches": 2}  # type: ignore[dict-item]
    plan = parse_plan(plans.plan_text(**layout))
    one = parse_plan(plans.plan_text())
    sequences = open_sequences(plan, None, seed=3)
    (whole,) = micro_batches(sequences, one, first=8, rank=0, device=CPU, packs=True)
    assert (whole.targets == IGNORED).any()
    expected = sorted(
        zip(whole.tokens.flatten().tolist(), whole.targets.flatten().tolist(), strict=True)
    )
    found = []
    ranks = plan.layout.world // plan.layout.pp
    for rank in range(ranks):
        for batch in micro_batches(sequences, plan, first=8, rank=rank, device=CPU, packs=True):
            assert batch.documents is not None
            assert batch.positions is not None
            assert (batch.documents[:, -1] == plan.training.seq_len).all()
            assert batch.positions.shape == batch.tokens.shape
            found += zip(
                batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True
            )
    assert sorted(found) == expected


@pytest.mark.parametrize(("in_plan", "asked"), [(False, False), (False, True), (True, False)])
def test_documents_are_packed_where_the_plan_or_the_command_says_so(
    in_plan: bool, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(train, "train", lambda plan, options, *_: found.append((plan, options)))
    monkeypatch.setattr(train, "require_world", lambda _: None)
    monkeypatch.setattr(train.StopRequest, "listen", lambda _: None)
    text = plans.plan_text(training={"packed": in_plan})
    words = ("--plan", text, "--steps", "1", *(["--pack"] if asked else []))
    train.run_training(parse_options(words))
    ((plan, options),) = found
    assert plan.training.packed == options.pack == (in_plan or asked)


def test_packed_loss_is_that_of_documents_one_by_one() -> None:
    plan = parse_plan(plans.plan_text())
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    sequences = open_sequences(plan, None, seed=0)
    (batch,) = micro_batches(sequences, plan, first=0, rank=0, device=CPU, packs=True)
    counted = counted_targets = 0.0
    for row in range(plan.layout.micro_batch):
        tokens, starts = sequences(row), sequences.starts(row).nonzero().flatten().tolist()
        for begin, end in pairwise(sorted({0, *starts, len(tokens)})):
            if end - begin > 1:
                document = tokens[begin:end][None]
                loss = next_token_loss(decoder(document[:, :-1]), document[:, 1:])
                counted += loss.item() * (end - begin - 1)
                counted_targets += end - begin - 1
    whole = next_token_loss(decoder(batch.tokens, **model_inputs(batch)), batch.targets)
    targets = (batch.targets != IGNORED).sum().item()
    assert targets == counted_targets
    packed = whole.item() * batch.targets.numel() / targets
    assert packed == pytest.approx(counted / counted_targets, abs=1e-5)
