"""Recomputed: which products of a block's forward backward computes again, by mode.

Source: torch.utils.checkpoint, which stops once backward has all that it reads; the trainer's
`recompute.py`, as torchtitan `apply_ac`, per-op selective; Megatron-LM `recompute_granularity`.
"""

from __future__ import annotations

from fsdpplan.cost.kernels.products import Product, block_products
from fsdpplan.cost.kernels.work import BlockWork
from fsdpplan.spec.model import Model


def reads_last_output(model: Model) -> bool:
    """Whether backward reads what the block's last projection down returns: a norm behind it, a
    gate, or the weights of routed experts do; a sum does not."""
    experts = model.experts
    return model.post_norms or (
        experts is not None and (experts.shared_gate or not experts.shared_hidden)
    )


def repeated_products(work: BlockWork) -> tuple[Product, ...]:
    """The products that backward computes again.

    full: all but the last one, where nothing reads what it returns, unless the runtime's own
    checkpoint function repeats forward to its end; op: of these every second one from the second,
    and all of routed experts, whose outputs are as many as the experts of each token.
    """
    products = block_products(work)
    if work.mode in ("none", "attention"):
        return ()
    if not (work.repeats_whole_block or reads_last_output(work.model)):
        products = products[:-1]
    if work.mode == "full":
        return products
    plain = [product for product in products if not product.is_routed]
    routed = [product for product in products if product.is_routed]
    return (*plain[1::2], *routed)
