"""NF4: what it stands for, whatever the shape; and that it is bitsandbytes'."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.adapters import nf4_bytes
from fsdpplan.trainer.model import nf4

SHAPES = [(512, 512), (896, 320), (2880, 192), (64, 7), (37, 11), (1, 1)]


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (0.02 * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_off_by_half_a_step_of_its_block_at_most(shape: tuple[int, int]) -> None:
    whole = matrix(shape)
    back = nf4.dequantise(nf4.quantise(whole), whole.shape, torch.float32)
    widest = max(b - a for a, b in zip(nf4.LEVELS, nf4.LEVELS[1:], strict=False)) / 2
    # and the block's own scale is off by a step of the 8-bit map
    largest = whole.abs().max()
    assert (back - whole).abs().max() <= (widest + 0.02) * largest


@pytest.mark.parametrize("shape", SHAPES)
def test_it_takes_the_bytes_that_are_planned(shape: tuple[int, int]) -> None:
    stored = nf4.quantise(matrix(shape))
    assert sum(each.numel() for each in stored) == nf4_bytes(math.prod(shape))
    assert [each.dtype for each in stored] == [torch.uint8] * 3
    assert [tuple(each.shape) for each in stored] == list(nf4.sizes(math.prod(shape)).values())


@given(rows=st.integers(1, 70), columns=st.integers(1, 40), begin=st.integers(0, 900))
def test_a_rank_makes_its_codes_alone(rows: int, columns: int, begin: int) -> None:
    whole = matrix((rows, columns), torch.bfloat16)
    every = nf4.quantise(whole)
    part = nf4.quantise(whole, slice(begin, begin + 301))
    assert torch.equal(part.codes, every.codes[begin : begin + 301])
    assert torch.equal(part.block_scales, every.block_scales)
    assert torch.equal(part.scales, every.scales)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = matrix((257, 131), torch.bfloat16)
    at_once = nf4.quantise(whole)
    back = nf4.dequantise(at_once, whole.shape, torch.bfloat16)
    monkeypatch.setattr(nf4, "PIECE_BLOCKS", nf4.GROUP)
    again = nf4.quantise(whole)
    assert all(torch.equal(*pair) for pair in zip(at_once, again, strict=True))
    assert torch.equal(back, nf4.dequantise(again, whole.shape, torch.bfloat16))


def test_a_matrix_of_zeros_stays_one() -> None:
    whole = torch.zeros(9, 30)
    assert not nf4.dequantise(nf4.quantise(whole), whole.shape, torch.float32).any()


@pytest.mark.parametrize("shape", [(64, 7), (96, 40)])
def test_a_product_and_its_gradient_are_those_of_the_dequantised_weight(
    shape: tuple[int, int],
) -> None:
    whole = matrix(shape)
    stored = nf4.quantise(whole)
    weight = nf4.dequantise(stored, whole.shape, torch.float32)
    x = torch.randn(5, shape[1], requires_grad=True)
    bias = torch.randn(shape[0])
    out = nf4.linear(x, stored, whole.shape, bias)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(out, x @ weight.T + bias, atol=1e-6)
    assert torch.allclose(gradient, weight.sum(0).expand(5, -1), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(512, 512), (896, 320), (64, 7), (37, 11)])
def test_it_is_bitsandbytes_own(shape: tuple[int, int]) -> None:
    """The 4-bit codes are all the same. Of the scales' 8-bit codes its CPU kernel takes a neighbour
    of the nearest one for one in a thousand; ours are the nearest."""
    functional = pytest.importorskip("bitsandbytes.functional")
    whole = matrix(shape, torch.bfloat16)
    packed, state = functional.quantize_4bit(
        whole, blocksize=nf4.BLOCK, compress_statistics=True, quant_type="nf4"
    )
    ours = nf4.quantise(whole)
    numbers = ours.scales.view(torch.float32).flatten()
    assert torch.equal(ours.codes, packed.flatten())
    assert torch.equal(nf4.dynamic_map(), state.state2.code)
    assert torch.allclose(numbers[:-1], state.state2.absmax, rtol=1e-6)
    assert torch.allclose(numbers[-1], state.offset, rtol=1e-6)
    apart = ours.block_scales.int() - state.absmax.flatten().int()
    assert apart.abs().max() <= 1
    assert (apart != 0).float().mean() <= 0.005
    theirs = functional.dequantize_4bit(packed, state)
    back = nf4.dequantise(ours, whole.shape, torch.bfloat16)
    near = apart.abs().repeat_interleave(nf4.BLOCK)[: whole.numel()] == 0
    assert torch.equal(back.flatten()[near], theirs.flatten()[near])
