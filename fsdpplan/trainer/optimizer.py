"""Optimizers: AdamW, AdamW with states of 8 bits, and Muon for the matrices of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .errors import TrainerError
from .groups import ParameterGroup, group_of
from .model.balance import Balance
from .muon import Deals, MuonSettings, deal_out, update_matrices
from .parallel.shards import local, local_gradient
from .schedule import Schedule
from .shared import trainer_options
from .torch_versions import torchao_wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """What of the updates is typed and recorded alike; `spec/trainer_options.py` says what each
    means."""

    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    """Largest norm of all gradients together; infinite: not clipped."""
    adamw: str = "fused"
    lr_schedule: str = "cosine"
    min_lr: float | None = None
    """None: a tenth of the peak."""
    decay_steps: int | None = None
    """Of `wsd`; None: a tenth."""
    muon_learning_rate: float | None = None
    """None: that of all."""
    muon_weight_decay: float | None = None
    """None: that of all matrices."""
    muon_momentum: float = trainer_options.MUON_MOMENTUM
    muon_nesterov: bool = True
    muon_ns_steps: int = trainer_options.NEWTON_SCHULZ_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Updates):
    """How the weights are updated."""

    optimizer: str = "adamw"
    """`adamw`, `adamw_8bit` or `muon`."""
    betas: tuple[float, float] = trainer_options.BETAS
    eps: float = trainer_options.EPSILON
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with settings of their own; the first one that matches counts."""
    expert_bias_rate: float = 0.0
    router_aux_loss_coef: float = 0.0

    @property
    def balance(self) -> Balance:
        """How experts are kept busy."""
        return Balance(bias_rate=self.expert_bias_rate, auxiliary=self.router_aux_loss_coef)

    @property
    def schedule(self) -> Schedule:
        """How the learning rate goes."""
        lowest = (
            self.learning_rate * trainer_options.FINAL_FRACTION
            if self.min_lr is None
            else self.min_lr
        )
        return Schedule(
            kind=self.lr_schedule,
            steps=self.steps,
            learning_rate=self.learning_rate,
            min_lr=lowest,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps or trainer_options.default_decay_steps(self.steps),
        )


class ShardOptimizer(torch.optim.Optimizer):
    """AdamW, and Muon in the groups that carry `muon`, over this rank's own shards.

    States are sharded as their parameters are, and named as torch's, so that checkpoints know them.
    The arithmetic sees local tensors only: it is the same element by element, asks nothing of
    parameters that are on different meshes, and no operator is dispatched twice.
    """

    def __init__(self, groups: list[dict[str, Any]], recipe: Recipe) -> None:
        settings = {
            "lr": recipe.learning_rate,
            "lr_scale": 1.0,
            "betas": recipe.betas,
            "eps": recipe.eps,
            "weight_decay": recipe.weight_decay,
            "fused": recipe.adamw == "fused",
            "foreach": recipe.adamw == "foreach",
        }
        super().__init__(groups, settings)
        self._recipe = recipe
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
        by_muon: list[tuple[Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if "muon" in group:
                by_muon += [(each, group) for each in parameters]
            elif parameters:
                self._update_elements(parameters, group, found_inf)
        if by_muon:
            self._update_matrices(by_muon)

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

    def _update_matrices(self, matrices: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Those of all groups together: they are dealt out to ranks as if there were one group."""
        parameters = [parameter for parameter, _ in matrices]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        key = tuple(map(id, parameters))
        if key not in self._deals:
            self._deals[key] = deal_out(parameters)
        update_matrices(
            parameters,
            [self.state[parameter]["momentum_buffer"] for parameter in parameters],
            MuonSettings(
                learning_rates=[group["lr"] for _, group in matrices],
                weight_decays=[group["weight_decay"] for _, group in matrices],
                momentum=self._recipe.muon_momentum,
                nesterov=self._recipe.muon_nesterov,
                steps=self._recipe.muon_ns_steps,
            ),
            self._deals[key],
        )


def make_optimizer(
    model: nn.Module, recipe: Recipe, copies: Mapping[str, str] | None = None
) -> torch.optim.Optimizer:
    """The recipe's optimizer over all parameters of `model` that are trained; only matrices decay,
    unless a group says otherwise. Those of `copies` go by the name of what they are copies of."""
    names = copies or {}
    by_muon = set(map(id, block_matrices(model))) if recipe.optimizer == "muon" else set()
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for own_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = names.get(own_name, own_name)
        settings = _settings(name, parameter, recipe, by_muon=id(parameter) in by_muon)
        group = groups.setdefault(tuple(sorted(settings.items())), {"params": [], **settings})
        group["params"].append(parameter)
    if recipe.optimizer == "adamw_8bit":
        return _adamw_8bit(list(groups.values()), recipe)
    return ShardOptimizer(list(groups.values()), recipe)


def _settings(
    name: str, parameter: nn.Parameter, recipe: Recipe, *, by_muon: bool
) -> dict[str, Any]:
    """The keys of a parameter's group in which it may differ from others."""
    asked = group_of(name, recipe.groups)
    scale, decay = 1.0, recipe.weight_decay if is_matrix(name, parameter) else 0.0
    if by_muon and recipe.muon_learning_rate is not None:
        scale = recipe.muon_learning_rate / recipe.learning_rate
    if by_muon and recipe.muon_weight_decay is not None:
        decay = recipe.muon_weight_decay
    if asked is not None:
        scale *= asked.lr
        decay = decay if asked.weight_decay is None else asked.weight_decay
    settings = {"lr": recipe.learning_rate * scale, "lr_scale": scale, "weight_decay": decay}
    return settings | ({"muon": True} if by_muon else {})


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
    """Let the next step use `learning_rate`, times what each group says."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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
        betas=recipe.betas,
        eps=recipe.eps,
        bf16_stochastic_round=any(
            parameter.dtype is torch.bfloat16 for group in groups for parameter in group["params"]
        ),
    )
    return optimizer
