"""Adapters (LoRA): what is trained beside frozen linear layers, and how those are stored (QLoRA).

    y = W x + b + scale * B (A dropout(x))

A (rank x inputs) and B (outputs x rank) are plain parameters of the layer, as the frozen ones are,
so that FSDP, DDP, the optimizer and checkpoints know them as any other.

Sources: LoRA (arXiv 2106.09685), section 4.1; rsLoRA (arXiv 2312.03732); initial values as in PEFT
(`LoraLayer.reset_lora_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..config import AdaptersConfig, ModelConfig
from ..errors import TrainerError
from ..private_torch import set_dtype
from . import nf4

A, B = "lora_A", "lora_B"
"""Names of the adapters in their layer."""


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is not trained, and may be in NF4; with adapters or without.

    A layer becomes one in place: what is hooked to it stays.
    """

    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None
    codes: nn.Parameter
    block_scales: nn.Parameter
    scales: nn.Parameter
    scale: float
    dropout: float

    @property
    def is_quantised(self) -> bool:
        """Whether the weight is in NF4."""
        weight: Tensor | None = self.weight
        return weight is None

    def forward(self, input: Tensor) -> Tensor:
        weight: Tensor | None = self.weight
        if weight is None:
            stored = nf4.Quantised(self.codes, self.block_scales, self.scales)
            out = nf4.linear(input, stored, self.whole_shape, self.bias)
        else:
            out = F.linear(input, weight, self.bias)
        if self.lora_A is None or self.lora_B is None:
            return out
        if isinstance(out, DTensor):
            return out + self._beside_split(input, self.lora_A, self.lora_B)
        return out + self._beside(input, self.lora_A, self.lora_B)

    def _beside(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """What the adapters add; they may be kept in another dtype."""
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        return F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype)) * self.scale

    def _beside_split(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The same where tensor parallelism splits the weight: of columns B is split with them, and
        every rank has A; of rows A, and every rank has B and a part of the sum.

        Gradients of what every rank has are sums over the ranks, which are made where they are
        reduced; forward and backward send nothing of their own.
        """
        assert isinstance(x, DTensor)
        assert isinstance(down, DTensor)
        assert isinstance(up, DTensor)
        mesh, of_all = x.device_mesh, (Partial(),)
        if up.placements == (Shard(0),):  # by columns
            added = self._beside(
                x.to_local(grad_placements=of_all),
                down.to_local(grad_placements=of_all),
                up.to_local(),
            )
            return DTensor.from_local(added, mesh, (Shard(added.ndim - 1),), run_check=False)
        added = self._beside(x.to_local(), down.to_local(), up.to_local(grad_placements=of_all))
        return DTensor.from_local(added, mesh, of_all, run_check=False)

    @property
    def whole_shape(self) -> torch.Size:
        """Of the weight, over all ranks."""
        return torch.Size([self.out_features, self.in_features])


def targets_of(model: ModelConfig) -> dict[str, str]:
    """Name of a target -> path in a block of the layer that it is, as far as the model has it."""
    gated = model.mlp != "gelu"
    attention = {each: f"attention.w{each}" for each in ("q", "k", "v", "o")}
    network = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    if not gated:
        network = {"up": "feed_forward.w1", "down": "feed_forward.w2"}
    return attention | network


def target_widths(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name of a target that a dense model has -> (outputs, inputs)."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    widths = {
        "q": (queries, model.hidden),
        "k": (keys, model.hidden),
        "v": (keys, model.hidden),
        "o": (model.hidden, queries),
        "gate": (model.ffn_hidden, model.hidden),
        "up": (model.ffn_hidden, model.hidden),
        "down": (model.hidden, model.ffn_hidden),
    }
    return {target: widths[target] for target in targets_of(model)}


def adapter_scale(adapters: AdaptersConfig) -> float:
    """What the product of B and A is multiplied with."""
    root = math.sqrt(adapters.rank) if adapters.rslora else adapters.rank
    return adapters.alpha / root


def adapt(
    model: nn.Module, blocks: Iterable[nn.Module], config: ModelConfig, adapters: AdaptersConfig
) -> None:
    """Freeze `model`, whose parameters are in the compute dtype, and put adapters beside the target
    layers of its `blocks`, without values. Layers that are split over ranks get adapters that are
    split alike."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    paths = targets_of(config)
    chosen = {paths[target] for target in adapters.targets if target in paths}
    for block in blocks:
        for path in paths.values():
            layer = block.get_submodule(path)
            if not isinstance(layer, nn.Linear):
                raise TrainerError(
                    f"adapters beside {type(layer).__name__}, which is no nn.Linear: leave --lora "
                    "out"
                )
            _freeze(layer, adapters)
            if path in chosen:
                _put_beside(layer, adapters)


def _freeze(layer: nn.Linear, adapters: AdaptersConfig) -> None:
    layer.__class__ = FrozenLinear
    layer.register_parameter(A, None)
    layer.register_parameter(B, None)
    if adapters.base == "nf4":
        device = layer.weight.device
        layer.register_parameter("weight", None)
        for name, shape in nf4.sizes(layer.in_features * layer.out_features).items():
            stored = torch.empty(shape, dtype=torch.uint8, device=device)
            layer.register_parameter(name, nn.Parameter(stored, requires_grad=False))


def _put_beside(layer: nn.Linear, adapters: AdaptersConfig) -> None:
    assert isinstance(layer, FrozenLinear)
    layer.scale, layer.dropout = adapter_scale(adapters), adapters.dropout
    weight: Tensor | None = layer.weight
    like = layer.codes if weight is None else weight
    down = torch.empty(adapters.rank, layer.in_features, device=like.device, dtype=torch.float32)
    up = torch.empty(layer.out_features, adapters.rank, device=like.device, dtype=torch.float32)
    if isinstance(like, DTensor):
        mesh, (placement,) = like.device_mesh, like.placements
        by_columns = placement == Shard(0)
        down, up = (
            _split(down, None if by_columns else 1, mesh),
            _split(up, 0 if by_columns else None, mesh),
        )
    for name, tensor in ((A, down), (B, up)):
        layer.register_parameter(name, nn.Parameter(tensor))
        if adapters.dtype == "bf16":
            set_dtype(layer.get_parameter(name), torch.bfloat16)


def _split(tensor: Tensor, dim: int | None, mesh: DeviceMesh) -> Tensor:
    """Over the ranks of `mesh` along `dim`; None: each has all of it."""
    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(tensor, mesh, (placement,))
