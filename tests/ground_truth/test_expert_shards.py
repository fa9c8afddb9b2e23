"""Expert shards: what `fully_shard` keeps and gathers of a block with routed experts.

The block is wrapped as torchtitan wraps it: its experts, already split over the expert-parallel
ranks, are a unit over the ranks that are left, sharded on dim 1 where they are fewer than those.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from fsdpplan.cost.model.params import block_tensors  # noqa: E402
from fsdpplan.cost.model.shards import block_size, expert_size  # noqa: E402
from fsdpplan.files.catalogue import load_model  # noqa: E402
from fsdpplan.spec.model import Model  # noqa: E402
from fsdpplan.trainer.private_torch import fake_tensors  # noqa: E402
from fsdpplan.trainer.rehearse.counting import CollectiveCounter, mesh_axes  # noqa: E402
from fsdpplan.trainer.rehearse.fake_world import fake_world  # noqa: E402


class Holder(nn.Module):
    """Parameters of given shapes, all of which forward uses."""

    def __init__(self, shapes: list[tuple[int, ...]], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.held = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        return x + sum(parameter.flatten()[0] for parameter in self.held)


def kept_and_gathered(model: Model, *, ep: int, shard_ranks: int) -> tuple[int, int]:
    """Elements of rank 0's shards, and of the buffers that forward gathers."""
    expert_ranks = shard_ranks // ep
    tensors = block_tensors(model)
    with fake_world(shard_ranks):
        whole = init_device_mesh("cpu", (shard_ranks,), mesh_dim_names=("dp_shard",))
        names = ("efsdp", "ep")
        split = init_device_mesh("cpu", (expert_ranks, ep), mesh_dim_names=names)
        with torch.device("meta"):
            experts = Holder([t.local_shape(1, ep) for t in tensors if t.is_expert])
            block = Holder([t.shape for t in tensors if not t.is_expert], experts)
        few = model.experts is not None and model.experts.experts < shard_ranks
        fully_shard(
            experts, mesh=split["efsdp"], shard_placement_fn=lambda _: Shard(1) if few else None
        )
        fully_shard(block, mesh=whole)
        counter = CollectiveCounter(mesh_axes(whole))
        with fake_tensors():
            block.to_empty(device="cpu")
            shards = [p.to_local() for p in block.parameters() if isinstance(p, DTensor)]
            with counter:
                block(torch.zeros(1))
    gathered = sum(row.bytes for key, row in counter.rows.items() if key[0] == "all_gather")
    return sum(prod(shard.shape) for shard in shards), gathered // 4


@pytest.mark.parametrize(
    ("name", "ep", "shard_ranks"),
    [
        ("mixtral-8x7b", 8, 64),  # one expert a rank, split by rows over eight
        ("mixtral-8x7b", 4, 8),  # two experts a rank, one for each of two
        ("mixtral-8x7b", 2, 16),
        ("qwen3-30b-a3b", 8, 64),
        ("deepseek-v2-lite", 8, 16),
        ("qwen1.5-moe-a2.7b", 4, 8),  # fifteen experts a rank over two: padded
    ],
)
def test_shards_and_gathers_of_a_block_are_those_of_fully_shard(
    name: str, ep: int, shard_ranks: int
) -> None:
    model = replace(load_model(name), hidden=512)
    block = block_size(model=model, tp=1, shard_ranks=shard_ranks, ep=ep)
    experts = expert_size(model=model, tp=1, shard_ranks=shard_ranks, ep=ep)
    expert_ranks = shard_ranks // ep
    kept, gathered = kept_and_gathered(model, ep=ep, shard_ranks=shard_ranks)
    assert gathered == block.padded_elements + experts.padded_elements
    assert kept == block.shard_elements(shard_ranks) + experts.shard_elements(expert_ranks)
