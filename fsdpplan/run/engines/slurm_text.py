"""What Slurm's commands print, read: the state of a job, and why sbatch takes none.

Why a Slurm job waits, in words.

Source: slurm.schedmd.com/job_reason_codes.html, and squeue(1), "JOB REASON CODES".
"""

from __future__ import annotations

import re
from pathlib import Path

from fsdpplan.run.engines.engine import JobState
from fsdpplan.run.engines.local import exit_code_of

_WORDS = {
    "None": "",
    "Resources": "waiting for nodes to become free",
    "Priority": "jobs of higher priority come first",
    "Dependency": "waiting for the job before it to end",
    "DependencyNeverSatisfied": "the job that it waits for will never end as asked",
    "BeginTime": "its time to begin has not come; a requeued job waits a little",
    "Cleaning": "cleaning up after its last start",
    "JobHeldUser": "held; scontrol release sets it free",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held, since it was requeued as often as Slurm allows",
    "JobLaunchFailure": "it could not be launched on its nodes",
    "launch failed requeued held": "a node could not launch it; scontrol release sets it free",
    "job requeued in held state": "scontrol release sets it free",
    "Reservation": "waiting for its reservation to begin",
    "ReservationDeleted": "its reservation is gone",
    "ReqNodeNotAvail": "a node that it asks for is down, reserved or in use",
    "NodeDown": "a node that it needs is down",
    "Licenses": "waiting for a license",
    "Prolog": "the site prepares its nodes",
    "PartitionDown": "its partition starts no jobs now",
    "PartitionInactive": "its partition starts no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition has or allows",
    "PartitionTimeLimit": "its --time is longer than its partition allows",
    "BadConstraints": "no node of this cluster is as it asks",
    "InvalidAccount": "its --account is not valid",
    "AccountNotAllowed": "its --account may not use this partition",
    "InvalidQOS": "its --qos is not valid",
    "QOSNotAllowed": "its --qos may not be used here",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as the QOS allows at a time",
    "AssocMaxJobsLimit": "you run as many jobs as your account allows at a time",
    "QOSMaxSubmitJobPerUserLimit": "you have as many jobs queued as the QOS allows",
    "AssocMaxSubmitJobLimit": "you have as many jobs queued as your account allows",
    "NonZeroExitCode": "its script ended with an error",
    "RaisedSignal": "it was ended by a signal",
    "OutOfMemory": "it used more memory of a host than it has",
    "TimeLimit": "its time limit was reached",
    "SystemFailure": "Slurm, a file system or the network failed",
}
_BEGINNINGS = (
    ("ReqNodeNotAvail", "a node that it asks for is down, reserved or in use"),
    ("Nodes required for job are DOWN", "waiting for nodes that work and are not reserved"),
    ("AssocGrp", "your account as a whole is at its limit"),
    ("AssocMax", "it asks for more than your account allows a job"),
    ("QOSGrp", "the QOS as a whole is at its limit"),
    ("QOSMax", "it asks for more than the QOS allows"),
    ("QOSMin", "it asks for less than the QOS takes"),
    ("Max", "the account is at its limit in this QOS"),
)


