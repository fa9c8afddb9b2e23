"""Optimizers: AdamW, AdamW with states of 8 bits, and Muon for the matrices of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .errors import TrainerError
from .muon import Deals, MuonSettings, deal_out, update_matrices
from .parallel.shards import local, local_gradient
from .torch_versions import torchao_wanted

BETAS = (0.9, 0.95)
EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the weights are updated."""

    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    """Largest norm of all gradients together; infinite: not clipped."""
    optimizer: str = "adamw"
    """`adamw`, `adamw_8bit` or `muon`."""
    adamw: str = "fused"
    """How AdamW is computed: in one kernel (`fused`), one operator at a time over all tensors
    (`foreach`) or over each (`loop`)."""


class ShardOptimizer(torch.optim.Optimizer):
    """AdamW, and Muon in the groups that carry `muon`, over this rank's own shards.

    States are sharded as their parameters are, and named as torch's, so that checkpoints know them.
    The arithmetic sees local tensors only: it is the same element by element, asks nothing of
    parameters that are on different meshes, and no operator is dispatched twice.
    """

    def __init__(self, groups: list[dict[str, Any]], recipe: Recipe) -> None:
        settings = {
            "lr": recipe.learning_rate,
            "betas": BETAS,
            "eps": EPSILON,
            "weight_decay": recipe.weight_decay,
            "fused": recipe.adamw == "fused",
            "foreach": recipe.adamw == "foreach",
        }
        super().__init__(groups, settings)
        self._deals: dict[tuple[int, ...], Deals] = {}
        """Of Muon's parameters that had gradients, by their identities."""

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` can leave everything as it is without the host knowing."""
        return all(group["fused"] and "muon" not in group for group in self.param_groups)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None
    ) -> None:
        """Update all parameters that have gradients; none where `found_inf` is 1."""
        assert closure is None
        assert found_inf is None or self.skips_on_device
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if not parameters:
                continue
            if "muon" in group:
                self._update_matrices(parameters, group)
            else:
                self._update_elements(parameters, group, found_inf)

    def _update_elements(
        self, parameters: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        states = [self._adamw_state(each, on_device=group["fused"]) for each in parameters]
        # an empty shard has no element to update, and no kernel wants it
        kept = [index for index, each in enumerate(parameters) if local(each).numel()]
        if not kept:
            return
        adamw(
            [local(parameters[index]) for index in kept],
            [local_gradient(parameters[index]) for index in kept],
            [local(states[index]["exp_avg"]) for index in kept],
            [local(states[index]["exp_avg_sq"]) for index in kept],
            [],
            [states[index]["step"] for index in kept],
            foreach=group["foreach"],
            fused=group["fused"],
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _adamw_state(self, parameter: Tensor, *, on_device: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            device = local(parameter).device if on_device else torch.device("cpu")
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _update_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        key = tuple(map(id, parameters))
        if key not in self._deals:
            self._deals[key] = deal_out(parameters)
        update_matrices(
            parameters,
            [self.state[parameter]["momentum_buffer"] for parameter in parameters],
            MuonSettings(learning_rate=group["lr"], weight_decay=group["weight_decay"]),
            self._deals[key],
        )


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over all parameters of `model`; only matrices decay."""
    if recipe.optimizer == "adamw_8bit":
        return _adamw_8bit(_decay_groups(model.named_parameters(), recipe), recipe)
    if recipe.optimizer == "adamw":
        return ShardOptimizer(_decay_groups(model.named_parameters(), recipe), recipe)
    by_muon = list(block_matrices(model))
    identities = {id(parameter) for parameter in by_muon}
    others = [named for named in model.named_parameters() if id(named[1]) not in identities]
    groups = [*_decay_groups(others, recipe), {"params": by_muon, "muon": True}]
    return ShardOptimizer([group for group in groups if group["params"]], recipe)


def block_matrices(model: nn.Module) -> Iterator[Tensor]:
    """The weights of the repeated blocks that multiply tokens, experts' too: neither the embedding
    nor the head, no norm and no bias."""
    for name, parameter in model.named_parameters():
        # none where a pipeline stage has the embedding or the head only
        if name.startswith("layers.") and is_matrix(name, parameter):
            yield parameter


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter multiplies tokens, or is a table; biases of experts are stacked, and yet
    each is a vector."""
    return parameter.ndim > 1 and not name.endswith("bias")


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Let the next step use `learning_rate`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def _decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe
) -> list[dict[str, Any]]:
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in parameters:
        (matrices if is_matrix(name, parameter) else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw_8bit(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    """torchao's: moments in 8 bits with a scale for each 256 elements, updated by compiled code.

    Of bf16 parameters an update is rounded up as often as it is nearer to that, so that small ones
    are not lost.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise TrainerError(
            "optimizer adamw_8bit needs torchao, which is not installed here, or not for torch "
            f"{torch.__version__}: pip install {torchao_wanted()}, or plan again with --optimizer "
            "adamw"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(
        groups,
        lr=recipe.learning_rate,
        betas=BETAS,
        eps=EPSILON,
        bf16_stochastic_round=any(
            parameter.dtype is torch.bfloat16 for group in groups for parameter in group["params"]
        ),
    )
    return optimizer
