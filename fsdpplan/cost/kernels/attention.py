"""Attention: time of one block's softmax attention on one rank, fused or with scores in memory.

    fused      tiles of scores at a fitted share of the peak; only tiles below the diagonal, and in
               a window where the kernel knows windows (`cost/model/attention_kernel.py`)
    unfused    batched matmuls over the whole square; scores written, scaled, masked, normalised

Attention computes in the activations' number format under fp8 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, log, log2
from typing import Literal

from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.rates import (
    ALIGNED_BYTES,
    matmul_seconds,
    memory_bytes_per_second,
)
from fsdpplan.cost.model.attention_kernel import AttentionKernel
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Precision

TILE = 128
"""Queries and keys of one tile of scores. FlashAttention-2 and 3 take 64 to 192."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """What one pass of a fused kernel costs beside its tiles at their full rate."""

    fill_tiles: float
    """What a row of tiles costs beyond its tiles, in tiles: loading the queries, the first scores
    with nothing beside them, the last rescaling and the store; what runs before and behind."""
    softmax_channels: float
    """What the exponential of one score and the rescaling of its row cost, in channels of a head:
    narrow heads are slower by that."""
    row_tiles: int = 1
    """Tiles of queries that one multiprocessor works on together."""


Direction = Literal["forward", "backward"]

KERNEL_SHAPES: dict[tuple[AttentionKernel, Direction], KernelShape] = {
    ("flash", "forward"): KernelShape(fill_tiles=1.0, softmax_channels=16),
    ("flash", "backward"): KernelShape(fill_tiles=1.0, softmax_channels=16),
    ("efficient", "forward"): KernelShape(fill_tiles=1.0, softmax_channels=16),
    ("efficient", "backward"): KernelShape(fill_tiles=1.0, softmax_channels=16),
    ("cudnn", "forward"): KernelShape(fill_tiles=1.0, softmax_channels=104, row_tiles=2),
    ("cudnn", "backward"): KernelShape(fill_tiles=3.3, softmax_channels=66),
}
"""FlashAttention-2: a multiprocessor of an A100 does 16 exponentials or 1024 fused multiply-adds of
16-bit numbers a clock, so one exponential costs as much as 32 channels (two multiply-adds each);
half hides behind the matmuls. Reasoned, not fitted.

cuDNN's: fitted to its kernels on one H100 with torch 2.11, alone and inside steps: heads of 64 and
128, 1,024 to 8,192 tokens. Backward makes the rows' sums of products first and casts the gradient
of queries last, which counts by rows, not by tiles. Tensor cores are twice as fast as the A100's
beside exponentials, of which there are as many."""

MEASURED_TOKENS: dict[AttentionKernel, tuple[int, int]] = {
    "cudnn": (1024, 32768),
    "flash": (512, 65536),
    "efficient": (512, 65536),
    "scores": (512, 8192),
}
"""Shortest and longest sequence at which a kernel was measured: alone, or as most of a step."""

FAR_LOG_ERROR = 0.1
"""Standard deviation of the log of attention's time a doubling of the length beyond those."""

EFFICIENT_SHARE = 0.55
"""Rate of the memory-efficient kernel as a share of FlashAttention-2's: published forward rates on
A100 are about half. Chosen, not fitted."""

REFERENCE_CHANNELS = 128
"""Width of a head at which the fitted shares of the peak hold."""

BACKWARD_QUERY_KEY = 3
"""Matmuls as deep or wide as a query head in fused backward: scores again, gradients of queries
and of keys."""

BACKWARD_VALUE = 2
"""Those of the width of a value head: gradients of values and of probabilities."""

EULER_GAMMA = 0.5772156649015329
"""What a harmonic number is above the logarithm, in the limit."""


def head_channels(model: Model) -> tuple[int, int]:
    """Widths of a (query or key, value) head."""
    return model.head_dim, model.value_dim // model.heads


