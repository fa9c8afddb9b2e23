"""One process's answer to the tiny step: what all ranks together must come to.

Every rank computes it by itself, without a message, on its CPU. A step has few kinds of sequences
(numbers_plan), so one batch of each kind, weighed by how often it comes, is the whole step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..config import PlanConfig
from ..model.adapters import adapt
from ..model.decoder import Decoder
from ..model.moe import MixtureOfExperts
from ..model.weights import (
    VOCABULARIES,
    fill_quantised,
    is_quantised,
    materialise,
    quantised_layers,
)
from ..optimizer import Recipe, make_optimizer
from .plan import counted_kinds, kinds_of

CPU = torch.device("cpu")
RATE = 0.02
"""So that a step moves weights by about a tenth: parameters of before it show in the next one."""
LEAST_MARGIN = 1e-5
"""Between the score of the last expert that a token visits and the next one: rounding could choose
the other way. Such tokens are drawn again."""
SEEDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one process has, on the CPU and in fp32. Tensors of names are whole parameters."""

    sequences: Tensor
    """(kinds, tokens + 1), int64."""
    initial: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    updates: Mapping[str, Tensor]
    """What the step adds to each parameter."""
    losses: Tensor
    """(kinds, tokens): of each target, in the first step."""
    later_losses: Tensor
    """In the second one."""
    norm: float
    later_norm: float
    outputs: Mapping[str, Tensor]
    """(kinds, tokens, hidden), of what `watch` names."""


def recipe_of(plan: PlanConfig, *, adamw: str = "fused") -> Recipe:
    """How the tiny model's weights are updated; the clipping is told to each step."""
    return Recipe(
        steps=2,
        learning_rate=RATE,
        warmup_steps=0,
        weight_decay=0.1,
        clip_norm=float("inf"),
        optimizer=plan.training.optimizer,
        adamw=adamw,
    )


