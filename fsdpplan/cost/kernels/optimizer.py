"""Optimizer: seconds of gradient norm, clipping and update over a rank's own parameters.

Muon: which parameters it updates, what orthogonalising them costs, and what ranks exchange.

The ranks that share matrices deal them out, the costliest first, one to each rank in a round: all
parts of a rank's matrix come to it in one all-to-all in 16 bits, and go back in another. Replicas
do the same work each. Stacked experts that are split between experts are whole where they are.

Source: fsdpplan/trainer/muon.py; Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024), whose steps are X Xᵀ, its square, and the product of both with X.

Host: what FSDP2's offload has the CPUs of a node do, and how fast it copies.

Everything here waits for memory: the node's own, which its ranks share, or the link between host
and device. How many threads a rank has does not count, as long as its share of the memory is what
they wait for; the job script gives each rank its share of the cores.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`all_gather_inputs`) and
_fsdp_collectives.py (`foreach_reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.kernels.rates import matmul_seconds, memory_bytes_per_second
from fsdpplan.cost.model.formats import FP32_BYTES
from fsdpplan.cost.model.params import (
    ParameterTensor,
    block_tensors,
    kind_counts,
    trained_tensors,
)
from fsdpplan.cost.model.shards import (
    Stage,
    block_kinds,
    stage_elements,
    stage_shard_elements,
    unit_size,
)
from fsdpplan.cost.network.placement import Group, expert_shard_group, shard_group, tp_group
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.trainer_options import NEWTON_SCHULZ_STEPS
from fsdpplan.spec.training import Optimizer
from fsdpplan.spec.values import replace

ADD_BYTES_PER_PARAMETER = 12
"""An fp32 gradient is added to another: two are read, one is written."""

NORM_BYTES_PER_PARAMETER = 4
SCALE_BYTES_PER_PARAMETER = 8
"""Clipping reads gradients, then reads and writes them."""

ASSUMED_NODE_BYTES_PER_SECOND = 409.6e9
"""Memory of a node of which it is not known: two sockets of eight channels of DDR4-3200 each."""

FRESH_PAGES_BYTES_PER_SECOND = 3.5e9
"""What one thread copies into memory that the system hands out page by page: what is behind a copy
from the device into memory that is not pinned. A seventh of a copy into memory that was written
before, where both were measured (tests/benchmarks/host.py, on a CPU without GPUs)."""


def host_bytes_per_second(cluster: Cluster) -> float:
    """A rank's share of what streaming code reaches of its node's memory.

    B = fraction * node's bandwidth / devices of the node
    """
    node = cluster.host_memory_bytes_per_second or ASSUMED_NODE_BYTES_PER_SECOND
    return cluster.device.fit.host_memory_fraction * node / cluster.gpus_per_node


def link_bytes_per_second(cluster: Cluster) -> float:
    """Copies of one rank between pinned memory and its device, one way: what the link carries, or
    the rank's share of the memory that it reads or writes."""
    device = cluster.device
    return min(
        device.fit.host_link_fraction * device.host_link_bytes_per_second,
        host_bytes_per_second(cluster),
    )


def pinned_copy_seconds(
    elements: int, cluster: Cluster, *, element_bytes: int = FP32_BYTES
) -> float:
    """One way of so many elements: shards to the device before they are gathered, gradients to the
    host after they are reduced, both in the dtype of the parameters."""
    return element_bytes * elements / link_bytes_per_second(cluster)


def adding_seconds(elements: int, cluster: Cluster, *, element_bytes: int = FP32_BYTES) -> float:
    """Gradients to the host where there are others of earlier micro-batches, to which they are
    added: the host waits for the copy, which is into memory that is not pinned, and adds.

        T = e n / min(link, fresh pages) + 3 e n / B
    """
    copied = min(link_bytes_per_second(cluster), FRESH_PAGES_BYTES_PER_SECOND)
    added = ADD_BYTES_PER_PARAMETER // FP32_BYTES * element_bytes * elements
    return element_bytes * elements / copied + added / host_bytes_per_second(cluster)