def mean_tiles(*, seq_len: int, window: int = 0) -> float:
    """Tiles of keys that a tile of queries meets, in the mean over a causal sequence.

    Those on the diagonal, and where a window ends, are computed whole. n tiles of queries meet
    1, 2, ... tiles of keys, at most as many as a window touches:

        t - t (t - 1) / (2 n),  t = min(n, tiles of the window + 1)
    """
    rows = -(-seq_len // TILE)
    most = rows
    if 0 < window < seq_len:
        most = min(rows, -(-window // TILE) + 1)
    return most - most * (most - 1) / (2 * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of scores of a sequence, for one head."""

    rows: float
    """Tiles of queries."""
    all: float
    """Tiles of keys that they meet, all together."""
    longest: float
    """Those that the busiest row meets."""


@lru_cache(maxsize=4096)
def sequence_tiles(
    *, seq_len: int, window: int = 0, document_tokens: float = inf, chunked: bool = False
) -> Tiles:
    """Tiles of a causal sequence of one document, or of documents of exponential lengths.

    Each document begins a row of tiles of its own. Of mean length m, in a sequence that is cut from
    a longer text, row k (1, 2, ...) of a document there is where one begins (at the first token,
    and anywhere with density 1 / m) and goes on for (k - 1) tiles more:

        R_k = exp(-(k - 1) b / m) (1 + (s - (k - 1) b) / m),  (k - 1) b < s

    and it meets k tiles of keys, at most as many as a window touches. The longest of n documents is
    m (1 + 1/2 + ... + 1/n), about m (ln n + 0.58), long. Derived; the last: Renyi 1953, "On the
    theory of order statistics".

    Windows that are chunks of the sequence make sequences of their own, the last what is left.
    """
    if chunked and 0 < window < seq_len:
        whole, rest = divmod(seq_len, window)
        pieces = [(whole, window), (1, rest)] if rest else [(whole, window)]
        found = [
            (number, sequence_tiles(seq_len=size, document_tokens=document_tokens))
            for number, size in pieces
        ]
        return Tiles(
            rows=sum(number * one.rows for number, one in found),
            all=sum(number * one.all for number, one in found),
            longest=max(one.longest for _, one in found),
        )
    rows = -(-seq_len // TILE)
    most = min(rows, -(-window // TILE) + 1) if 0 < window < seq_len else rows
    if document_tokens == inf:
        mean = mean_tiles(seq_len=seq_len, window=window)
        return Tiles(rows=rows, all=rows * mean, longest=most)
    met = [min(before + 1, most) for before in range(rows)]
    return _document_tiles(met, seq_len=seq_len, document_tokens=document_tokens)


def _document_tiles(met: list[int], *, seq_len: int, document_tokens: float) -> Tiles:
    """Of documents whose first, second, ... row of tiles meets so many tiles of keys."""
    there, every = 0.0, 0.0
    for before, keys in enumerate(met):
        begun = exp(-before * TILE / document_tokens)
        begun *= 1 + (seq_len - before * TILE) / document_tokens
        there += begun
        every += begun * keys
    documents = 1 + seq_len / document_tokens
    longest = document_tokens * (log(documents) + EULER_GAMMA)
    return Tiles(rows=there, all=every, longest=min(max(met), max(1.0, longest / TILE)))


@lru_cache(maxsize=4096)
def masked_tiles(
    *, seq_len: int, window: int, document_tokens: float = inf, one_by_one: bool = False
) -> Tiles:
    """The same where a mask says what a query sees in a window: kernels that add one compute the
    whole square.

    Documents that go one by one are cut: the first `window` queries see what came before them,
    without a mask; of each later piece of as many, all meet twice as many keys.
    """
    rows = -(-seq_len // TILE)
    if not one_by_one:
        return Tiles(rows=rows, all=rows * rows, longest=rows)
    piece = -(-window // TILE)
    met = [before + 1 if before < piece else 2 * piece for before in range(rows)]
    return _document_tiles(met, seq_len=seq_len, document_tokens=document_tokens)


def attention_forward_seconds(work: BlockWork, device: Device) -> float:
    """Attention of one block's forward on one rank, in the mean over windowed and full blocks; or
    what mixes its tokens in attention's place."""
    if work.model.mixer != "A":
        return _other_seconds(work, device)[0]
    if work.model.latent and work.model.latent.indexer:
        return _chosen_seconds(work, device, backward=False)
    return _attention_forward_seconds(work, device)


def attention_backward_seconds(work: BlockWork, device: Device) -> float:
    """The same in backward; fused, it computes the scores again."""
    if work.model.mixer != "A":
        return _other_seconds(work, device)[1]
    if work.model.latent and work.model.latent.indexer:
        return _chosen_seconds(work, device, backward=True)
    return _attention_backward_seconds(work, device)


def _other_seconds(work: BlockWork, device: Device) -> tuple[float, float]:
    if work.model.mixer == "-":
        return 0.0, 0.0
    from fsdpplan.cost.kernels.states import states_seconds  # of few models

    return states_seconds(work, device)


def _chosen_seconds(work: BlockWork, device: Device, *, backward: bool) -> float:
    """Attention whose keys an indexer chooses: over all keys with a mask, or over the chosen ones
    in the latent, whichever is cheaper; and the indexer."""
    from fsdpplan.cost.kernels.states import index_seconds  # of few models

    latent = work.model.latent
    assert latent is not None
    assert latent.indexer is not None
    masked = _attention_backward_seconds if backward else _attention_forward_seconds
    seconds = masked(work, device)
    query, value = latent.kv_rank + latent.rope_head_dim, latent.kv_rank
    direction: Direction = "backward" if backward else "forward"
    channels = query + value
    if backward:
        channels = BACKWARD_QUERY_KEY * query + BACKWARD_VALUE * value
    in_latent = _tiles_seconds(
        work,
        device,
        window=latent.indexer.keys,
        tile_flops=2.0 * channels * TILE * TILE,
        rate=_fused_rate(query, value, direction, work, device),
        direction=direction,
    )
    return min(seconds, in_latent) + index_seconds(work, device)[backward]


def _attention_forward_seconds(work: BlockWork, device: Device) -> float:
    if not work.flash_attention:
        return _unfused_forward_seconds(work, device)
    query, value = _kernel_channels(work)
    rate = _fused_rate(query, value, "forward", work, device)
    return _fused_seconds(work, device, rate=rate, channels=query + value, direction="forward")


def _attention_backward_seconds(work: BlockWork, device: Device) -> float:
    if not work.flash_attention:
        return _unfused_backward_seconds(work, device)
    query, value = _kernel_channels(work)
    rate = _fused_rate(query, value, "backward", work, device)
    channels = BACKWARD_QUERY_KEY * query + BACKWARD_VALUE * value
    return _fused_seconds(work, device, rate=rate, channels=channels, direction="backward")


def _kernel_channels(work: BlockWork) -> tuple[int, int]:
    """Widths of the heads that the kernel is given: with columns for what it does not know."""
    query, value = head_channels(work.model)
    if not work.added_width:
        return query, value
    return query + work.added_width, query + work.added_width


def kernel_fraction(kernel: AttentionKernel, direction: Direction, device: Device) -> float:
    """Share of the dense peak that a fused kernel reaches while it computes tiles of wide heads."""
    fit = device.fit
    forward = fit.attention_forward_fraction
    backward = fit.attention_backward_ratio
    if kernel == "cudnn":
        forward, backward = forward * fit.native_attention_ratio, fit.native_backward_ratio
    elif kernel == "efficient":
        forward *= EFFICIENT_SHARE
    return forward if direction == "forward" else forward * backward


def _fused_rate(
    query: int, value: int, direction: Direction, work: BlockWork, device: Device
) -> float:
    """FLOPs a second while tiles are computed: less for narrow heads, whose softmax weighs more.

        peak * fraction * (c + 2 s) / c * w / (w + 2 s)

    w: channels of query and value head; c: those of the reference, of which cuDNN's takes wider
    ones no faster; s: what softmax costs.
    """
    kernel = work.attention_kernel
    reference = 2 * REFERENCE_CHANNELS
    width = min(query + value, reference) if kernel == "cudnn" else query + value
    softmax = 2 * KERNEL_SHAPES[kernel, direction].softmax_channels
    peak = device.peak_flops_per_second(work.activation_dtype)
    relative = (reference + softmax) / reference * width / (width + softmax)
    fraction = kernel_fraction(kernel, direction, device)
    return min(peak, peak * fraction * relative) * device.fit.sustained(work.family)


def _fused_seconds(
    work: BlockWork, device: Device, *, rate: float, channels: int, direction: Direction
) -> float:
    model = work.model
    windowed = model.windowed_blocks / model.layers
    seconds = 0.0
    for share, window in ((1 - windowed, 0), (windowed, model.sliding_window)):
        if share:
            seconds += share * max(
                _tiles_seconds(
                    work,
                    device,
                    window=window,
                    tile_flops=2.0 * channels * TILE * TILE,
                    rate=rate,
                    direction=direction,
                ),
                _mask_bytes(work, window) / memory_bytes_per_second(device),
            )
    return max(seconds, _least_traffic_bytes(work) / memory_bytes_per_second(device))


def _is_masked(work: BlockWork, window: int) -> bool:
    return work.masks_windows and 0 < window < work.seq_len


def _mask_bytes(work: BlockWork, window: int) -> float:
    """What the kernel reads of a mask in a pass: it is one for all heads, and each reads its own.

    Of documents one by one it is small, and stays in the cache.
    """
    if not _is_masked(work, window) or work.one_by_one:
        return 0.0
    return scores(work) * work.element_bytes


def _tiles_seconds(
    work: BlockWork,
    device: Device,
    *,
    window: int,
    tile_flops: float,
    rate: float,
    direction: Direction,
) -> float:
    """Time of all tiles, or of the longest row of them if that is more: a row of tiles is one
    multiprocessor's, or several are. Under context parallelism a row is filled anew for each
    piece of the keys, unless ranks trade heads: then each has whole rows of fewer heads.
    """
    heads = -(-work.model.heads // work.tp)
    sequences = work.tokens * work.cp / work.seq_len
    if _is_masked(work, window):
        of = masked_tiles(
            seq_len=work.seq_len,
            window=window,
            document_tokens=work.document_tokens,
            one_by_one=work.one_by_one,
        )
    else:
        of = sequence_tiles(
            seq_len=work.seq_len,
            window=window,
            document_tokens=work.document_tokens,
            chunked=work.model.window_kind == "chunked",
        )
    pieces = 1 if work.trades_heads else work.cp
    shape = KERNEL_SHAPES[work.attention_kernel, direction]
    fill = shape.fill_tiles
    tiles = heads * sequences * (of.all / pieces + of.rows * fill) * pieces / work.cp
    of_a_multiprocessor = rate / device.multiprocessors
    longest = shape.row_tiles * (of.longest / pieces + fill)
    busiest = max(tiles / device.multiprocessors, longest)
    return busiest * tile_flops / of_a_multiprocessor


def _least_traffic_bytes(work: BlockWork) -> float:
    """Queries, keys and values read and outputs written once."""
    model = work.model
    query, value = head_channels(model)
    heads, kv_heads = -(-model.heads // work.tp), -(-model.kv_heads // work.tp)
    return work.tokens * (heads + kv_heads) * (query + value) * work.element_bytes


def scores(work: BlockWork) -> float:
    """Elements of the score matrices of one block on one rank: the whole square."""
    return work.tokens * work.seq_len * float(-(-work.model.heads // work.tp))


def score_bytes(work: BlockWork) -> tuple[float, float]:
    """Memory traffic of one score beside its matmuls, in (forward, backward), in bytes.

    A fused kernel scales, masks and normalises in one reading and one writing (backward: two
    readings, one writing); PyTorch's operators scale, mask and normalise one by one. Linear biases
    are laid out as scores and added by the matmul. Dropout keeps a mask of bytes.
    """
    b = work.element_bytes
    forward, backward = (2.0 * b, 3.0 * b)
    if work.kernels == "eager":
        forward, backward = forward + 4 * b + 1, backward + 4 * b + 1
    if work.model.positions == "alibi":
        forward += 2 * b
    if work.dropout:
        forward, backward = forward + 2 * b + 1, backward + 2 * b + 1
    return forward, backward


def _batched_seconds(work: BlockWork, device: Device, *, n: int, k: int) -> float:
    """A product of all heads, (tokens x k) @ (k x n) in each; the heads' right sides are read, too,
    which is little beside the scores.

    Heads lie side by side. Where their width leaves them unaligned, cuBLAS's batched kernels do
    without tensor cores: multiplications of 16-bit numbers are then as fast as of fp32 ones.
    """
    rows = work.tokens * -(-work.model.heads // work.tp)
    width_bytes = min(n, k) * work.element_bytes
    is_aligned = device.kind == "cpu" or width_bytes % ALIGNED_BYTES == 0
    dtype: Precision = work.activation_dtype if is_aligned else "fp32"
    seconds = matmul_seconds(m=rows, n=n, k=k, dtype=dtype, device=device)
    return seconds / device.fit.sustained(work.family)


def _unfused_forward_seconds(work: BlockWork, device: Device) -> float:
    """Scores, their softmax, and the values' sums, nothing saved by the mask."""
    query, value = head_channels(work.model)
    traffic = scores(work) * score_bytes(work)[0]
    return (
        _batched_seconds(work, device, n=work.seq_len, k=query)
        + _batched_seconds(work, device, n=value, k=work.seq_len)
        + traffic / memory_bytes_per_second(device)
    )


def _unfused_backward_seconds(work: BlockWork, device: Device) -> float:
    """Gradients of values, probabilities, queries and keys; the scores are kept."""
    query, value = head_channels(work.model)
    traffic = scores(work) * score_bytes(work)[1]
    return (
        _batched_seconds(work, device, n=value, k=work.seq_len)
        + _batched_seconds(work, device, n=work.seq_len, k=value)
        + 2 * _batched_seconds(work, device, n=query, k=work.seq_len)
        + traffic / memory_bytes_per_second(device)
    )


def far_log_error(kernel: AttentionKernel, *, seq_len: int) -> float:
    """Standard deviation of the log of attention's time for lengths beyond the measured ones: its
    kernel's rate is carried on from there."""
    shortest, longest = MEASURED_TOKENS[kernel]
    times = max(seq_len / longest, shortest / seq_len, 1.0)
    return FAR_LOG_ERROR * log2(times)
