"""The loss, whole and in pieces: the same number and the same gradients, with less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdpplan.trainer.model.loss import chunked_loss, next_token_loss
from fsdpplan.trainer.private_torch import fake_tensors
from fsdpplan.trainer.rehearse.live_bytes import LiveBytes
from fsdpplan.trainer.text.packing import IGNORED
from tests.trainer import jobs, loss_layouts

LOSS_TOLERANCE = 5e-6
NORM_TOLERANCE = 1e-4
"""As for whole losses: see test_losses.py."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]) -> Results:
    """All layouts, measured one after the other in one set of processes."""
    out = tmp_path_factory.mktemp("loss_layouts") / "results.json"
    return jobs.measured(4, "tests.trainer.loss_layouts:measure_all", out, asked=asked("name"))


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(expected["norms"], abs=NORM_TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", loss_layouts.CHUNKED)
def test_a_loss_in_pieces_trains_as_a_whole_one(results: Results, name: str) -> None:
    require_equal(results[name], results["reference"])


@pytest.mark.gloo
@pytest.mark.parametrize("name", loss_layouts.TIED_LAYOUTS)
def test_a_tied_table_gets_both_of_its_gradients(results: Results, name: str) -> None:
    require_equal(results[name], results["tied_reference"])


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", loss_layouts.PADDED_LAYOUTS)
def test_a_padded_vocabulary_trains_as_one_that_is_not(results: Results, name: str) -> None:
    reference = "padded_tied_reference" if "tied" in name else "padded_reference"
    require_equal(results[name], results[reference])


@pytest.mark.gloo
@pytest.mark.parametrize("name", loss_layouts.BF16)
def test_pieces_in_bf16_begin_as_fp32_does(results: Results, name: str) -> None:
    assert results[name]["losses"][0] == pytest.approx(results["reference"]["losses"][0], abs=0.01)
    assert results[name]["norms"][0] == pytest.approx(results["reference"]["norms"][0], rel=0.03)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", loss_layouts.PACKED)
def test_packed_documents_train_as_if_each_stood_alone(results: Results, name: str) -> None:
    require_equal(results[f"packed_{name}"], results["apart"])


@pytest.mark.gloo
def test_packed_documents_in_pieces_do_too(results: Results) -> None:
    require_equal(results["packed_chunked"], results["apart"])


def head(tokens: int, dtype: torch.dtype, weight: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (2, tokens, 24), the weight of a head of 61 rows, and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens, 24, generator=generator).to(dtype).requires_grad_()
    rows = (0.3 * torch.randn(61, 24, generator=generator)).to(weight).requires_grad_()
    targets = torch.randint(0, 61, (2, tokens), generator=generator)
    targets[0, ::5] = IGNORED
    return hidden, rows, targets


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss / 3, of)


@given(chunks=st.integers(2, 40), tokens=st.integers(1, 20))
def test_any_number_of_pieces_gives_the_loss_and_its_gradients(chunks: int, tokens: int) -> None:
    hidden, rows, targets = head(tokens, torch.float32, torch.float32)
    found = chunked_loss(hidden, rows, targets, chunks=chunks, compiles=False)
    expected = next_token_loss(F.linear(hidden, rows), targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for made, plain in zip(
        gradients(found, hidden, rows), gradients(expected, hidden, rows), strict=True
    ):
        torch.testing.assert_close(made, plain, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_pieces_round_as_their_dtype_does(dtype: torch.dtype, weight: torch.dtype) -> None:
    hidden, rows, targets = head(40, dtype, weight)
    found = chunked_loss(hidden, rows, targets, chunks=3, compiles=False)
    expected = next_token_loss(F.linear(hidden.double(), rows.double()), targets)
    made, plain = gradients(found, hidden, rows), gradients(expected, hidden, rows)
    rounding = torch.finfo(dtype).eps
    assert found.item() == pytest.approx(expected.item(), rel=rounding)
    for ours, exact in zip(made, plain, strict=True):
        assert ours.dtype == exact.dtype
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < 2 * rounding


def test_fp16_gradients_live_on_the_loss_scale() -> None:
    hidden, rows, targets = head(2000, torch.float16, torch.float16)
    found = chunked_loss(hidden, rows, targets, chunks=4, compiles=False)
    (scaled,) = torch.autograd.grad(found * 2.0**14, (hidden,))
    nonzero = (scaled != 0).any(dim=-1)
    assert torch.equal(nonzero, targets != IGNORED)
    assert scaled.isfinite().all()


def test_a_split_backward_asks_for_one_gradient_at_a_time() -> None:
    hidden, rows, targets = head(8, torch.float32, torch.float32)
    loss = chunked_loss(hidden, rows, targets, chunks=2, compiles=False)
    expected = gradients(next_token_loss(F.linear(hidden, rows), targets), hidden, rows)
    (of_hidden,) = torch.autograd.grad(loss / 3, hidden, retain_graph=True)
    (of_rows,) = torch.autograd.grad(loss / 3, rows)
    torch.testing.assert_close((of_hidden, of_rows), expected, atol=1e-7, rtol=1e-5)


def test_targets_that_are_ignored_count_as_nothing() -> None:
    hidden, rows, targets = head(8, torch.float32, torch.float32)
    ignored = torch.full_like(targets, IGNORED)
    loss = chunked_loss(hidden, rows, ignored, chunks=3, compiles=False)
    assert loss.item() == 0.0
    assert not any(part.any() for part in gradients(loss, hidden, rows))
    assert next_token_loss(F.linear(hidden, rows), ignored).item() == 0.0


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_only_one_piece_of_the_logits_exists_at_a_time(chunks: int) -> None:
    tokens, vocab, width = 1024, 4096, 64
    with fake_tensors():
        hidden = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        rows = torch.empty(vocab, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(1, tokens, dtype=torch.int64)
        with LiveBytes() as live:
            live.start_phase("loss")
            chunked_loss(hidden, rows, targets, chunks=chunks, compiles=False).backward()
    piece = 6 * tokens // chunks * vocab
    with_gradients = piece + 2 * 2 * (tokens + vocab) * width
    numbers_of_tokens = 64 * tokens
    assert with_gradients <= live.peak_in_phase["loss"] <= with_gradients + numbers_of_tokens
