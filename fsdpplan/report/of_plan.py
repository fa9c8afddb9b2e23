"""The report of a plan: its sections, in their order."""

from __future__ import annotations

from fsdpplan import __version__
from fsdpplan.report.summary import subtitle, summary_section, title
from fsdpplan.report.values import Report, Section
from fsdpplan.spec.plan import Plan


def plan_report(plan: Plan, *, about: str, more: tuple[Section, ...] = ()) -> Report:
    """What there is to show of `plan`, which was read from `about`; `more` comes behind it."""
    sections = (summary_section(plan),)
    return Report(
        title=title(plan),
        subtitle=subtitle(plan),
        sections=(*(one for one in sections if one is not None), *more),
        made_by=f"fsdpplan {__version__}",
        about=about,
    )
