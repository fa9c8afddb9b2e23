"""SkyPilot: a task whose `run` starts torchrun on every node that it is given.

Source: skypilot 0.14.1 (PyPI): sky/utils/schemas.py (`get_task_schema`), sky/task.py (names),
sky/skylet/constants.py (SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK); skypilot-catalog 001ca549
catalogs/v8/common/accelerators.csv (the names in device profiles, which do not tell SXM from PCIe:
clouds rent H100 and A100 as SXM, and PCIe cards have none).
"""

from __future__ import annotations

import re

from fsdpplan.emit.doors.launch_lines import STRICT, host_lines, meeting_lines
from fsdpplan.emit.order import Order, refuse_others
from fsdpplan.emit.segments import unsaid_lines
from fsdpplan.emit.slurm.header import header_lines
from fsdpplan.emit.slurm.parts import packed_parts
from fsdpplan.emit.yaml_text import YamlValue, yaml_text
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
_JOB = frozenset(
    {
        "program",
        "job_name",
        "env",
        "env_setup",
        "python",
        "port",
        "nccl_debug",
        "metrics",
    }
)


def render(order: Order) -> str:
    """The task. Raises SpecError for what SkyPilot has no word for."""
    refuse_others(order, target="skypilot", job=_JOB, pods=frozenset({"image"}))
    head = [
        *header_lines(
            plan=order.plan, plan_json=order.plan_json, version=order.version, job=order.job
        ),
        "#",
        "# For SkyPilot 0.14.1: sky launch THIS_FILE, or sky jobs launch THIS_FILE",
        f"# The image or the nodes must have torch and fsdpplan {order.version}: add a setup:",
        "# where they have not, and file_mounts: for data and checkpoints.",
        *unsaid_lines(
            order.plan,
            "SkyPilot cannot ask for nodes of one domain: rent whole domains, or use "
            "--target slurm or kubernetes.",
        ),
    ]
    return "\n".join(head) + "\n" + yaml_text(task(order))


def task(order: Order) -> dict[str, YamlValue]:
    """Keys of the task and their values."""
    job = order.job
    if not _NAME.fullmatch(job.job_name):
        raise SpecError(
            f"job_name {job.job_name!r} is none that SkyPilot takes: use letters and digits, with "
            "single dots, dashes or underlines between them"
        )
    return {
        "name": job.job_name,
        "num_nodes": order.plan.cluster.nodes,
        "resources": _resources(order),
        "run": "\n".join(_run(order)) + "\n",
    }


def _resources(order: Order) -> dict[str, YamlValue]:
    plan, image = order.plan, order.pods.image
    ranks = plan.cluster.gpus_per_node
    found: dict[str, YamlValue] = (
        {"cpus": f"{ranks}+"}
        if plan.cluster.device.kind == "cpu"
        else {"accelerators": f"{accelerator(plan)}:{ranks}"}
    )
    return found if image is None else {**found, "image_id": f"docker:{image}"}


def accelerator(plan: Plan) -> str:
    """SkyPilot's name of the plan's device. Raises SpecError where it is not known."""
    device = plan.cluster.device
    if device.skypilot_name is None:
        raise SpecError(
            f"--target skypilot has no name for the device {device.name}, or the plan is older "
            "than the name: plan again, or write skypilot_name into a device profile of your own"
        )
    return device.skypilot_name


def _run(order: Order) -> list[str]:
    nodes = order.plan.cluster.nodes
    return [
        *STRICT,
        *host_lines(order),
        "",
        *packed_parts(("check",), plan=order.plan),
        "",
        'HEAD_NODE=$(sed -n 1p <<<"$SKYPILOT_NODE_IPS")',
        "NODE_RANK=$SKYPILOT_NODE_RANK",
        'HOSTNAME=$(sed -n "$((NODE_RANK + 1))p" <<<"$SKYPILOT_NODE_IPS")',
        f'[ "${{SKYPILOT_NUM_NODES:-{nodes}}}" = {nodes} ] ||',
        f'  refuse "the plan is for {nodes} node(s), and SkyPilot gave $SKYPILOT_NUM_NODES"',
        *meeting_lines(order),
        "check_node",
        "start_ranks",
    ]
