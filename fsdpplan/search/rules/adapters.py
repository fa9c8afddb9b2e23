"""Adapters (LoRA): what is not planned with them, each with what to use in its place."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.model.params import adapter_target, block_tensors
from fsdpplan.search.rules.rule import Problem
from fsdpplan.spec.adapters import plain
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training


def adapter_question_problems(model: Model, training: Training) -> Iterator[Problem]:
    """Why the adapters cannot be trained in this model, in whatever layout."""
    adapters = training.adapters
    if adapters is None:
        return
    whole = plain(model)
    what = None
    if whole.experts is not None:
        what = "routed experts"
    elif whole.latent is not None:
        what = "latent attention"
    elif whole.is_patterned:
        what = "blocks of several kinds"
    if what is not None:
        yield Problem(
            reason=f"adapters in a model with {what}",
            sentence=f"adapters are planned for dense decoders, and {whole.name} has {what}: leave "
            "--lora out",
        )
        return
    matrices = {adapter_target(whole, t): t for t in block_tensors(whole) if t.is_matrix}
    found = [target for target in adapters.targets if target in matrices]
    if not found:
        yield Problem(
            reason="adapters of matrices that the model has not",
            sentence=f"{whole.name} has no {' or '.join(adapters.targets)}: use --lora-targets "
            f"{','.join(target for target in matrices if target)}",
        )
    least = min((min(matrices[target].shape) for target in found), default=adapters.rank)
    if adapters.rank > least:
        yield Problem(
            reason="a rank above a matrix",
            sentence=f"adapters of rank {adapters.rank} are larger than a matrix of {least} rows "
            f"or columns: use --lora {least} or less",
        )


def adapter_layout_problems(training: Training, layout: Layout) -> Iterator[Problem]:
    """What of a layout is not planned with adapters."""
    adapters = training.adapters
    if adapters is None:
        return
    if layout.pp > 1:
        yield Problem(
            reason="a pipeline with adapters",
            sentence=f"pp {layout.pp} with adapters is not priced: "
            "use --pp 1, with FSDP over the ranks",
        )
    if layout.sharding not in ("ddp", "fsdp"):
        yield Problem(
            reason="ZeRO with adapters",
            sentence=f"sharding {layout.sharding} shards the state of adapters, which is small: "
            "use --sharding ddp or fsdp",
        )
    if layout.activation_checkpointing == "op":
        yield Problem(
            reason="recomputation of single operators with adapters",
            sentence="activation_checkpointing op counts matrix products, and adapters have two "
            "beside each: use --activation-checkpointing full or none",
        )
    if layout.offload == "cpu":
        yield Problem(
            reason="offload with adapters",
            sentence="offload cpu moves what is trained, and adapters are small: use --offload "
            "none, and --base nf4 where the base does not fit",
        )
    if adapters.base == "nf4" and layout.tp > 1:
        yield Problem(
            reason="a base in 4 bits with tensor parallelism",
            sentence=f"tp {layout.tp} with a base in nf4: ranks would split blocks of 64 weights; "
            "use --tp 1, or --base bf16",
        )
