"""Two saved plans, and all in which they differ."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fsdpplan.cli.views.check import differs_document, differs_lines
from fsdpplan.cli.views.difference import difference_document, terms_table, verdict
from fsdpplan.cli.views.render import blocks, listed, wrapped
from fsdpplan.files.plans import SCHEMA_VERSION
from fsdpplan.search.advice.difference import Priced, difference
from fsdpplan.validate.check.lock import Differs, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """Two plans as they are saved."""

    places: tuple[str, str]
    before: Priced
    after: Priced
    differs: tuple[Differs, ...]
    is_same: bool
    """They are equal in all that they say, runners-up and sentences included."""

    def of(self, part: Part) -> list[Differs]:
        """What differs of one part."""
        return [one for one in self.differs if one.part == part]


def diff_screen(found: PlanDiff, *, width: int) -> str:
    """What `diff` prints."""
    one, other = found.places
    if found.is_same:
        return wrapped(f"{one} and {other} are the same plan.", width=width)
    if not found.differs:
        return wrapped(
            f"{one} and {other} have the same inputs, layout, prediction and versions; they differ "
            "in runners-up, sources or sentences.",
            width=width,
        )
    gaps = difference(found.before, found.after)
    return blocks(
        wrapped(f"From {one} to {other}", width=width),
        listed("Inputs", differs_lines(found.of("inputs")), width=width),
        listed("Layout", differs_lines(found.of("layout")), width=width),
        *(
            (
                wrapped(verdict(gaps), width=width),
                terms_table(found.before, found.after, gaps, heads=("before", "after")),
            )
            if found.of("predicted")
            else ("The prediction is the same.",)
        ),
        listed("Versions", differs_lines(found.of("versions")), width=width),
    )


def diff_json(found: PlanDiff) -> str:
    """What `diff --json` prints."""
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "plans": list(found.places),
            "same": found.is_same,
            "differences": differs_document(found.differs),
            "terms": difference_document(difference(found.before, found.after)),
        },
        indent=2,
        allow_nan=False,
    )
