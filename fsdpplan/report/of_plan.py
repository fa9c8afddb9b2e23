"""The report of a plan: its sections, in their order."""

from __future__ import annotations

from fsdpplan import __version__
from fsdpplan.report.alternatives import alternatives_section
from fsdpplan.report.grounds import grounds_section, watch_section
from fsdpplan.report.memory import memory_section
from fsdpplan.report.network import communication_section, topology_section
from fsdpplan.report.summary import subtitle, summary_section, title
from fsdpplan.report.timeline import laid_out, timeline_sections
from fsdpplan.report.values import Report, Section
from fsdpplan.spec.plan import Plan


def plan_report(
    plan: Plan,
    *,
    about: str,
    made_on: str = "",
    command: str = "",
    came_of: tuple[Section, ...] = (),
    more: tuple[Section, ...] = (),
) -> Report:
    """What there is to show of `plan`, which was read from `about`; `came_of`: what a run of it
    came to, `more` comes behind it; `made_on` and `command` stand at its end."""
    laid = laid_out(plan)
    sections = (
        summary_section(plan),
        *came_of,
        watch_section(plan),
        *alternatives_section(plan),
        *timeline_sections(laid),
        memory_section(plan, laid),
        communication_section(plan),
        topology_section(plan),
    )
    return Report(
        title=title(plan),
        subtitle=subtitle(plan),
        sections=(*sections, *more, grounds_section(plan)),
        made_by=f"fsdpplan {__version__}",
        about=about,
        made_on=made_on,
        command=command,
    )
