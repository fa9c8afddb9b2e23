"""What torch's partitioner lets stay between the two passes of a compiled function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table


def kept_between_passes(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The tensors that forward hands to backward."""
    kept: list[Tensor] = []

    def partition(joint: torch.fx.GraphModule, inputs: object, **options: object) -> object:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        values = [node.meta.get("val") for node in outputs[options["num_fwd_outputs"] :]]
        kept.extend(value for value in values if isinstance(value, Tensor))
        return forward, backward

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return kept
