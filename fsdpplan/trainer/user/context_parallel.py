"""Context parallelism of Hugging Face models: called with whole sequences, ranks take their parts.

Around attention, ranks trade heads for tokens (`ulysses`); for that the model gets an attention
function of ours, by the interface that Transformers documents for it ("Attention Interface").
Everything else in a decoder works token by token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..config import LayoutConfig
from ..errors import TrainerError
from ..parallel.context_parallel import trade_heads
from ..text.packing import IGNORED
from .targets import NUM_ITEMS, own_count

WITHOUT_MASKS = "attention of several ranks is causal over one whole sequence"


def share_sequences(model: nn.Module, layout: LayoutConfig, mesh: DeviceMesh) -> None:
    """Let the ranks of `mesh` share each sequence that `model` is called with."""
    require_plain_attention(model, layout)
    transformers: Any = sys.modules["transformers"]
    name = f"fsdpplan_{mesh.get_group().group_name}"
    masks: Any = sys.modules["transformers.masking_utils"]
    transformers.AttentionInterface.register(name, attention_over(mesh))
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)
    model.set_attn_implementation(name)  # type: ignore[operator]
    if model.config._attn_implementation != name:  # type: ignore[union-attr]
        raise TrainerError(
            f"the attention of {type(model).__name__} cannot be replaced, as cp {layout.cp} needs: "
            "plan again with --cp 1"
        )
    model.register_forward_pre_hook(OwnPart(mesh), with_kwargs=True)


def require_plain_attention(model: nn.Module, layout: LayoutConfig) -> None:
    """Raise unless all attention of `model` is causal, over all of the sequence."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    replaceable = callable(getattr(model, "set_attn_implementation", None))
    heads = getattr(config, "num_attention_heads", None)
    if not replaceable or heads is None:
        raise TrainerError(
            f"cp {layout.cp} needs a Hugging Face model, whose attention can be replaced, and "
            f"{kind} is none: plan again with --cp 1"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        raise TrainerError(
            f"cp {layout.cp} needs full attention in every layer, and {kind} has "
            "sliding windows or other kinds: plan again with --cp 1"
        )
    if heads // layout.tp % layout.cp:
        raise TrainerError(
            f"cp {layout.cp} cannot share {heads // layout.tp} heads a rank of {kind} evenly: plan "
            "--cp with a divisor of them"
        )


def attention_over(mesh: DeviceMesh) -> Callable[..., tuple[Tensor, None]]:
    """Attention as Transformers calls it, over the tokens of all ranks of `mesh`."""
    group = mesh.get_group()

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        **given: Any,
    ) -> tuple[Tensor, None]:
        others = [name for name in ("s_aux", "softcap", "sliding_window") if given.get(name)]
        if attention_mask is not None or others:
            raise TrainerError(
                f"{WITHOUT_MASKS}, without {others[0] if others else 'masks'}: leave that out, or "
                "plan again with --cp 1"
            )

        def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
            )

        out_BHTE = trade_heads(attend, group)(query, key, value)
        return out_BHTE.transpose(1, 2).contiguous(), None

    return attention


class OwnPart:
    """Before the model: of whole sequences, this rank's tokens, with their positions and targets.

    The loss is divided by the mean number of targets of a rank, so that its mean over the ranks is
    that over all targets: by what it was given as `num_items_in_batch` for whole sequences, or by
    their own number.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()

    def __call__(self, _: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, Any]:
        unknown = set(given) - {"input_ids", "labels", "use_cache", NUM_ITEMS}
        if args or unknown or "input_ids" not in given:
            raise TrainerError(
                f"{WITHOUT_MASKS}: call the model with input_ids= and labels= only, each of whole "
                f"sequences{', without ' + min(unknown) if unknown else ''}"
            )
        tokens: Tensor = given["input_ids"]
        length = tokens.shape[1]
        if length % self.ranks:
            raise TrainerError(
                f"a sequence of {length} tokens cannot be shared by {self.ranks} ranks: pad it to "
                "a multiple"
            )
        positions = torch.arange(length, device=tokens.device)[None]
        part = {**given, "input_ids": self._own(tokens), "position_ids": self._own(positions)}
        if given.get("labels") is not None:
            targets = F.pad(given["labels"], (0, 1), value=IGNORED)[:, 1:]
            part["labels"] = part["shift_labels"] = self._own(targets)
            count = given.get(NUM_ITEMS)
            part[NUM_ITEMS] = (
                own_count(targets, share=self.ranks) if count is None else count / self.ranks
            )
        return args, part

    def _own(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks, dim=1)[self.rank].contiguous()
