"""The JSON Schemas of what commands print with `--json`, from the types beside what prints it.

A command is here under its name, with `_` for `-` and for what asks for another answer
(`explain --why` is `explain_why`). Those of the planning commands stand in `docs/json_schemas.py`.
"""

from __future__ import annotations

from typing import Any

from docs.json_schemas import WHOLE, Schema, merged, rows, table


def printed_types() -> dict[str, tuple[Any, ...]]:
    """Entry -> the type that its JSON is of, or those whose fields it has together."""
    from fsdpplan.cli.commands.cancel import CancelJson
    from fsdpplan.cli.commands.export import ExportJson
    from fsdpplan.cli.commands.learn import LearnJson
    from fsdpplan.cli.commands.ledger import LedgerJson
    from fsdpplan.cli.commands.logs import LogsJson
    from fsdpplan.cli.commands.rehearse import AgreementJson
    from fsdpplan.cli.commands.report import ReportJson
    from fsdpplan.cli.commands.run import DryRunJson
    from fsdpplan.cli.commands.status import StatusJson
    from fsdpplan.cli.commands.validate import ValidateKernelsJson
    from fsdpplan.cli.commands.verify import VerifyJson
    from fsdpplan.cli.views.calibration import CalibrateCheckJson, CalibrationJson
    from fsdpplan.cli.views.check import CheckJson
    from fsdpplan.cli.views.gains import GainsJson
    from fsdpplan.cli.views.outcome import RunJson
    from fsdpplan.cli.views.sensitivity import SensitivitiesJson
    from fsdpplan.cli.views.trace import OverlayJson, TraceJson
    from fsdpplan.cli.views.validation import ValidateJson
    from fsdpplan.cli.views.why import WhyJson
    from fsdpplan.run.bug_report import BugReportJson
    from fsdpplan.run.rehearse.rehearse import Rehearsal

    return {
        "explain_why": (WhyJson,),
        "what_if_gain": (GainsJson,),
        "what_if_sensitivities": (SensitivitiesJson,),
        "check": (CheckJson,),
        "run": (RunJson,),
        "run_dry_run": (DryRunJson,),
        "status": (StatusJson,),
        "logs": (LogsJson,),
        "cancel": (CancelJson,),
        "export": (ExportJson,),
        "verify": (VerifyJson,),
        "rehearse": (Rehearsal, AgreementJson),
        "calibrate": (CalibrationJson,),
        "calibrate_check": (CalibrateCheckJson,),
        "validate": (ValidateJson,),
        "validate_kernels": (ValidateKernelsJson,),
        "learn": (LearnJson,),
        "ledger": (LedgerJson,),
        "report": (ReportJson,),
        "trace": (TraceJson,),
        "trace_overlay": (OverlayJson,),
        "bug_report": (BugReportJson,),
    }


def printed_schemas(defs: dict[str, Schema]) -> dict[str, Schema]:
    """Entry -> its schema; what its types hold goes to `defs`."""
    found = {name: merged(kinds, defs) for name, kinds in printed_types().items()}
    return {
        **found,
        "detect": detect_schema(defs),
        "profiles": profiles_schema(defs),
        "profiles_check": check_schema(defs, "numbers"),
        "validate_check": check_schema(defs, "rows"),
    }


def check_schema(defs: dict[str, Schema], *counts: str) -> Schema:
    """What is to be seen to in a file, and how many of what it has."""
    from fsdpplan.cli.views.findings import FindingsJson

    found = merged((FindingsJson,), defs)
    found["properties"] |= dict.fromkeys(counts, WHOLE)
    found["required"] += counts
    return found


def detect_schema(defs: dict[str, Schema]) -> Schema:
    """A node's profile, whose fields are null where there is none, and what it follows from."""
    from fsdpplan.cli.commands.detect import FollowsFromJson
    from fsdpplan.cli.views.profiles import LinksJson
    from fsdpplan.files.plans import EACH_MAY_BE_NULL
    from fsdpplan.files.profiles.nodes import NodeProfile

    kinds = (NodeProfile, LinksJson, EACH_MAY_BE_NULL, FollowsFromJson)
    return of_kind("node", merged(kinds, defs))


def profiles_schema(defs: dict[str, Schema]) -> Schema:
    """One profile, or a list of them."""
    from fsdpplan.cli.views.profiles import DescribedJson, DeviceJson, LinksJson, PhysicsJson
    from fsdpplan.files.profiles.devices import DeviceProfile, PhysicsProfile
    from fsdpplan.files.profiles.nodes import ClusterProfile, NodeProfile

    profiles: dict[str, tuple[Any, ...]] = {
        "device": (DeviceProfile, DeviceJson),
        "node": (NodeProfile, LinksJson),
        "cluster": (ClusterProfile, LinksJson),
        "physics": (PhysicsProfile, PhysicsJson),
    }
    names = []
    for kind, kinds in profiles.items():
        names.append(f"Profile_{kind}")
        defs[names[-1]] = of_kind(kind, merged((*kinds, DescribedJson), defs))
    one = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    return {"anyOf": [*one["anyOf"], table({"profiles": rows(one)})]}


def of_kind(kind: str, found: Schema) -> Schema:
    """Profiles of one kind."""
    found["properties"]["kind"] = {"const": kind}
    return found
