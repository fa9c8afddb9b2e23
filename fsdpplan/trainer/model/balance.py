"""Balance: what keeps the experts of a mixture busy, each in the way of its family.

Where scores are sigmoids (DeepSeek-V3 and after), a bias on each expert's score counts for the
choice only, not for its weight. After each step it is raised where an expert got fewer tokens than
the mean, and lowered where it got more. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.

Where they are a softmax (Mixtral, Qwen, DeepSeek-V2), whose published formats have no such bias, an
auxiliary loss presses the router:

    coefficient * E * sum over experts of f_e * P_e

f_e is the number of a token's K choices that fall on expert e, P_e its probability, both in the
mean over all mixtures of the model and all tokens of the global batch that do not fill up a row.
Source: Switch Transformer (arXiv 2101.03961), equations 4 to 6, and load_balancing_loss_func of
transformers 5, whose value this is over the global batch as one.

The gradient goes through P alone, and needs f when backward begins. Between the forward and the
backward pass of a micro-batch the ranks tell each other what they chose, so with one micro-batch a
step f is the global batch's. With several, the later ones are not routed yet: `MeanSoFar`. Stages
of a pipeline tell each other in passing (parallel/pipeline_balance.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import ModelConfig, PlanConfig
from ..parallel.mesh import Meshes
from ..shared import trainer_options
from .moe import MixtureOfExperts, mixtures


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """By how much experts are balanced, in either way."""

    bias_rate: float = 0.0
    """What a step moves each expert's bias by; 0: they stay."""
    auxiliary: float = 0.0
    """The auxiliary loss's coefficient; 0: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """How balanced a step's choices were."""

    imbalance: Tensor | None
    """Tokens of the busiest expert of any block over the mean (1: balanced); None without experts.
    """
    auxiliary_loss: Tensor | None
    """Without its coefficient; None where there is none."""


def has_softmax_router(model: ModelConfig) -> bool:
    """Whether `model` has experts that an auxiliary loss balances, unless it is told otherwise."""
    return model.experts is not None and model.experts.router.scores == "softmax"


def default_bias_rate(model: ModelConfig) -> float:
    """What a step moves a bias by, unless it is told; of a dense model that means nothing."""
    return 0.0 if has_softmax_router(model) else trainer_options.BALANCE_SPEED


class MeanSoFar:
    """The part of a step's choices that falls on each expert, as each micro-batch is told of it.

    Each is told of the mean of those up to it, and bears an equal part of what the ones before were
    told wrongly. So the mean of what all are told, over choices, is that of the whole step, and the
    gradient differs from the global batch's by how micro-batches differ from each other, twice: in
    their choices and in their gradients.
    """

    def __init__(self, choices: Tensor | float) -> None:
        """`choices` are those of the whole step."""
        self._whole = choices
        self._chosen: Tensor | float = 0.0
        self._told: Tensor | float = 0.0
        """Sums over choices."""

    def after(self, chosen_E: Tensor) -> Tensor:
        """What the micro-batch is told that has chosen each expert so often."""
        chosen_E = chosen_E.double()
        more, done = chosen_E.sum(), torch.as_tensor(self._chosen).sum()
        self._chosen = self._chosen + chosen_E
        mean_E = self._chosen / (done + more).clamp(min=1)
        left = (self._whole - done).clamp(min=more).clamp(min=1)
        told_E: Tensor = mean_E + (done * mean_E - self._told) / left
        self._told = self._told + more * told_E
        return told_E


