"""A mixture of experts: each token visits the `active` experts that its router scores best.

No token is dropped; tokens that fill up a row visit nobody, and count nowhere. How experts are kept
busy is in balance.py.

Routers are those of the plan's model: scores in fp32 by softmax over all experts or by a sigmoid of
each, the chosen ones' divided by their sum or not, scaled or not, and experts in groups of which a
token visits a few (Mixtral, Qwen, GPT-OSS, DeepSeek-V2 and V3, Kimi K2).

Shape suffixes: N tokens, E experts, G groups of experts, K chosen experts of each token,
R = N * K copies of tokens, D hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..config import ExpertsConfig, RouterConfig
from ..parallel.autograd_collectives import sum_gradient
from ..private_torch import is_fake
from ..torch_versions import has_grouped_mm
from .feed_forward import FeedForward, activate
from .norms import outside_autocast

GROUP_ROWS = 8
"""On CUDA a group of rows begins at 16 bytes: 8 numbers of bf16."""


LEAST_SUM = 1e-20
"""Added to a sum of sigmoids, so that it may be divided by."""


class StackedLinear(nn.Module):
    """One linear layer for each expert: `weight` (experts, outputs, inputs)."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(experts, outputs)) if bias else None
        nn.init.normal_(self.weight, std=0.02)
        self.inputs_over: DeviceMesh | None = None
        """Ranks that have a part of the inputs each, under tensor parallelism."""

    def forward(self, rows_RD: Tensor, groups: Groups) -> Tensor:
        """`rows_RD`, sorted by expert, each through its expert."""
        weight = local(self.weight).to(rows_RD.dtype)
        bias = None if self.bias is None else local(self.bias).to(rows_RD.dtype)
        if bias is not None and self.inputs_over is not None:
            # Their outputs are summed, so each adds its share.
            bias = sum_gradient(bias, self.inputs_over) / self.inputs_over.size()
        return groups.multiply(rows_RD, weight, bias)


