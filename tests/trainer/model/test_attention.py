"""Attention of the reference decoder: positions, windows, documents, sinks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpplan.trainer.model import attention, documents
from fsdpplan.trainer.model import decoder as decoder_module
from fsdpplan.trainer.model.attention import Attention, AttentionCore, make_masks
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.positions import alibi_slopes, with_alibi
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.step import model_inputs
from fsdpplan.trainer.text.packing import pack
from tests.trainer import plans
from tests.trainer.hf_cases import ALIBI, OURS, VOCAB, WIDTHS
from tests.trainer.hf_names import PROJECTIONS

transformers = pytest.importorskip("transformers")

TOKENS = 24


def test_queries_and_keys_of_all_heads_are_normed_as_in_olmo2() -> None:
    torch.manual_seed(0)
    config = transformers.Olmo2Config(**WIDTHS, attn_implementation="eager")
    from transformers.models.olmo2 import modeling_olmo2

    theirs = modeling_olmo2.Olmo2Attention(config, layer_idx=0)
    ours = Attention(
        plans.config_of(**OURS | {"head_dim": 16, "qk_norm": True}, qk_norm_width="all_heads")
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    weights = {
        PROJECTIONS[f"self_attn.{name.rpartition('.')[0]}"].removeprefix("attention.")
        + ".weight": w
        for name, w in theirs.state_dict().items()
    }
    ours.load_state_dict(weights)
    x = torch.randn(2, TOKENS, 48)
    turns = modeling_olmo2.Olmo2RotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=turns, attention_mask=mask)
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-4)


def test_slopes_between_powers_of_two_are_those_of_bloom() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (4, 6, 12, 112):
        bias = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)
        torch.testing.assert_close(alibi_slopes(heads, torch.device("cpu")), bias[:, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_fall_with_distance_far_beyond_what_bf16_counts_to(dtype: torch.dtype) -> None:
    length, slope = 3000, 0.25
    q, k = torch.zeros(1, 1, length, 8, dtype=dtype), torch.zeros(1, 1, length, 8, dtype=dtype)
    q, k = with_alibi(q, k, slopes_H=torch.tensor([slope]), scale=0.5)
    scores = 0.5 * (q[0, 0, -1].float() @ k[0, 0].float().T)
    expected = slope * torch.arange(length)
    torch.testing.assert_close(scores - scores[0], expected.float())


FORMS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": plans.GPT2_STYLE,
    "alibi": ALIBI,
    "window": {"sliding_window": 5, "full_attention_every": 2},
    "sinks": {"attention_sinks": True},
    "sinks, window": {"attention_sinks": True, "sliding_window": 5, "full_attention_every": 2},
    "latent": {
        "kv_heads": 4,
        "qk_norm": False,
        "latent": {"kv_rank": 8, "rope_head_dim": 4, "value_head_dim": 8},
    },
}


def tiny(form: str) -> Decoder:
    decoder = Decoder(plans.config_of(**FORMS[form]))
    initialise(decoder, seed=0, layers=4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(10) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    return decoder


def packed(lengths: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Tokens, and what a model is given beside them, of rows of documents so long."""
    starts = torch.zeros(len(lengths), sum(lengths[0]) + 1, dtype=torch.bool)
    for row, ends in zip(starts, map(itertools.accumulate, lengths), strict=True):
        row[list(ends)] = True
    batch = pack(torch.randint(VOCAB, starts.shape), starts)
    return {"tokens_BT": batch.tokens, **model_inputs(batch)}


LENGTHS = ((5, 1, 10), (16,))
"""Two rows of 16 tokens; the longer documents are longer than the window."""


