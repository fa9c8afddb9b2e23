"""Documents: attention of packed sequences, inside each document and nowhere else.

Nothing here is as large as a sequence squared, and keys stay as few as the model has. On CUDA
PyTorch's kernel of sequences of any length is given where documents end; it takes windows, too.
Elsewhere, and of what it does not take (fp32, wide heads, sinks, torch before 2.12), documents go
one by one through `scaled_dot_product_attention`.

Shape suffixes: B batch, T sequence, N documents of a row, M tokens of all rows, H heads, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..private_torch import is_fake
from ..torch_versions import windowed_kernel

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of queries, keys and values of one document, (1, H, tokens, E) each, under a mask that
is added to the scores; None: each query sees the keys up to its own."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of a micro-batch are, for whoever attends to them."""

    bounds: Tensor
    """(B * N + 1,), int32: where each begins in the tokens of all rows, and the end of all."""
    longest: int
    """No document has more tokens."""
    lengths: list[int] | None
    """Tokens of each, known to the host; None where the kernel is used, which needs no list."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """By window, once for all blocks: of a piece of a document that is longer."""


def documents_of(ends_BN: Tensor, longest: int, *, length: int, by_kernel: bool) -> Documents:
    """Of rows of `length` tokens, whose documents end at `ends_BN`.

    The host waits for a device that knows the ends, once a forward pass, where it is to go from
    document to document.
    """
    first = torch.arange(len(ends_BN), device=ends_BN.device, dtype=torch.int32)[:, None] * length
    bounds = torch.cat([first.flatten()[:1], (ends_BN + first).flatten()])
    lengths = None if by_kernel else _lengths(bounds, rows=len(ends_BN), length=length)
    return Documents(bounds=bounds, longest=longest, lengths=lengths)


def _lengths(bounds: Tensor, *, rows: int, length: int) -> list[int]:
    if is_fake(bounds):  # without values: of documents as long as each other nothing else differs
        documents = min(max(1, (len(bounds) - 1) // rows), length)
        row = [length // documents] * documents
        row[-1] += length - sum(row)
        return row * rows
    return [tokens for tokens in bounds.diff().tolist() if tokens]


def attend_by_kernel(
    q_BHTE: Tensor,
    k_BHTE: Tensor,
    v_BHTE: Tensor,
    *,
    bounds: Tensor,
    longest: int,
    window: int,
    scale: float,
) -> Tensor:
    """Each query sees what is between two `bounds` up to itself, at most `window` tokens of it; 0:
    all. Key heads may be fewer than query heads."""
    assert windowed_kernel is not None
    batch, length = q_BHTE.shape[0], q_BHTE.shape[2]
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q_BHTE, k_BHTE, v_BHTE))
    out = windowed_kernel(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=True,
    )
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def attend_one_by_one(
    q_BHTE: Tensor,
    k_BHTE: Tensor,
    v_BHTE: Tensor,
    *,
    documents: Documents,
    window: int,
    attend: Attend,
) -> Tensor:
    """The same by `attend` of one document after the other."""
    assert documents.lengths is not None
    batch, length = q_BHTE.shape[0], q_BHTE.shape[2]
    if 0 < window < max(documents.lengths) and window not in documents.masks:
        documents.masks[window] = window_mask(q_BHTE, queries=window, before=window, window=window)
    mask = documents.masks.get(window)
    rows = (heads.transpose(1, 2).flatten(0, 1) for heads in (q_BHTE, k_BHTE, v_BHTE))
    # split, whose backward is one cat: that of an index is a whole tensor for each document
    lengths = documents.lengths
    parts = (torch.split(heads.transpose(0, 1)[None], lengths, dim=2) for heads in rows)
    out = [
        _attend_in_window(q, k, v, window=window, mask=mask, attend=attend)[0].transpose(0, 1)
        for q, k, v in zip(*parts, strict=True)
    ]
    out_MHE = torch.cat(out)
    return out_MHE.view(batch, length, *out_MHE.shape[1:]).transpose(1, 2)


def _attend_in_window(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, mask: Tensor | None, attend: Attend
) -> Tensor:
    """One document; longer than the window, in pieces of queries with the keys that they see."""
    length = q.shape[2]
    if mask is None or length <= window:
        return attend(q, k, v, None)
    pieces = [attend(q[:, :, :window], k[:, :, :window], v[:, :, :window], None)]
    for start in range(window, length, window):
        stop = min(start + window, length)
        before = start - window
        pieces.append(
            attend(
                q[:, :, start:stop],
                k[:, :, before:stop],
                v[:, :, before:stop],
                mask[:, :, : stop - start, : stop - before],
            )
        )
    return torch.cat(pieces, dim=2)


def window_mask(like: Tensor, *, queries: int, before: int, window: int) -> Tensor:
    """(1, 1, queries, before + queries): 0 where a query sees a key, of which `before` stand before
    the first query's own; -inf elsewhere."""
    none = like.new_full((queries, before + queries), float("-inf"))
    return (none.triu(before + 1) + none.tril(before - window))[None, None]
