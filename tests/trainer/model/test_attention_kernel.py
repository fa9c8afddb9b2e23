"""The cost model prices the attention that the trainer computes: one rule, held together."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdpplan.cost.model.attention_kernel import documents_one_by_one, masked_share, takes_windows
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Dropout, Training
from fsdpplan.trainer.model import attention
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.torch_versions import windowed_kernel
from tests.cost.problems import SMALL
from tests.trainer import plans

TORCH = "2.12" if windowed_kernel is not None else "2.11"
"""As far as attention is concerned."""
DEVICE = load_cluster("dgx-h100", gpus=8).cluster.device
SEQ_LEN, WINDOW = 512, 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

WINDOWED = replace(SMALL, sliding_window=WINDOW, full_attention_every=4)
MODELS = {
    "plain": WINDOWED,
    "sinks": replace(WINDOWED, attention_sinks=True),
    "alibi": replace(WINDOWED, positions="alibi"),
    "odd heads": replace(WINDOWED, head_dim=60),
    "wide heads": replace(WINDOWED, head_dim=288),
    "widest heads": replace(WINDOWED, head_dim=256),
    "no windows": SMALL,
    "windows that are long enough": replace(WINDOWED, sliding_window=SEQ_LEN),
}


@pytest.mark.parametrize(
    ("model", "precision", "dropout", "packed"),
    list(product(MODELS.values(), DTYPES, (0.0, 0.1), (False, True))),
)
def test_what_is_priced_is_what_the_trainer_is_given(
    model: Model, precision: Any, dropout: float, packed: bool
) -> None:
    config = plans.config_of_model(model)
    with FakeTensorMode():
        like = torch.empty(0, dtype=DTYPES[precision])
        by_kernel = attention.takes_windows(config, like, dropout)
        masks = attention.make_masks(
            config, {0, model.sliding_window}, length=SEQ_LEN, like=like, dropout=dropout
        )
    training = Training(
        seq_len=SEQ_LEN,
        global_batch=8,
        precision=precision,
        torch=TORCH,
        packed=packed,
        dropout=Dropout(attention=dropout),
    )
    given = {"model": model, "training": training, "device": DEVICE}
    assert takes_windows(**given) == by_kernel
    assert documents_one_by_one(**given) == (packed and not by_kernel)
    share = model.windowed_blocks / model.layers if masks else 0
    assert masked_share(**given) == share


def test_of_a_whole_sequence_under_a_mask_all_scores_are_computed() -> None:
    """Of sinks: in blocks with a window queries and keys of all tokens meet, and a sink."""
    model = replace(MODELS["sinks"], layers=4, hidden=64, ffn_hidden=64, heads=4, kv_heads=2)
    model = replace(model, head_dim=16, vocab=61)
    decoder = Decoder(plans.config_of(**asdict(model)))
    met = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs["attn_mask"]
        met.append((args[0].shape[2], args[1].shape[2], None if mask is None else mask.shape[-2:]))

    for module in decoder.modules():
        if isinstance(module, attention.AttentionKernel):
            module.register_forward_pre_hook(record, with_kwargs=True)
    decoder(torch.randint(0, 61, (1, SEQ_LEN)))
    whole = SEQ_LEN + 1
    assert met == [(whole, whole, (whole, whole))] * 3 + [(whole, whole, None)]
    training = Training(seq_len=SEQ_LEN, global_batch=1)
    assert masked_share(model=model, training=training, device=DEVICE) == 3 / 4