class Groups:
    """Which expert each of some rows, sorted by expert, visits."""

    def __init__(self, counts: Tensor, rows_RD: Tensor, inner: int) -> None:
        """`counts` are rows of each expert (int64), `inner` the experts' own width."""
        self.counts, self.rows = counts, len(rows_RD)
        self.offsets: Tensor | None = None
        self.sizes: list[int] = []
        if takes_grouped_mm(rows_RD, inner):
            self.offsets = counts.cumsum(0).int()
        else:
            self.sizes = host_sizes(counts, total=self.rows)

    def multiply(self, rows_RD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Each row times the transposed weight of its expert, plus its bias."""
        if self.offsets is None:
            biases = [None] * len(weight) if bias is None else bias.unbind()
            *rows, behind = torch.split(rows_RD, [*self.sizes, len(rows_RD) - sum(self.sizes)])
            parts = zip(rows, weight.unbind(), biases, strict=True)
            nobodys = behind.new_zeros(len(behind), weight.shape[-2])
            return torch.cat([*(F.linear(*part) for part in parts), nobodys])
        with outside_autocast(rows_RD):
            out = F.grouped_mm(rows_RD, weight.transpose(-2, -1), offs=self.offsets)
        if bias is None:
            return out
        expert = torch.searchsorted(self.offsets, self._row_numbers(rows_RD), right=True)
        # Rows behind the last group are nobody's, and so are their gradients, which may be any
        # number: a bias of their own takes them.
        return out + F.pad(bias, (0, 0, 0, 1))[expert]

    def _row_numbers(self, rows_RD: Tensor) -> Tensor:
        return torch.arange(len(rows_RD), device=rows_RD.device, dtype=torch.int32)


class GroupedExperts(nn.Module):
    """The routed experts of a block."""

    def __init__(self, hidden: int, config: ExpertsConfig, *, mlp: str) -> None:
        super().__init__()
        self.mlp = mlp
        stacked = partial(StackedLinear, config.experts, bias=config.bias)
        self.w1 = stacked(hidden, config.hidden)
        self.w2 = stacked(config.hidden, hidden)
        if mlp != "gelu":
            self.w3 = stacked(hidden, config.hidden)

    def forward(self, rows_RD: Tensor, counts: Tensor) -> Tensor:
        """`rows_RD`, sorted by expert, each through its expert; `counts` are rows of each."""
        inner = local(self.w1.weight).shape[1]
        aligned = rows_RD.is_cuda and takes_grouped_mm(rows_RD, inner)
        if not aligned:
            return self._run(rows_RD, Groups(counts, rows_RD, inner))
        padded_counts = -(-counts // GROUP_ROWS) * GROUP_ROWS
        at = padded_places(counts, padded_counts, rows=len(rows_RD))
        room = len(rows_RD) + len(counts) * (GROUP_ROWS - 1)
        room = -(-room // GROUP_ROWS) * GROUP_ROWS
        padded = rows_RD.new_zeros(room, rows_RD.shape[1]).index_copy(0, at, rows_RD)
        return self._run(padded, Groups(padded_counts, padded, inner))[at]

    def _run(self, rows_RD: Tensor, groups: Groups) -> Tensor:
        inner = activate(self.w1(rows_RD, groups), self.mlp)
        if self.mlp != "gelu":
            inner = inner * self.w3(rows_RD, groups)
        out: Tensor = self.w2(inner, groups)
        return out


class MixtureOfExperts(nn.Module):
    """Router, routed experts, and the shared experts that every token visits."""

    expert_bias: Tensor
    """Of the choice, one for each expert."""
    counts: Tensor
    """Tokens of this rank that each expert got in the step under way."""
    probabilities: Tensor
    """Of a softmax router: the sums of its scores, over the tokens that are counted."""
    pressure: Tensor
    """Of a softmax router: the gradient of the auxiliary loss by each token's scores, known when
    backward begins."""

    def __init__(self, hidden: int, config: ExpertsConfig, *, mlp: str) -> None:
        super().__init__()
        self.config = config
        self.router = Scores(hidden, config.experts, bias=config.router_bias)
        self.experts = GroupedExperts(hidden, config, mlp=mlp)
        self.shared_experts = (
            FeedForward(hidden, config.shared_hidden, mlp=mlp, bias=False)
            if config.shared_hidden
            else None
        )
        self.shared_gate = Scores(hidden, 1, bias=False) if config.shared_gate else None
        self.register_buffer("expert_bias", torch.zeros(config.experts))
        self.register_buffer(
            "counts", torch.zeros(config.experts, dtype=torch.int64), persistent=False
        )
        self.is_pressed = False
        """Whether an auxiliary loss presses the router towards balance."""
        if config.router.scores == "softmax":
            for name in ("probabilities", "pressure"):
                self.register_buffer(name, torch.zeros(config.experts), persistent=False)

    def forward(self, x_BTD: Tensor, real_BT: Tensor | None = None) -> Tensor:
        """What the experts give each token; nothing (but the shared ones') where `real_BT` says
        that a token is there to fill up its row."""
        x_ND = x_BTD.flatten(0, 1)
        real_N = None if real_BT is None else real_BT.flatten()
        weights_NK, chosen_NK = self.route(x_ND, real_N)
        flat = chosen_NK.flatten()
        counts = self.counts.new_zeros(self.config.experts + 1)  # the last one is nobody's
        counts = counts.scatter_add(0, flat, torch.ones_like(flat))[:-1]
        self.counts.add_(counts)
        order = flat.argsort(stable=True)
        rows = x_ND[order // self.config.active]
        if real_N is None:
            rows = self.experts(rows, counts)
        else:
            # behind all groups, where kernels leave any number, in gradients as well
            fills_R1 = ~real_N[order // self.config.active][:, None]
            rows = self.experts(rows.masked_fill(fills_R1, 0), counts).masked_fill(fills_R1, 0)
        # Put back in the order of tokens; a permutation, so nothing is summed in any order.
        copies = rows[order.argsort()].unflatten(0, (-1, self.config.active))
        out = (copies * weights_NK.to(rows.dtype)[..., None]).sum(1)
        if self.shared_experts is not None:
            shared = self.shared_experts(x_ND)
            if self.shared_gate is not None:
                shared = shared * torch.sigmoid(self.shared_gate(x_ND)).to(shared.dtype)
            out = out + shared
        whole: Tensor = out.view_as(x_BTD)
        return whole

    def route(self, x_ND: Tensor, real_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights, numbers) of each token's experts (N, K); the number of nobody, E, where a token
        is not real."""
        with outside_autocast(x_ND):
            logits_NE = self.router(x_ND)
            scores_NE = scores_of(logits_NE.detach(), self.config.router)
            chosen_NK = self.choose(scores_NE)
            if self.is_pressed:
                real_NE = scores_NE if real_N is None else scores_NE * real_N[:, None]
                self.probabilities.add_(real_NE.sum(0))
                logits_NE = pressed(logits_NE, real_NE, self.pressure)
            weights_NK = weights_of(logits_NE, chosen_NK, self.config.router)
            if real_N is not None:
                chosen_NK = chosen_NK.masked_fill(~real_N[:, None], self.config.experts)
            return weights_NK, chosen_NK

    def choose(self, scores_NE: Tensor) -> Tensor:
        """The experts with the best scores, each with its bias, in the best groups."""
        router = self.config.router
        biased_NE = scores_NE + self.expert_bias
        if router.groups > 1:
            biased_NGE = biased_NE.view(len(biased_NE), router.groups, -1)
            groups_NG = biased_NGE.topk(router.group_best, dim=-1).values.sum(-1)
            best = groups_NG.topk(router.groups_chosen, dim=-1).indices
            others_NG = torch.ones_like(groups_NG, dtype=torch.bool).scatter(-1, best, False)
            biased_NE = biased_NGE.masked_fill(others_NG[..., None], -torch.inf).flatten(-2)
        return biased_NE.topk(self.config.active, dim=-1).indices


def mixtures(part: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures of the blocks of `part`."""
    return [module for module in part.modules() if isinstance(module, MixtureOfExperts)]


def scores_of(logits_NE: Tensor, router: RouterConfig) -> Tensor:
    """How well each expert suits each token."""
    return logits_NE.sigmoid() if router.scores == "sigmoid" else logits_NE.softmax(-1)


def pressed(logits_NE: Tensor, scores_NE: Tensor, pressure_E: Tensor) -> Tensor:
    """`logits_NE`, whose gradient is that of `(scores_NE @ pressure_E).sum()`, too; `scores_NE` are
    their softmax, zero where a token is not pressed."""
    same: Tensor = _Pressed.apply(logits_NE, scores_NE, pressure_E)  # type: ignore[no-untyped-call]
    return same


class _Pressed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NE: Tensor, scores_NE: Tensor, pressure_E: Tensor) -> Tensor:
        ctx.save_for_backward(scores_NE, pressure_E)
        return logits_NE.view_as(logits_NE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _press(*gradients, *ctx.saved_tensors), None, None


@torch.library.custom_op(
    "fsdpplan::press",
    mutates_args=(),
    schema="(Tensor gradient, Tensor scores, Tensor pressure) -> Tensor",
)
def _press(gradient_NE: Tensor, scores_NE: Tensor, pressure_E: Tensor) -> Tensor:
    """`gradient_NE` by logits, with that of `(scores_NE @ pressure_E).sum()`.

    One operator that takes the gradient: a compiler may make a product of what forward has saved in
    forward already, when the pressure is not known yet.
    """
    push_NE = scores_NE * pressure_E
    # d softmax = diag(s) - s s'
    return gradient_NE + push_NE - scores_NE * push_NE.sum(-1, keepdim=True)


@_press.register_fake
def _(gradient_NE: Tensor, scores_NE: Tensor, pressure_E: Tensor) -> Tensor:
    return torch.empty_like(gradient_NE)


def weights_of(logits_NE: Tensor, chosen_NK: Tensor, router: RouterConfig) -> Tensor:
    """What each chosen expert's output counts for.

    A softmax over all that is divided by the sum of the chosen is the softmax over the chosen.
    """
    if router.scores == "softmax" and router.normalised:
        weights_NK = logits_NE.gather(-1, chosen_NK).softmax(-1)
    else:
        weights_NK = scores_of(logits_NE, router).gather(-1, chosen_NK)
        if router.normalised:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + LEAST_SUM)
    return weights_NK if router.scaling == 1.0 else weights_NK * router.scaling


class Scores(nn.Linear):
    """Numbers of each token, computed in fp32 whatever the weight is gathered in."""

    parts_over: DeviceMesh | None = None
    """Ranks that each see a part of the gradient of all tokens, under tensor parallelism."""

    def forward(self, x_ND: Tensor) -> Tensor:
        weight, bias = self._own(self.weight), self._own(self.bias)
        assert weight is not None
        with outside_autocast(x_ND):
            return F.linear(x_ND.float(), weight, bias)

    def _own(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        mine = local(parameter).float()
        return mine if self.parts_over is None else sum_gradient(mine, self.parts_over)


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def takes_grouped_mm(rows_RD: Tensor, inner: int) -> bool:
    """Whether one kernel multiplies all experts: rows begin at 16 bytes, and are bf16, unless they
    are the CPU's and have values (torch 2.13)."""
    numbers = 16 // rows_RD.element_size()
    fits = rows_RD.shape[1] % numbers == 0 and inner % numbers == 0
    takes_any_dtype = not (rows_RD.is_cuda or is_fake(rows_RD))
    return has_grouped_mm() and fits and (rows_RD.dtype == torch.bfloat16 or takes_any_dtype)


def padded_places(counts: Tensor, padded_counts: Tensor, *, rows: int) -> Tensor:
    """Where each of `rows`, sorted by expert, stands when the groups are as long as padded."""
    shift = (padded_counts - counts).cumsum(0) - (padded_counts - counts)
    numbers = torch.arange(rows, device=counts.device)
    expert = torch.searchsorted(counts.cumsum(0), numbers, right=True)
    return numbers + shift[expert.clamp(max=len(counts) - 1)]


def host_sizes(counts: Tensor, *, total: int) -> list[int]:
    """`counts` as numbers; of fake tensors, which have no values, `total` split evenly."""
    return balanced(total, len(counts)) if is_fake(counts) else counts.tolist()


def balanced(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole numbers that differ by one at most."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]
