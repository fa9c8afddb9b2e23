"""Pipeline moments: what a rank holds while it works through its schedule, pass by pass.

Activations of a stage live from the start of a micro-batch's forward pass to the end of its
backward pass; unsharded gradients of a stage appear in its first backward pass and are reduced
after its last one. With few micro-batches the one is over before the other begins; with many both
are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import ge
from typing import Any, Literal, NamedTuple, get_args

from fsdpplan.cost.schedule.actions import (
    ACTIVE_STAGES,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    gathered_stages,
)

Kind = Literal[
    "forward",
    "forward of kept",
    "backward",
    "backward of kept",
    "half",
    "between",
    "sums",
    "embedding",
    "after",
    "after all losses",
    "reduction",
    "root reduction",
    "loss",
]
"""When a moment is.

* `forward`: in a forward pass, its own micro-batch included, at the last block that recomputes;
  `forward of kept`: at the last block, where that keeps everything though the layout recomputes.
* `backward`: at the first and at the last of a backward pass's blocks that recompute, that block
  included: those that keep everything are gone. `backward of kept`: at the first and at the last of
  these; with them it begins.
* `half`: at the first and at the last block of the inputs' half of a backward pass, without it.
* `between`: when such a half is over, and when the weights' half begins; `sums`: when one is over
  before which a weights' half left the first gradients of its stage: FSDP2 makes sums of them.
* `embedding`: after the blocks of the first stage's backward pass; `after`: of any backward pass;
  `after all losses`: of one before which all losses of the step were made.
* `reduction`: when a stage's gradients are reduced, after its last backward pass; `root reduction`:
  when those of its blocks are, and those of embedding or head are left.