MOMENTUM_BYTES_PER_PARAMETER = 68
"""fp32 momentum from the gradient (12), Nesterov's sum (12), cast to bf16 (6), packed for the
exchange (4), put together and taken apart by the owner (8), decay (8), cast back (6), added (12).
"""

STEP_BYTES_OF_GRAM = 14
"""A Newton-Schulz step scales the m x m product (4), its copy (4) and adds their sum (6), bf16."""

STEP_BYTES_OF_MATRIX = 10
"""It scales the m x n matrix (4) and adds the product to it (6), bf16."""

NORM_BYTES_OF_MATRIX = 6
"""The norm reads the matrix; dividing reads and writes it, bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Equal matrices, or stacks of them, that one rank has its part of."""

    rows: int
    columns: int
    stack: int
    """Matrices of one parameter: of experts several."""
    number: int
    """Parameters."""
    sharers: Group
    """The ranks that hold the parts of each; of one rank, if this rank has whole ones."""

    @property
    def local_elements(self) -> int:
        """Elements of all of them on one rank, padding apart."""
        elements = self.rows * self.columns * self.stack * self.number
        return -(-elements // self.sharers.ranks)


@lru_cache(maxsize=4096)
def newton_schulz_seconds(*, rows: int, columns: int, device: Device) -> float:
    """Time of orthogonalising one matrix: three products a step in bf16, and what is between."""
    m, n = sorted((rows, columns))
    products = (
        matmul_seconds(m=m, n=m, k=n, dtype="bf16", device=device)
        + matmul_seconds(m=m, n=m, k=m, dtype="bf16", device=device)
        + matmul_seconds(m=m, n=n, k=m, dtype="bf16", device=device)
    )
    traffic = NEWTON_SCHULZ_STEPS * (STEP_BYTES_OF_GRAM * m * m + STEP_BYTES_OF_MATRIX * m * n)
    traffic += NORM_BYTES_OF_MATRIX * m * n
    return NEWTON_SCHULZ_STEPS * products + traffic / memory_bytes_per_second(device)


@lru_cache(maxsize=4096)
def muon_matrices(case: Case, stage: Stage) -> tuple[Matrices, ...]:
    """What Muon updates on one rank: the matrices of the blocks."""
    layout = case.layout
    counted: dict[tuple[int, int, int, Group], int] = {}
    for kind, blocks in block_kinds(model=case.model, stage=stage):
        for tensor in block_tensors(kind):
            if tensor.is_matrix:
                rows, columns = tensor.shape[-2:]
                stack = _stack(tensor, layout) if tensor.is_expert else 1
                key = (rows, columns, stack, sharers(tensor, layout))
                counted[key] = counted.get(key, 0) + blocks
    return tuple(
        Matrices(rows=rows, columns=columns, stack=stack, number=number, sharers=group)
        for (rows, columns, stack, group), number in counted.items()
    )


def sharers(tensor: ParameterTensor, layout: Layout) -> Group:
    """The ranks that hold the parts of one matrix of `tensor`."""
    is_whole = tensor.split == "none" or (tensor.is_expert and layout.experts_over_tp)
    is_split = layout.tp > 1 and not is_whole
    inner = tp_group(layout) if is_split else Group(axis="tp", ranks=1, stride=1)
    if layout.sharding != "fsdp":
        return inner
    outer = expert_shard_group(layout) if tensor.is_expert else shard_group(layout)
    if tensor.is_expert and tensor.local_shape(layout.tp, layout.expert_ranks)[0] >= outer.ranks:
        return inner
    if inner.ranks == 1 or outer.ranks == 1:
        return outer if inner.ranks == 1 else inner
    return Group(
        axis=f"{outer.axis}*tp", ranks=outer.ranks * inner.ranks, stride=outer.stride // layout.tp
    )


def _stack(tensor: ParameterTensor, layout: Layout) -> int:
    """Experts of which one rank has whole matrices, or parts."""
    experts = tensor.local_shape(layout.tp, layout.expert_ranks)[0]
    ranks = expert_shard_group(layout).ranks
    return -(-experts // ranks) if layout.sharding == "fsdp" and experts >= ranks else experts


def stack_seconds(matrices: Matrices, device: Device) -> float:
    """Orthogonalising one parameter."""
    alone = newton_schulz_seconds(rows=matrices.rows, columns=matrices.columns, device=device)
    return matrices.stack * alone


def deal_rounds(matrices: tuple[Matrices, ...]) -> dict[Group, int]:
    """Rounds in which each group of sharers deals out its matrices."""
    numbers: dict[Group, int] = {}
    for one in matrices:
        numbers[one.sharers] = numbers.get(one.sharers, 0) + one.number
    return {group: -(-number // group.ranks) for group, number in numbers.items()}


def muon_seconds(*, matrices: tuple[Matrices, ...], device: Device) -> float:
    """Orthogonalising, on the rank that has most to do: of each round the costliest matrix."""
    total = 0.0
    for group in deal_rounds(matrices):
        costs = sorted(
            ((stack_seconds(one, device), one.number) for one in matrices if one.sharers == group),
            reverse=True,
        )
        dealt = 0
        for seconds, number in costs:
            first_round = -(-dealt // group.ranks)
            dealt += number
            total += (-(-dealt // group.ranks) - first_round) * seconds
    return total


@lru_cache(maxsize=4096)
def muon_elements(case: Case, stage: Stage, *, is_whole: bool) -> int:
    """Elements of the matrices of the blocks on one rank, of its shards with padding or, if
    `is_whole`, before FSDP shards them."""
    layout = case.layout
    total = 0
    for kind, blocks in block_kinds(model=case.model, stage=stage):
        for tensor in block_tensors(kind):
            if not tensor.is_matrix:
                continue
            group = expert_shard_group(layout) if tensor.is_expert else shard_group(layout)
            ranks = 1 if is_whole else group.ranks
            size = unit_size((tensor,), tp=layout.tp, shard_ranks=ranks, ep=layout.ep)
            total += blocks * size.shard_elements(ranks)
    return total


def muon_temporary_bytes(case: Case, stage: Stage) -> int:
    """What a round has beside the state, of the parameter that needs most:

        stack * (16 m n + 6 m²)

    The parts in fp32 and bf16, packed, arrived, put together, and the steps' X twice; of the
    m x m products three in bf16.
    """
    most = 0
    for one in muon_matrices(case, stage):
        m, n = sorted((one.rows, one.columns))
        most = max(most, one.stack * (16 * m * n + 6 * m * m))
    return most


ADAMW_BYTES_PER_PARAMETER = 28
"""Fused AdamW reads parameter, gradient and two moments and writes all but the gradient, fp32."""

FOREACH_BYTES_PER_PARAMETER = 80
"""AdamW of separate operators over lists of tensors: decay (8), first moment (12), second moment
(8 + 12), root (8), two quotients and a sum (8 + 8), update (16). Source: torch 2.13
torch/optim/adamw.py `_multi_tensor_adamw`."""

ADAMW_8BIT_BYTES_PER_PARAMETER = 16
"""Parameter read and written and gradient read in fp32, two moments read and written in a byte
each. Source: torchao torchao/optim/adam.py, `single_param_adam`, compiled to one kernel a tensor;
taken to read nothing twice for the greatest element of each 256."""

UNSCALE_BYTES_PER_PARAMETER = 8
"""With loss scaling, fp32 gradients are read and written to be divided."""

CLIP_BYTES_PER_PARAMETER = NORM_BYTES_PER_PARAMETER + SCALE_BYTES_PER_PARAMETER
"""The norm reads the fp32 gradients; clipping reads and writes them."""

HALF_COPY_BYTES_PER_PARAMETER = 6
"""fp32 masters are copied to the resident half parameters: read and written."""

HALF_GRADIENT_BYTES_PER_PARAMETER = 6
"""Half gradients are copied to fp32 for the masters: read and written."""


LISTS_SHARE = 0.87
"""Rate of kernels over lists of tensors, the optimizer's and those of clipping, as a share of that
of element-wise kernels: 2.6 of 3.0 TB/s, in six profiled steps on an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecipe:
    """What a software does with a parameter in the optimizer's step."""

    half_parameters: bool = False
    half_gradients: bool = False
    half_states: bool = False
    fused: bool = True
    optimizer: Optimizer = "adamw"
    scales_loss: bool = False

    @property
    def bytes_per_parameter(self) -> int:
        """Memory traffic of one parameter."""
        adamw = ADAMW_BYTES_PER_PARAMETER if self.fused else FOREACH_BYTES_PER_PARAMETER
        step = {
            "adamw": adamw,
            "adamw_8bit": ADAMW_8BIT_BYTES_PER_PARAMETER,
            "muon": MOMENTUM_BYTES_PER_PARAMETER,
        }[self.optimizer]
        if self.half_states:  # every tensor that is read or written is half as wide
            return (CLIP_BYTES_PER_PARAMETER + adamw) // 2
        scaling = UNSCALE_BYTES_PER_PARAMETER if self.scales_loss else 0
        half = HALF_COPY_BYTES_PER_PARAMETER if self.half_parameters else 0
        gradient = HALF_GRADIENT_BYTES_PER_PARAMETER if self.half_gradients else 0
        return CLIP_BYTES_PER_PARAMETER + scaling + step + half + gradient


def optimizer_seconds(
    *,
    local_parameters: int,
    device: Device,
    tensors: int,
    recipe: OptimizerRecipe | None = None,
    host_bytes_per_second: float | None = None,
) -> float:
    """Gradient norm, clipping and AdamW over a rank's own fp32 parameters, by bytes.

    A few kernels a hundred tensors are launched; one a tensor is the upper bound for the norm. On
    the host, which gives a rank `host_bytes_per_second`, the step waits for its memory.
    """
    recipe = recipe or OptimizerRecipe()
    traffic = recipe.bytes_per_parameter * local_parameters
    if host_bytes_per_second is not None:
        return traffic / host_bytes_per_second
    launches = tensors * device.fit.kernel_launch_seconds
    share = LISTS_SHARE if device.kind == "cuda" else 1.0
    return max(traffic / (share * memory_bytes_per_second(device)), launches)


def optimizer_elements(case: Case, stage: Stage) -> int:
    """Parameters that a rank updates."""
    model, layout = case.model, case.layout
    if layout.sharding == "ddp":
        return stage_elements(model=model, stage=stage, tp=layout.tp, ep=layout.ep)
    return stage_shard_elements(
        model=model,
        stage=stage,
        tp=layout.tp,
        shard_ranks=layout.shard_ranks,
        ep=layout.ep,
    )


def layout_optimizer_seconds(case: Case, stage: Stage) -> float:
    """Gradient norm, clipping and update on one rank, by what the runtime does with parameters.

    Of Muon without the exchange between ranks.
    """
    model, training, layout, device = case.model, case.training, case.layout, case.cluster.device
    traits = training.traits
    recipe = OptimizerRecipe(
        half_parameters=traits.half_parameters,
        half_gradients=traits.half_gradients,
        half_states=training.half_states,
        fused=not traits.foreach_optimizer,
        optimizer="adamw_8bit" if training.optimizer == "adamw_8bit" else "adamw",
        scales_loss=training.scales_loss,
    )
    by_muon, orthogonal = 0, 0.0
    if training.optimizer == "muon":
        by_muon = muon_elements(case, stage, is_whole=layout.sharding == "ddp")
        matrices = muon_matrices(case, stage)
        traffic = replace(recipe, optimizer="muon").bytes_per_parameter * by_muon
        orthogonal = muon_seconds(matrices=matrices, device=device)
        orthogonal += traffic / memory_bytes_per_second(device)
    seconds = optimizer_seconds(
        local_parameters=optimizer_elements(case, stage) - by_muon,
        device=device,
        tensors=sum(n * trained_tensors(view) for view, n in _counted(model)) // layout.pp,
        recipe=recipe,
        host_bytes_per_second=host_bytes_per_second(case.cluster)
        if layout.offload == "cpu"
        else None,
    )
    return seconds + orthogonal


def _counted(model: Model) -> tuple[tuple[Model, int], ...]:
    """Blocks by kind where a pattern says so; others are taken to be alike."""
    return kind_counts(model) if model.is_patterned else ((model, model.layers),)
