"""Why a Slurm job waits, in words.

Source: slurm.schedmd.com/job_reason_codes.html, and squeue(1), "JOB REASON CODES".
"""

from __future__ import annotations

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