* `loss`: in a forward pass of the last stage."""


class Moment(NamedTuple):
    """What a rank holds at once."""

    kind: Kind
    alive: int
    """(micro-batch, block) pairs with their activations."""
    graded: int
    """Blocks with unsharded gradients of earlier micro-batches."""
    waiting: int = 0
    """(micro-batch, block) pairs between the two halves of their backward pass."""
    inputs: int = 0
    """Inputs of stages that have a gradient, where backward is split: they stay to the end."""
    fresh: int = 0
    """Blocks whose weights' gradients a split backward pass has left in the compute dtype: FSDP2
    adds them to its own in the next one of their stage."""
    first: int = 0
    """Those of them that have no others yet."""
    fresh_head: int = 0
    """1 where the same is so of the head."""
    first_head: int = 0
    waiting_head: int = 0
    """Micro-batches of the last stage between the two halves of their backward pass."""
    loss: int = 0
    """1 from the inputs' half of one of them to the rank's next pass but a weights' half: what its
    loss has kept is there."""
    ends: int = 0
    """Stages with embedding or head that have gradients."""
    reduced: int = 0
    """Blocks whose gradients are reduced: stages whose last backward pass is over."""
    kept: int = 0
    """Those of `alive` whose blocks keep everything though the layout recomputes."""
    dropped: int = 0
    """Less than 0: so many blocks whose parameters are not gathered."""
    dropped_ends: int = 0
    """The same of embedding and head."""
    outputs: int = 0
    """Micro-batches of the first stage in flight: it keeps what it has sent, where inputs of the
    other stages are messages."""


Plain = tuple[Any, ...]
"""A moment as a plain tuple: there are very many."""

Moments = tuple[Moment, ...]
"""The moments of a rank's step that may hold most, by kind: of two of a kind, the one that holds no
less of everything is kept."""

_WHOLE = (0, 0, 0, 0, 0, 0, 0, 0)
"""Of backward passes that are not split."""


def all_at_once(*, alive: int, blocks: int, kept: int = 0) -> Moments:
    """Everything in flight beside all gradients; `kept` of the blocks keep everything, and are
    taken to be as large a part of what is in flight."""
    all_kept = -(-alive * kept // max(1, blocks))

    def moment(kind: Kind, less: int = 0, less_kept: int = 0) -> Moment:
        return Moment(kind, alive - less, blocks, ends=2, kept=all_kept - less_kept)

    own = (moment("forward of kept"), moment("backward of kept")) if kept else ()
    return (
        moment("forward", kept, kept),
        moment("backward", kept, kept),
        *own,
        moment("embedding", blocks, kept),
        moment("after", blocks, kept),
        Moment("reduction", 0, blocks, ends=2),
        Moment("root reduction", 0, 0, ends=2, reduced=blocks),
        moment("loss"),
    )


def highest(moments: Iterable[Plain]) -> Moments:
    """Those that no other one of their kind reaches in all."""
    by_kind: dict[str, set[Plain]] = {kind: set() for kind in get_args(Kind)}
    for moment in moments:
        by_kind[moment[0]].add(moment)
    return tuple(chain.from_iterable(map(_highest, by_kind.values())))


def moments_of_rank(
    actions: Sequence[Action],
    weights: Sequence[int],
    kept: Sequence[int] = (),
    *,
    resharded_to: int = 0,
) -> Iterator[list[Plain]]:
    """The moments of each of a rank's actions, in order. `weights` are the blocks of all stages of
    the pipeline, `kept` those of each, the last, that keep everything though the layout recomputes
    (empty: none). `resharded_to`: of so many blocks a pass that gathers them again has the
    parameters at once; 0: they stay."""
    last = len(weights) - 1
    graded: set[int] = set()
    fresh: dict[int, int] = {}
    alive, alive_kept, held, waiting, inputs, reduced = 0, 0, 0, 0, 0, 0
    is_split = any(kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) for _, _, kind in actions)
    left = Counter(stage for stage, _, kind in actions if kind in (BACKWARD, BACKWARD_WEIGHT))
    now_dropped, waiting_head, has_loss, outputs = (0, 0), 0, False, 0
    seen, begun = list[Plain](), False
    losses = [at for at, (stage, _, kind) in enumerate(actions) if (stage, kind) == (last, FORWARD)]
    first_back = next((at for at, one in enumerate(actions) if one[2] != FORWARD), len(actions))
    after: Kind = "after all losses" if losses and losses[-1] < first_back else "after"

    def now(kind: Kind, less: int = 0, less_kept: int = 0, ungraded: int = 0) -> None:
        """One more moment: its plain numbers, as there are very many of them."""
        nonlocal seen
        split = _WHOLE
        if is_split:
            split = (waiting, inputs, *_fresh(fresh, graded, last), waiting_head, int(has_loss))
        ends = (0 in graded) + (last in graded and last > 0)
        here, keeping = alive - less, alive_kept - less_kept
        seen += (
            (kind, here, held - ungraded, *split, ends, reduced, keeping, *now_dropped, outputs),
        )

    def grade(stage: int, blocks: int) -> None:
        nonlocal held
        graded.add(stage)
        held += blocks

    def half_done(stage: int, blocks: int) -> None:
        """When the inputs' half is through with so many blocks."""
        nonlocal waiting, held
        before = waiting, held, dict(fresh)
        waiting += blocks
        if stage in fresh:
            fresh[stage] -= blocks
            held += 0 if stage in graded else blocks
        now("half")
        waiting, held = before[:2]
        fresh.update(before[2])

    freed = _freed(actions, weights, resharded_to)
    for (stage, _, kind), absent in zip(actions, freed, strict=False):
        if begun:
            yield seen
        begun, seen = True, []
        now_dropped, at_its_end = absent
        has_loss = has_loss and kind == BACKWARD_WEIGHT
        blocks, keeping = weights[stage], kept[stage] if kept else 0
        if kind == FORWARD:
            alive, alive_kept = alive + blocks, alive_kept + keeping
            outputs += stage == 0
            if at_its_end != now_dropped:  # at the first block of those that are still there
                now("forward", max(0, blocks - 1), min(keeping, max(0, blocks - 1)))
                now_dropped = at_its_end
            now("forward", keeping, keeping)
            if keeping:
                now("forward of kept")
            if stage == last:
                now("loss")
            continue
        is_half = kind != BACKWARD and stage > 0  # the first stage has no input to differentiate by
        if kind == BACKWARD_INPUT:
            if is_half:
                has_loss = stage == last
                waiting_head += has_loss
                now("half")
                if blocks > 1:  # those that it is through with are as after the half
                    half_done(stage, blocks - 1)
                is_first = stage in fresh and stage not in graded
                waiting, inputs = waiting + blocks, inputs + 1
            if stage in fresh:
                del fresh[stage]
                if stage not in graded:
                    grade(stage, blocks)
            if is_half:
                now("sums" if is_first else "between")
            continue
        if is_half:
            now("between")
        else:
            now("backward", keeping, keeping)
            if keeping:
                now("backward of kept")
        now_dropped = at_its_end
        if is_half:
            fresh[stage] = blocks
        elif stage not in graded:
            grade(stage, blocks)
            places: list[tuple[int, Kind]] = [(max(0, blocks - 1), "backward")]
            if keeping:
                places += [(keeping, "backward"), (keeping - 1, "backward of kept")]
            for done, there in places:  # blocks that the pass is through with have gradients
                now(there, done, min(done, keeping), blocks - done)
        if not is_half:  # FSDP2 adds up what halves have left
            fresh.pop(stage, None)
        alive, alive_kept = alive - blocks, alive_kept - keeping
        outputs -= stage == 0
        waiting -= blocks if is_half else 0
        waiting_head -= is_half and stage == last
        now(after)
        if stage == 0:
            now("embedding")
        left[stage] -= 1
        if not left[stage]:
            if stage in graded:  # FSDP2 adds up what there is before it reduces
                fresh.pop(stage, None)
            now("reduction")
            held -= blocks if stage in graded else 0
            fresh.pop(stage, None)
            reduced += blocks
            if stage in (0, last):
                now("root reduction")
            graded.discard(stage)
    yield seen