def drawn(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """Values of a parameter that let all parts of a block matter: matrices keep the size of what
    they multiply, norms are near one, biases and sinks near zero, but no two alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"numbers {seed}:{name}".encode()))
    normal = torch.randn(shape, generator=generator)
    if name.endswith(("bias", "sinks")):
        return 0.1 * normal
    if len(shape) == 1:
        return 1 + 0.1 * normal
    return normal * (0.3 if "embeddings" in name else 1 / sqrt(shape[-1]))


def as_built(plan: PlanConfig, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole parameters by name, or what is of their shapes, with the rows of zeros by which the
    layout pads the vocabulary."""
    more = plan.model.vocab_rows(plan.layout.tp) - plan.model.vocab
    return {
        name: F.pad(whole, (0, 0, 0, more)) if more and name in VOCABULARIES else whole
        for name, whole in wholes.items()
    }


def tokens_of(plan: PlanConfig, *, seed: int) -> Tensor:
    """A sequence of each kind."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"numbers {seed}".encode()))
    shape = (kinds_of(plan), plan.training.seq_len + 1)
    return torch.randint(plan.model.vocab, shape, generator=generator)


def good_seed(plan: PlanConfig) -> int:
    """The first seed with which every token's choice of experts is clear, or the clearest."""
    if plan.model.experts is None:
        return 0
    margins: dict[int, float] = {}
    for seed in range(SEEDS):
        decoder = make_decoder(plan, seed=seed)
        with _margins(decoder) as found, torch.no_grad():
            decoder(tokens_of(plan, seed=seed)[:, :-1])
        margins[seed] = min(found)
        if margins[seed] > LEAST_MARGIN:
            return seed
    return max(margins, key=margins.__getitem__)


def make_decoder(plan: PlanConfig, *, seed: int) -> Decoder:
    """The tiny model as a whole."""
    with torch.device("meta"):
        decoder = Decoder(plan.model)
        if plan.training.adapters is not None:
            adapt(decoder, decoder.layers.values(), plan.model, plan.training.adapters)
    materialise(decoder, CPU)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not is_quantised(name):
                parameter.copy_(drawn(name, parameter.shape, seed=seed))
        for name, layer in quantised_layers(decoder):
            fill_quantised(layer, drawn(name, layer.whole_shape, seed=seed))
        for buffer in decoder.buffers():
            buffer.zero_()
    return decoder


def compute_reference(plan: PlanConfig, *, seed: int, adamw: str = "fused") -> Reference:
    """Two steps of one process."""
    decoder = make_decoder(plan, seed=seed)
    optimizer = make_optimizer(decoder, recipe_of(plan, adamw=adamw))
    sequences, weights = tokens_of(plan, seed=seed), kind_weights(plan)
    initial = _copies(decoder)
    with _outputs(decoder) as outputs:
        losses = _step_losses(decoder, sequences, weights)
    gradients = gradients_of(decoder)
    norm = _norm(gradients)
    optimizer.step()
    now = _copies(decoder)
    updates = {name: now[name] - initial[name] for name in gradients}
    optimizer.zero_grad(set_to_none=True)
    later_losses = _step_losses(decoder, sequences, weights)
    return Reference(
        sequences=sequences,
        initial=as_built(plan, initial),
        gradients=as_built(plan, gradients),
        updates=as_built(plan, updates),
        losses=losses,
        later_losses=later_losses,
        norm=norm,
        later_norm=_norm(gradients_of(decoder)),
        outputs=outputs,
    )


def kind_gradients(plan: PlanConfig, *, seed: int) -> Iterator[dict[str, Tensor]]:
    """Gradients of each kind by itself, of which the step's are the weighted sum."""
    decoder = make_decoder(plan, seed=seed)
    for sequence in tokens_of(plan, seed=seed):
        decoder.zero_grad(set_to_none=True)
        _step_losses(decoder, sequence[None], torch.ones(1))
        yield as_built(plan, gradients_of(decoder))


def kind_weights(plan: PlanConfig) -> Tensor:
    """Share of each kind in a step's sequences."""
    counted = counted_kinds(plan)
    return torch.tensor([counted[kind] for kind in range(kinds_of(plan))]) / counted.total()


def gradients_of(decoder: nn.Module) -> dict[str, Tensor]:
    """Of all parameters that are trained, now."""
    found = {}
    for name, parameter in decoder.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        found[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    return found


def watch(model: nn.Module, seen: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
    """Call `seen` with what each block of a decoder, or of a rank's share of one, is given, and
    with what parts give the residual stream: `input of layers.3`, `layers.3.attention`."""
    handles = []

    def at_output(name: str, part: nn.Module) -> None:
        handles.append(part.register_forward_hook(lambda _, __, output: seen(name, output)))

    for name, part in model.named_children():
        if name in ("tok_embeddings", "norm"):
            at_output(name, part)
    for number, block in model.layers.named_children():  # type: ignore[union-attr]
        path = f"layers.{number}"
        handles.append(
            block.register_forward_pre_hook(
                lambda _, given, path=path: seen(f"input of {path}", given[0])
            )
        )
        for name in ("attention", "feed_forward"):
            at_output(f"{path}.{name}", block.get_submodule(name))
    return handles


def _step_losses(decoder: Decoder, sequences: Tensor, weights: Tensor) -> Tensor:
    """The loss of each target; leaves the gradients of the weighted mean."""
    logits = decoder(sequences[:, :-1])
    targets = sequences[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.view(targets.shape)
    torch.autograd.backward((losses.mean(1) * weights).sum())
    return losses.detach()


def _copies(decoder: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.stack([each.norm() for each in gradients.values()]).norm())


@contextmanager
def _outputs(decoder: nn.Module) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor) -> None:
        outputs[name] = output.detach()

    handles = watch(decoder, keep)
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _margins(decoder: nn.Module) -> Iterator[list[float]]:
    """How clear the choice of experts is, of each mixture's least certain token."""
    found = [float("inf")]

    def look(mixture: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(mixture, MixtureOfExperts)
        (x,) = given
        scores = mixture.router(x.flatten(0, 1)).softmax(-1).sort(-1, descending=True).values
        active = mixture.config.active
        if active < scores.shape[1]:
            found.append(float((scores[:, active - 1] - scores[:, active]).min()))

    mixtures = [part for part in decoder.modules() if isinstance(part, MixtureOfExperts)]
    handles = [mixture.register_forward_pre_hook(look) for mixture in mixtures]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
