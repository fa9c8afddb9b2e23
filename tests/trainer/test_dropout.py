"""Dropout: what is dropped, on which ranks, in which passes, and what a resumed run draws."""

from __future__ import annotations

import json
import math
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpplan.trainer.config import DropoutConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.model.decoder import Block, Decoder
from fsdpplan.trainer.model.dropout import Dropout
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.parallel.recompute import checkpoint_block
from fsdpplan.trainer.parallel.support import require_runnable
from fsdpplan.trainer.signals import STOP_SIGNALS
from fsdpplan.trainer.torch_versions import has_ring_attention
from tests.trainer import jobs, plans
from tests.trainer.dropout_ranks import AT, EVERYWHERE, LAYOUTS, MODES, trained

DROPS = DropoutConfig(**EVERYWHERE)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("dropout") / "results.json"
    return jobs.measured(2, "tests.trainer.dropout_ranks:measure_masks", out)


def decoder_of(dropout: DropoutConfig | None, **fields: Any) -> Decoder:
    config = plans.config_of(**fields)
    with torch.device("meta"):
        decoder = Decoder(config, dropout=dropout)
    decoder.to_empty(device="cpu")
    initialise(decoder, seed=0, layers=config.layers)
    return decoder


@pytest.mark.gloo
@pytest.mark.parametrize("name", LAYOUTS)
def test_backward_drops_what_forward_dropped(found: dict[str, Any], name: str) -> None:
    """Else the gradients' norm of what is computed again would differ."""
    of = found[name]
    for mode in MODES[1:] if name != "zero bubble" else ("full",):
        assert of[mode]["loss"] == pytest.approx(of["none"]["loss"], rel=1e-6)
        assert of[mode]["norm"] == pytest.approx(of["none"]["norm"], rel=1e-5)


@pytest.mark.gloo
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_two_ranks_drop_the_same(found: dict[str, Any], name: str) -> None:
    """Each has tokens or heads of its own; independent masks agree on 0.9^2 + 0.1^2 of all."""
    of = found[name]
    error = math.sqrt(0.09 / of["elements"])
    assert of["kept"] == pytest.approx(0.9, abs=4 * error)
    assert of["equal"] == pytest.approx(0.82, abs=5 * error)


def test_what_is_kept_is_scaled_up_and_the_rest_is_zero() -> None:
    torch.manual_seed(0)
    x = torch.ones(400, 500, requires_grad=True)
    out = Dropout(0.25)(x)
    out.sum().backward()
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(x.grad, out)  # type: ignore[arg-type]
    error = math.sqrt(0.25 * 0.75 / out.numel())
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=4 * error)
    dropout = Dropout(0.25).eval()
    assert dropout(x) is x


@pytest.mark.parametrize("place", ["attention", "residual", "embedding"])
def test_each_place_drops_by_itself_and_evaluation_does_not(place: str) -> None:
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    dropping = decoder_of(DropoutConfig(**{place: 0.3}))
    plain = decoder_of(None)
    torch.manual_seed(0)
    one, other = dropping(tokens), dropping(tokens)
    assert not torch.equal(one, other)
    torch.testing.assert_close(dropping.eval()(tokens), plain(tokens), rtol=0, atol=0)


def test_no_dropout_changes_no_bit_and_draws_no_number() -> None:
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    none, zero = decoder_of(None), decoder_of(DropoutConfig())
    before = torch.get_rng_state()
    assert torch.equal(none(tokens), zero(tokens))
    assert torch.equal(before, torch.get_rng_state())
    assert [name for name, _ in none.named_modules()] == [name for name, _ in zero.named_modules()]


def test_the_mean_over_masks_is_what_is_computed_without() -> None:
    """Of a branch that is linear in what is dropped: attention's values, one block, no norms."""
    block = decoder_of(DropoutConfig(attention=0.2), layers=1, qk_norm=False).layers["0"]
    x = torch.randn(1, 8, 48, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.manual_seed(0)
        many = block.attention(x.expand(20_000, -1, -1))  # type: ignore[operator]
        plain = block.eval().attention(x)  # type: ignore[operator]
    error = many.std(0) / math.sqrt(len(many))
    assert ((many.mean(0) - plain[0]).abs() < 5 * error + 1e-7).all()


@pytest.mark.parametrize("mode", ["full", "op"])
def test_compiled_blocks_draw_in_backward_what_they_drew(mode: str) -> None:
    """Finite differences of the compiled block with its seed set anew each time."""
    torch.compiler.reset()
    torch.manual_seed(3)
    block = Block(
        plans.config_of(layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn_hidden=16),
        layer=0,
        dropout=DROPS,
    ).double()
    checkpoint_block(block, mode)
    forward = torch.compile(block.forward, backend="aot_eager")
    x = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)

    def loss(at: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return forward(at).square().sum()

    (gradient,) = torch.autograd.grad(loss(x), x)
    step = 1e-6
    with torch.no_grad():
        ends = [x + sign * step * direction for sign in (1, -1)]
    above, below = (loss(end.requires_grad_()).item() for end in ends)
    slope = (above - below) / (2 * step)
    assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-6)
    torch.compiler.reset()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The handlers of this process, which a run takes over."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("runs") / "results.json"
    return jobs.measured(2, "tests.trainer.dropout_ranks:measure_runs", out)


@pytest.mark.gloo
def test_a_run_resumed_on_its_layout_is_the_unbroken_one_to_the_bit(runs: dict[str, Any]) -> None:
    assert runs["fsdp"] == runs["whole"][AT:]


@pytest.mark.gloo
@pytest.mark.usefixtures("alone", "own_signals")
def test_a_run_resumed_on_another_layout_is_one_more_seed(
    runs: dict[str, Any], tmp_path: Path
) -> None:
    """Within three standard errors of the difference between one run and the mean of five."""
    unbroken = [trained(tmp_path / f"{n}", rank=0, draws=n) for n in range(5)]
    means = [statistics.fmean(losses[AT:]) for losses in unbroken]
    error = statistics.stdev(means) * math.sqrt(1 + 1 / len(means))
    assert runs["tp"] != runs["fsdp"]
    assert statistics.fmean(runs["tp"]) == pytest.approx(statistics.fmean(means), abs=3 * error)


@pytest.mark.parametrize(
    ("dropout", "layout", "words"),
    [
        ({"residual": 1.0}, {}, "dropout 1.0 of residual"),
        ({"attention": 0.1}, {"cp": 2}, "ring attention .cp 2. with dropout of attention"),
    ],
)
def test_what_cannot_be_dropped_is_refused(
    dropout: dict[str, float], layout: dict[str, Any], words: str
) -> None:
    document = plans.plan_document(training={"dropout": dropout}, **layout)
    document["cluster"]["device"]["kind"] = "cuda"
    with pytest.raises(TrainerError, match=words):
        require_runnable(parse_plan(json.dumps(document)))


@pytest.mark.skipif(not has_ring_attention(), reason="ring attention came with torch 2.10")
def test_ring_attention_is_refused_for_attention_only() -> None:
    document = plans.plan_document(training={"dropout": {"residual": 0.1}}, cp=2)
    document["cluster"]["device"]["kind"] = "cuda"
    require_runnable(parse_plan(json.dumps(document)))
