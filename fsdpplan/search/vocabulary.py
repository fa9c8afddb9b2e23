"""Vocabulary: rows that never learn, where the head's products are faster with them.

A vocabulary such as GPT-2's 50,257 leaves rows of logits that begin at no multiple of 16 bytes, and
three products of the head to kernels for such operands. What the trainer does with rows beyond the
vocabulary is in `docs/explanation/trainer.md`; whether they pay is what the head is priced at with
and without them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpplan.cost.kernels.head import layout_head_seconds
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training

OFFERED_MULTIPLE = 64
"""Rows, as nanoGPT pads GPT-2's: 128 bytes of logits in 16 bits, a line of the cache."""

LEAST_GAIN_FRACTION = 0.02
"""Of head and loss, below which a vocabulary is left as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """A vocabulary with rows that never learn, and what they gain."""

    model: Model
    plain_seconds: float
    """Head and loss of one sequence, forward and backward, on one GPU."""
    seconds: float
    """The same with the padded rows."""


def padding(model: Model, *, training: Training, cluster: Cluster) -> Padding | None:
    """The padded model where its head is faster; None where it is not, or where the tables are not
    the reference decoder's to pad."""
    is_ours = training.runtime == "fsdp2" and training.program == "reference"
    if not is_ours or cluster.device.kind != "cuda" or model.vocab_multiple > 1:
        return None
    padded = replace(model, vocab_multiple=OFFERED_MULTIPLE)
    if padded.vocab_rows(1) == model.vocab:
        return None
    plain_seconds, seconds = (
        sum(
            layout_head_seconds(
                Case(
                    model=each,
                    cluster=cluster,
                    training=training,
                    layout=Layout(sharding="ddp", compile=True),
                )
            )
        )
        for each in (model, padded)
    )
    if seconds > (1 - LEAST_GAIN_FRACTION) * plain_seconds:
        return None
    return Padding(model=padded, plain_seconds=plain_seconds, seconds=seconds)
