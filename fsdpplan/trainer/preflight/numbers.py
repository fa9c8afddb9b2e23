"""The numerical preflight: a tiny model on the plan's own mesh steps as one process does, or what
is wrong is said.

No table of versions sees a patched image, a broken NCCL or a flipped bit; a step that does not add
up does. The tiny model goes through the code of training (numbers_trial), in fp32, where little is
much, and then in the plan's own formats. Each rank compares it with what one process has
(../numbers/reference.py), and rank 0 puts what all saw into a sentence (judge.py beside it).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import torch

from ..config import PlanConfig
from ..errors import TrainerError
from ..numbers.evidence import Evidence, gather_evidence
from ..numbers.judge import judge_formats, judge_numbers, wanted_evidence
from ..numbers.look import Kept, Seen
from ..numbers.plan import has_other_formats, tiny_plan
from ..numbers.reference import compute_reference, good_seed
from ..numbers.trial import Rough, nothing_left, step_exactly, step_roughly
from ..numbers.words import axes_words
from ..parallel.mesh import Meshes
from .findings import Findings
from .watch import Council, Watch

STAGE = "stepping a tiny model"
STAGE_FACTOR = 2.0
"""The first step connects what is not yet."""

Verdict = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Numbers:
    """The trial on one rank; what it came to is on rank 0."""

    plan: PlanConfig
    meshes: Meshes
    device: torch.device
    hosts: Sequence[str]
    adamw: str

    def run(self, watch: Watch, council: Council) -> Verdict:
        """What rank 0 found, on all ranks: `Findings`, and `result` and `line` for whoever wants to
        know. All ranks call this."""
        began = time.perf_counter()
        watch.enter(STAGE, factor=STAGE_FACTOR)
        with nothing_left(self.device):
            verdict = self._try_formats(watch, council, self._try_exactly(watch, council))
        seconds = time.perf_counter() - began
        verdict["result"] |= {"seconds": round(seconds, 3)}
        verdict["line"] = f"numbers right on {axes_words(self.plan)}, {seconds:.1f} s"
        return verdict

    def _try_exactly(self, watch: Watch, council: Council) -> Verdict:
        tiny = tiny_plan(self.plan, in_own_formats=False)
        seed = _agreed_seed(tiny, council)
        reference = _or_fail(watch, lambda: compute_reference(tiny, seed=seed, adamw=self.adamw))
        kept: Kept = _or_fail(
            watch,
            lambda: step_exactly(
                tiny, self.meshes, self.device, reference, seed=seed, adamw=self.adamw
            ),
        )
        watch.enter("comparing the tiny model with one process", factor=STAGE_FACTOR)

        def look(said: list[dict[str, Any]]) -> Verdict:
            seen = [Seen(**one) for one in said]
            return {"wanted": wanted_evidence(seen, tiny), "result": _worst(seen)}

        verdict = council.decide("numbers", kept.seen.document(), look)
        verdict |= {"seed": seed, **Findings().document()}
        if not verdict["wanted"]:
            return verdict
        fits = kept.seen.rank in verdict["wanted"]
        evidence = gather_evidence(tiny, reference, kept, seed=seed, fits=fits)

        def judge(said: list[dict[str, Any]]) -> Verdict:
            seen = [Seen(**one["seen"]) for one in said]
            known = [Evidence(**one["evidence"]) for one in said if one["evidence"]]
            return judge_numbers(seen, known, tiny, self.hosts).document()

        both = {
            "seen": kept.seen.document(),
            "evidence": evidence.document() if fits else None,
        }
        return verdict | council.decide("numbers evidence", both, judge)

    def _try_formats(self, watch: Watch, council: Council, verdict: Verdict) -> Verdict:
        """The same in the plan's own number formats, where they are not those that were tried."""
        if verdict["problem"] or not has_other_formats(self.plan):
            return verdict
        tiny = tiny_plan(self.plan, in_own_formats=True)
        watch.enter(f"{STAGE} in {tiny.training.precision}", factor=STAGE_FACTOR)
        seed = verdict["seed"]
        reference = _or_fail(watch, lambda: compute_reference(tiny, seed=seed, adamw=self.adamw))
        rough: Rough = _or_fail(
            watch,
            lambda: step_roughly(
                tiny, self.meshes, self.device, reference, seed=seed, adamw=self.adamw
            ),
        )
        norm = reference.norm

        def judge(said: list[dict[str, Any]]) -> Verdict:
            return judge_formats([Rough(**one) for one in said], norm, tiny, self.hosts).document()

        return verdict | council.decide("numbers formats", asdict(rough), judge)


def _agreed_seed(tiny: PlanConfig, council: Council) -> int:
    """Rank 0 chooses: other CPUs may round otherwise."""
    if tiny.model.experts is None:
        return 0
    rank_0 = council.decide("numbers seed", None, lambda _: {"seed": good_seed(tiny)})
    seed: int = rank_0["seed"]
    return seed


def _or_fail(watch: Watch, step: Callable[[], Any]) -> Any:
    """A rank that raises leaves the others waiting: the watchdogs find out."""
    try:
        return step()
    except Exception as error:
        if not isinstance(error, TrainerError):
            traceback.print_exc()
        watch.fail(error)


def _worst(seen: Sequence[Seen]) -> dict[str, Any]:
    """How far each quantity is from one process's, of what it may be."""
    worst: dict[str, float] = {}
    for each in seen:
        for name, value in each.worst.items():
            worst[name] = max(worst.get(name, 0.0), value)
    return {"worst": {name: round(value, 4) for name, value in worst.items() if isfinite(value)}}