_Dropped = tuple[int, int]
"""`Moment.dropped` and `Moment.dropped_ends`."""


def _freed(
    actions: Sequence[Action], weights: Sequence[int], resharded_to: int
) -> Iterable[tuple[_Dropped, _Dropped]]:
    """What is not gathered at the first and at the last block of each of a rank's actions."""
    if not resharded_to:
        return ((absent, absent) for absent in _dropped(actions, weights))
    return _resharded(actions, weights, resharded_to)


def _resharded(
    actions: Sequence[Action], weights: Sequence[int], resharded_to: int
) -> Iterator[tuple[_Dropped, _Dropped]]:
    """The same where forward passes free the blocks of their stage: at their last block most of
    them, and at the first block of the pass that gathers them again."""
    missing = dict[int, int]()
    for stage, _, kind in actions:
        others = -sum(blocks for other, blocks in missing.items() if other != stage)
        freed = others - max(0, weights[stage] - resharded_to)
        begins = freed if stage in missing else others
        yield ((begins, 0), (freed if kind == FORWARD else others, 0))
        missing.pop(stage, None)
        if kind == FORWARD:
            missing[stage] = weights[stage]


def _dropped(actions: Sequence[Action], weights: Sequence[int]) -> Iterable[_Dropped]:
    """`Moment.dropped` and `Moment.dropped_ends` at each of a rank's actions."""
    stages = {stage for stage, _, _ in actions}
    if len(stages) <= ACTIVE_STAGES:
        return repeat((0, 0))
    whole, ends = sum(weights[stage] for stage in stages), {0, len(weights) - 1}
    return [
        (
            sum(weights[stage] for stage in active) - whole,
            len(ends.intersection(active)) - len(ends & stages),
        )
        for active in gathered_stages(actions)
    ]


def short_actions(stages: Sequence[int], *, most: int, several: bool) -> list[Action]:
    """As many passes as show all moments, of schedules whose ranks go forward with `most`
    micro-batches before they go back; `several`: there are more, one forward for one backward."""
    rest = [(stage, index, BACKWARD) for stage in reversed(stages) for index in range(most)]
    first = [(stage, index, FORWARD) for stage in stages for index in range(most)]
    if not several:
        return first + rest
    (stage,) = stages
    return [*first, (stage, 0, BACKWARD), (stage, most, FORWARD), *rest]


def _fresh(fresh: dict[int, int], graded: set[int], last: int) -> tuple[int, int, int, int]:
    """`Moment.fresh` to `Moment.first_head`."""
    first = {stage: blocks for stage, blocks in fresh.items() if stage not in graded}
    return sum(fresh.values()), sum(first.values()), int(last in fresh), int(last in first)


def _highest(moments: Iterable[Plain]) -> Iterable[Moment]:
    distinct = sorted(moments, reverse=True)
    if len(distinct) < 2:
        return map(Moment._make, distinct)
    varying = [n for n, column in enumerate(zip(*distinct, strict=True)) if len(set(column)) > 1]
    kept: list[Plain] = []
    seen: list[list[int]] = []
    for moment in distinct:
        own = [moment[n] for n in varying]
        for other in seen:
            if all(map(ge, other, own)):
                break
        else:
            kept.append(moment)
            seen.append(own)
    return map(Moment._make, kept)