def reason_words(word: str) -> str:
    """`Resources` as `Resources: waiting for nodes to become free`; one that is not known as it is.

    `word` is as scontrol prints it, with underscores for blanks.
    """
    spoken = word.replace("_", " ")
    words = _WORDS.get(spoken)
    if words is None:
        words = next((text for start, text in _BEGINNINGS if spoken.startswith(start)), None)
    if words is None:
        return spoken
    return f"{spoken}: {words}" if words else ""


ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States after which no other one comes; a newer Slurm has more of those that pass (a node that is
powered up). Source: squeue(1), job state codes."""

SACCT_FIELDS = "JobIDRaw,State,ExitCode,NodeList"
SACCT_COMPLETION_FIELDS = "JobID,State,NodeList"
"""Of the job completion log, which holds less: sacct(1), --completion."""

RETRIES = re.compile(r"sleeping and retrying|temporarily disabled, retrying")
"""sbatch has been refused for want of room, and would try again for two minutes."""


def parse_job(text: str) -> JobState | None:
    """The state in what `scontrol show job ID` prints.

    Only keys at the beginning of a line, or behind one that has no free text, are read: the name
    of a job may look like any of them.
    """
    state = re.search(r"^ +JobState=(\S+) Reason=(\S+)", text, re.MULTILINE)
    code = re.search(r"^ +Requeue=\d+ Restarts=(\d+) .*ExitCode=(\d+):(\d+)", text, re.MULTILINE)
    if state is None or code is None:
        return None
    log = re.search(r"^ +StdOut=(.+)$", text, re.MULTILINE)
    nodes = re.search(r"^ +NodeList=([^\s(]+)", text, re.MULTILINE)
    start = re.search(r"^ +StartTime=(\d\S+) ", text, re.MULTILINE)
    pending = state[1] == "PENDING"
    return JobState(
        state=state[1],
        ended=state[1] in ENDED,
        succeeded=state[1] == "COMPLETED" and code[2] == code[3] == "0",
        reason=reason_words(state[2]),
        exit_code=_shell_code(code[2], code[3]),
        nodes=nodes[1] if nodes else "",
        log=_log_path(text, log[1].rstrip()) if log else None,
        restarts=int(code[1]),
        expected_start=start[1].replace("T", " ") if start and pending else "",
    )


def _log_path(text: str, named: str) -> Path:
    """The job's log. A newer Slurm may leave the pattern of its name to whoever asks: it has a
    function for that in its library (src/api/job_info.c, slurm_expand_job_stdio_fields)."""
    job_id = re.match(r"JobId=(\d+)", text)
    return Path(re.sub("%[jA]", job_id[1], named) if job_id else named)


def parse_accounting(text: str) -> JobState | None:
    """The state in what `sacct -X -n -P -o JobIDRaw,State,ExitCode,NodeList` prints, whose last
    line is the newest start of the job."""
    lines = [line.split("|") for line in text.splitlines() if line.count("|") >= 3]
    if not lines:
        return None
    _, words, codes, nodes, *_ = lines[-1]
    code, _, by_signal = codes.partition(":")
    return _accounted(words, _shell_code(code, by_signal), nodes)


def parse_completion(text: str) -> JobState | None:
    """The same of `sacct -c -n -P -o JobID,State,NodeList`, which has no exit code."""
    lines = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    return _accounted(lines[-1][1], 0, lines[-1][2]) if lines else None


def _accounted(words: str, exit_code: int, nodes: str) -> JobState | None:
    state, *_ = words.split() or [""]
    if not state:
        return None
    return JobState(
        state=state,
        ended=state in ENDED,
        succeeded=state == "COMPLETED" and exit_code == 0,
        reason="",
        exit_code=exit_code,
        nodes="" if nodes.startswith("None") else nodes.strip(),
    )


def _shell_code(code: str, by_signal: str) -> int:
    if by_signal.isdecimal() and int(by_signal):
        return exit_code_of(-int(by_signal))
    return int(code) if code.isdecimal() else 0


_ADVICE = (
    ("contact slurm controller", "the controller may be down: ask by scontrol ping"),
    ("connection refused", "the controller may be down: ask by scontrol ping"),
    (
        "timed out",
        "the controller is slow or away: ask by scontrol ping, and see squeue --me first, since it "
        "may have taken the job",
    ),
    ("zero bytes were transmitted", "the controller may be down: ask by scontrol ping"),
    ("retrying", "Slurm's queue is full: wait until jobs of others have ended"),
    (
        "job submit limit",
        "the site allows no more jobs, or none as large or as long: wait for one of yours to end "
        "(squeue --me), or ask for less",
    ),
    (
        "segment",
        "--segment is of Slurm with topology/block (23.11 and newer): emit the script again with "
        "--no-segment, and name nodes domain by domain",
    ),
    ("invalid account", "name another --account (sacctmgr show associations lists yours)"),
    ("accounting/qos policy", "see sacctmgr show qos, and ask for less"),
    ("partition", "name another --partition (sinfo lists them)"),
    ("account", "name another --account (sacctmgr show associations lists yours)"),
    ("qos", "name another --qos (sacctmgr show qos lists them)"),
    ("time limit", "ask for another --time (sinfo shows how long each partition allows)"),
    ("reservation", "name another reservation (scontrol show reservation lists them)"),
    ("feature", "name another constraint (sinfo -o '%f' lists them)"),
    ("node configuration", "ask for what the nodes have (sinfo -o '%n %G %c %m' lists it)"),
    ("node count", "ask for fewer nodes, or for another --partition"),
)
"""Piece of what sbatch says in small letters -> what to do, the first that fits.
Source: slurm_errno.c of Slurm 22.05, as sbatch 22.05.8 prints it."""


def refusal(text: str) -> str:
    """One sentence on why sbatch took no job, from what it said."""
    said = " ".join(text.replace("sbatch: error: ", "").replace("sbatch: ", "").split())[:500]
    low = said.lower()
    advice = next((words for piece, words in _ADVICE if piece in low), None)
    advice = advice or "change the job's options, such as --partition, --time or --sbatch"
    return (
        f"sbatch refused the job: {said.rstrip('.') or 'no reason given'}: {advice}; then type "
        "fsdpplan run again"
    )
