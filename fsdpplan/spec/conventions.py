"""Conventions of a plan that its training follows: the order of ranks, the schedules that are
special, the rows of a vocabulary.

This module needs the standard library only: a job folder has it in the copy of the trainer.
"""

from __future__ import annotations

from typing import Final

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the device mesh along which ranks are laid out, outermost first."""

V_SCHEDULES: Final = ("zbv", "dualpipev")
"""Of two stages a rank: rank r of p has stages r and 2 p - 1 - r, the first rank the last, too."""

SPLIT_BACKWARD_SCHEDULES = frozenset({"interleaved_zero_bubble", *V_SCHEDULES})
"""Schedules that compute gradients by inputs first, and by weights where nobody waits."""

VOCAB_MULTIPLE = 16
"""Rows of a vocabulary that a tensor-parallel rank has are padded to a multiple of this: rows of
logits then begin at 16 bytes in any format, where tensor cores are fast (cuBLAS documentation)."""


def padded_vocab(vocab: int, tp: int, multiple: int = 1) -> int:
    """Rows of a vocabulary that `tp` ranks split evenly: the next multiple of `tp * multiple`; with
    `multiple` 1 itself, or, where `tp` does not divide it, that of `tp * VOCAB_MULTIPLE`.

    As Megatron-LM pads with `--make-vocab-size-divisible-by`, of which its default is 128
    (megatron/training/arguments.py).
    """
    step = tp if vocab % tp == 0 or multiple > 1 else tp * VOCAB_MULTIPLE
    return -(-vocab // (step * multiple)) * step * multiple