def apart(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Each document of LENGTHS by itself."""
    rows = [
        torch.cat([decoder(part) for part in row[None].split(lengths, dim=1)], dim=1)
        for row, lengths in zip(tokens, LENGTHS, strict=True)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("by_kernel", [False, True], ids=["one by one", "kernel"])
@pytest.mark.parametrize("form", FORMS)
def test_documents_in_one_sequence_are_as_apart(
    form: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, batch = tiny(form), packed(LENGTHS)
    weights = [w for w in decoder.parameters() if w.requires_grad]
    pull = torch.randn(2, 16, decoder.config.vocab)
    expected = apart(decoder, batch["tokens_BT"])
    gradients = torch.autograd.grad((expected * pull).sum(), weights)
    if by_kernel and "sinks" not in form:  # which it does not know
        monkeypatch.setattr(documents, "windowed_kernel", kernel_by_hand)
        monkeypatch.setattr(decoder_module, "takes_windows", lambda *_: True)
    found = decoder(**batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(
        torch.autograd.grad((found * pull).sum(), weights), gradients, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_no_tensor_is_as_large_as_a_sequence_squared() -> None:
    """Of 512 tokens, in documents of 16: what the CPU's kernels are given and what is kept."""
    decoder = Decoder(plans.config_of(sliding_window=8, full_attention_every=2, layers=2))
    decoder.requires_grad_(requires_grad=False)
    batch = packed(((16,) * 32,))
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
            largest = max(largest, *sizes, 0)
            return out

    with Largest():
        decoder(**batch)
    assert largest < 512 * 512 / 4


@pytest.mark.parametrize("form", FORMS)
def test_no_token_sees_a_later_one(form: str) -> None:
    decoder = tiny(form)
    tokens = torch.randint(VOCAB, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % VOCAB
    torch.testing.assert_close(decoder(tokens)[:, :9], decoder(changed)[:, :9])


def test_blocks_share_masks_and_need_none_for_whole_sequences() -> None:
    config = plans.config_of(sliding_window=5, full_attention_every=2)
    like = torch.zeros(0)
    masks = make_masks(config, {0, 5}, length=24, like=like)
    assert set(masks) == {5}
    assert not make_masks(config, {0, 5}, length=5, like=like)
    seen = (masks[5][0, 0] == 0).sum(1)
    assert seen.tolist() == [1, 2, 3, 4] + [5] * 20


def test_masks_are_made_once_for_all_sequences() -> None:
    decoder = tiny("window")
    tokens = torch.randint(VOCAB, (2, 16))
    masks = [decoder._masks(decoder.embed(tokens)) for _ in range(2)]
    assert masks[0] is masks[1]


def kernel_by_hand(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *_: object, **given: Any
) -> Tensor:
    """What torch's documentation says of `varlen_attn`: rows of all sequences, windows by (left,
    right), key heads that several query heads share."""
    (left, right), groups = given["window_size"], q.shape[1] // k.shape[1]
    left = left if left >= 0 else len(q)
    assert right == 0
    assert given["enable_gqa"]
    whole = []
    for first, end in itertools.pairwise(starts.tolist()):
        at = torch.arange(end - first)
        distance = at[:, None] - at[None]
        heads = [x[first:end].transpose(0, 1) for x in (q, k, v)]
        heads[1:] = [x.repeat_interleave(groups, dim=0) for x in heads[1:]]
        scores = heads[0] @ heads[1].transpose(1, 2) * given["scale"]
        scores = scores.masked_fill((distance < 0) | (distance > left), float("-inf"))
        whole.append((scores.softmax(-1) @ heads[2]).transpose(0, 1))
    return torch.cat(whole)


def test_windows_of_the_kernel_are_those_of_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, tokens = tiny("window"), torch.randint(VOCAB, (2, 16))
    by_masks = decoder(tokens)
    monkeypatch.setattr(documents, "windowed_kernel", kernel_by_hand)
    monkeypatch.setattr(attention, "takes_windows", lambda *_: True)
    monkeypatch.setattr(attention, "is_fake", lambda _: True)
    decoder._kept_masks = (None, {})
    torch.testing.assert_close(decoder(tokens), by_masks, rtol=1e-4, atol=1e-4)
    assert decoder._kept_masks[1] == {}


def test_a_head_with_a_large_sink_gives_nothing() -> None:
    core = AttentionCore(0.5)
    q = k = v = torch.ones(1, 2, 6, 8)
    out = core(q, k, v, sinks_H=torch.tensor([60.0, -60.0]))
    torch.testing.assert_close(out[:, 0], torch.zeros(1, 6, 8))
    torch.testing.assert_close(out[:, 1], torch.ones(1, 6, 8))
