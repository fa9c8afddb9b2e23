"""What of a run goes into a checkpoint, and under which names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpplan.trainer.checkpoint.state import (
    Staging,
    equalise_copies,
    fill_optimizer,
    flat,
    named_tensors,
    tree,
)
from fsdpplan.trainer.errors import TrainerError


class Tied(nn.Module):
    """Two names for one table, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(4), persistent=False)


class Ends(nn.Module):
    """The two copies of a table at the ends of a pipeline, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)


def names(model: nn.Module, copies: dict[str, str] | None = None) -> list[str]:
    """Dotted names of all that would be saved after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    fill_optimizer(optimizer)
    return [name for name, _ in flat(tree(named_tensors(model, optimizer, copies or {})))]


def test_tied_parameters_come_once_and_lasting_buffers_come_too() -> None:
    assert sorted(names(Tied())) == [
        "model.bias",
        "model.table.weight",
        "optimizer.state.table.weight.exp_avg",
        "optimizer.state.table.weight.exp_avg_sq",
        "optimizer.state.table.weight.step",
    ]


def test_copies_are_saved_once_and_read_into_both() -> None:
    model = Ends()
    copies = {"head.weight": "table.weight"}
    assert names(model, copies)[0] == "model.table.weight"
    assert not [name for name in names(model, copies) if "head" in name]
    named = named_tensors(model, torch.optim.SGD(model.parameters()), copies)
    read = tree(named)["model"]["table.weight"]
    with torch.no_grad():
        read.fill_(7.0)
    equalise_copies(named)
    assert bool((model.table.weight == 7).all())
    assert torch.equal(model.table.weight, model.head.weight)


def test_states_are_made_without_a_change() -> None:
    model = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    fill_optimizer(optimizer)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_is_no_tensor_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["count"] = 3
    with pytest.raises(TrainerError, match="the optimizer keeps 3, which is no tensor"):
        named_tensors(model, optimizer, {})


def test_copies_are_independent_and_their_memory_is_used_again() -> None:
    values: dict[str, Any] = {"a": torch.ones(3), "b": {"c": torch.zeros(2, dtype=torch.int64)}}
    staging = Staging()
    first = staging.take(values)
    values["a"].fill_(5.0)
    assert first["a"].tolist() == [1.0, 1.0, 1.0]
    second = staging.take(values)
    assert second["a"].tolist() == [5.0, 5.0, 5.0]
    assert [second[name].data_ptr() for name in second] == [first[n].data_ptr() for n in first]
    assert set(second) == {"a", "b.c"}
    assert isinstance(second["b.c"], Tensor)


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("signed", [True, False])
def test_moments_of_8_bits_come_back_to_the_bit(signed: bool) -> None:
    """As they are read, blocks whose largest value is negative would get another scale."""
    optim = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is not installed")
    kept, read, plain = (optim.OptimState8bit.zeros((64, 256), signed=signed) for _ in range(3))
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    kept.copy_(values if signed else values.square())
    read.copy_(Staging().take({"moment": kept})["moment"])
    assert torch.equal(read.codes, kept.codes)
    assert torch.equal(read.scale, kept.scale)
    plain.copy_(kept.dequantize())
    assert torch.equal(plain.scale, kept.scale) is not signed