class Pressure:
    """The auxiliary loss of one step, as its backward passes meet it.

    Gradients of ranks with other tokens are averaged, those of tensor-parallel ranks, which have
    the same tokens, are summed.
    """

    def __init__(
        self,
        model: nn.Module,
        meshes: Meshes,
        plan: PlanConfig,
        balance: Balance,
        *,
        real: Tensor | float,
        weight: Tensor | float,
    ) -> None:
        """`real` is the fraction of the global batch's tokens that do not fill up a row; by
        `weight` gradients are divided in the end."""
        assert plan.model.experts is not None
        layout, training, experts = plan.layout, plan.training, plan.model.experts
        self._here, self._meshes = mixtures(model), meshes
        tokens = mixtures_in(plan.model) * training.global_batch * training.seq_len * real
        copies = layout.data_parallel * layout.cp / layout.tp
        self._active = experts.active
        self._each = balance.auxiliary * experts.experts * copies * weight / tokens
        self._mean = MeanSoFar(experts.active * tokens)
        self._experts = experts.experts
        for mixture in self._here:
            mixture.is_pressed = True

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Run a forward pass of the whole model whose backward pass, the next one, is to meet the
        loss."""
        before = self.chosen_in(self._here)
        yield
        self.press(self._here, self.shares_after(self.chosen_in(self._here) - before))

    def chosen_in(self, here: Sequence[MixtureOfExperts]) -> Tensor:
        """How often tokens of this rank have chosen each expert in some mixtures so far."""
        if not here:
            device = self._meshes.parameters.device_type
            return torch.zeros(self._experts, dtype=torch.int64, device=device)
        return torch.stack([mixture.counts for mixture in here]).sum(0)

    def shares_after(self, chosen_E: Tensor) -> Tensor:
        """f, as the next micro-batch meets it, whose tokens on this rank have chosen each expert so
        often in the whole model. Ranks with other tokens call this together."""
        (all_E,) = _over_data([chosen_E], self._meshes)
        return self._active * self._mean.after(all_E)

    def press(self, here: Sequence[MixtureOfExperts], shares_E: Tensor) -> None:
        """Let the backward pass that comes next through `here` meet the loss with this f."""
        for mixture in here:
            # `data`: autograd has noted this tensor in forward, and is to read it in backward
            mixture.pressure.data.copy_(shares_E * self._each)


def mixtures_in(model: ModelConfig) -> int:
    """How many the whole model has."""
    return sum(model.has_experts(layer) for layer in range(model.layers))


@torch.no_grad()
def balance_experts(
    model: nn.Module, meshes: Meshes | None, config: ModelConfig, balance: Balance
) -> Balanced:
    """Move each expert's bias by what all tokens of a step chose, and begin to count anew; all
    ranks call this.

    `meshes` None is one process. Parts of each block's tokens are all that counts, so nothing
    depends on the layout, nor on whether a recomputation was counted again.
    """
    here = mixtures(model)
    imbalance = auxiliary_loss = counts = None
    if here:
        counts = _over_data([mixture.counts for mixture in here], meshes)
        mean = counts.sum(-1, keepdim=True) / counts.shape[-1]
        imbalance = (counts / mean).max()
        for mixture, move in zip(here, torch.sign(mean - counts), strict=True):
            mixture.expert_bias.add_(balance.bias_rate * move)
    if balance.auxiliary:
        auxiliary_loss = _auxiliary_loss(here, counts, meshes, config)
    for mixture in here:
        mixture.counts.zero_()
    return Balanced(imbalance=imbalance, auxiliary_loss=auxiliary_loss)


def _auxiliary_loss(
    here: list[MixtureOfExperts],
    counts: Tensor | None,
    meshes: Meshes | None,
    config: ModelConfig,
) -> Tensor:
    """That of all tokens of a step, without its coefficient."""
    assert config.experts is not None
    if counts is None:  # of a pipeline's stages this rank has those that are dense
        assert meshes is not None
        device = meshes.parameters.device_type
        shares = torch.zeros(2, config.experts.experts, device=device, dtype=torch.float64)
    else:
        # of many ranks' sums; nothing else of a step is sent in float64, which tells them apart
        sums = _over_data([mixture.probabilities.double() for mixture in here], meshes)
        tokens = counts.sum(-1, keepdim=True) / config.experts.active
        shares = torch.stack([(counts / tokens).sum(0), (sums / tokens).sum(0)])
    if meshes is not None and meshes.pp is not None:
        dist.all_reduce(shares, group=meshes.pp.get_group())
    chosen, probable = shares / mixtures_in(config)
    for mixture in here:
        mixture.probabilities.zero_()
    loss: Tensor = config.experts.experts * (chosen * probable).sum().float()
    return loss


def _over_data(of_blocks: list[Tensor], meshes: Meshes | None) -> Tensor:
    """What all ranks with other tokens have counted, a row for each block."""
    total = torch.stack(of_blocks)
    for axis in ("dp_replicate", "dp_shard"):
        mesh = None if meshes is None else meshes.axis(axis)
        if mesh is not None and mesh.size() > 1:
            dist.all_reduce(total, group=mesh.get_group())
    return total
