"""The check that each node runs before anything starts: can it do its part?"""

from __future__ import annotations

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl import environment
from fsdpplan.emit.nccl_cloud import cloud_scripts
from fsdpplan.emit.nccl_rules import network_between
from fsdpplan.spec.plan import Plan

NODE_CHECK = """\
import importlib.util, os, socket, sys

here, version, gpus, head = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]


def refuse(why):
    print(f"fsdpplan: {here}: {why}", file=sys.stderr, flush=True)
    sys.exit(5)


def text(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def ports(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


if importlib.util.find_spec("torch") is None:
    refuse(f"{sys.executable} has no torch: give the right one by --python or --env-setup")
if version:
    try:
        import fsdpplan
    except ImportError as error:
        refuse(f"{sys.executable} cannot import fsdpplan ({error}): install fsdpplan {version} "
               "there, or emit a job folder with its own trainer by --out DIR")
    if fsdpplan.__version__ != version:
        refuse(f"fsdpplan {fsdpplan.__version__} is installed here, fsdpplan {version} wrote the "
               "script: install that one, or emit the script again")
if gpus:
    import torch

    visible = torch.cuda.device_count()
    if visible < gpus:
        refuse(f"{visible} GPUs are visible, the plan uses {gpus} a node: ask for as many, or try "
               "the layout on CPU processes by fsdpplan run --smoke")
if head:
    try:
        found = sorted({info[4][0] for info in socket.getaddrinfo(head, None)})
    except OSError as error:
        refuse(f"cannot resolve {head}, the first host of the allocation ({error}): all nodes "
               "must know its name")
    if here != head and all(a.startswith("127.") or a == "::1" for a in found):
        refuse(f"{head}, the first host of the allocation, resolves to {found[0]} here, which is "
               "this node itself: correct /etc/hosts or the name service")
otherwise = "plan again with what fsdpplan detect --nodes finds, or leave the node out by --exclude"
for word in sys.argv[5:]:
    variable, _, value = word.partition("=")
    if variable == "file":
        if not os.access(value, os.R_OK):
            refuse(f"{value} is missing, which the plan was told of: {otherwise}")
        continue
    if os.environ.get(variable) != value:
        continue  # the user chose another
    for name in value.removeprefix("=").split(","):
        device, _, port = name.partition(":")
        if variable == "NCCL_IB_HCA":
            what, folder = f"adapter {name}", f"/sys/class/infiniband/{device}/ports"
            states = [f"{folder}/{p}/state" for p in ports(folder) if not port or p == port]
            works = any("ACTIVE" in text(path) for path in states)
        else:
            what, states = f"interface {name}", [f"/sys/class/net/{name}/operstate"]
            works = text(states[0]).strip() not in ("", "down")
        if not works:
            seen = [text(path).strip().rpartition(" ")[2] for path in states]
            found = " and ".join(filter(None, seen)) or "missing"
            refuse(f"{what}, which {variable} names, is {found}: {otherwise}")
print(f"fsdpplan: {here} is ready", flush=True)
"""
"""Python program that ends with exit code 5 and one line when the node cannot do its part.

Arguments: the node's name, the fsdpplan version that must be importable (empty: none must),
GPUs a node, the host of the rendezvous (empty on one node), then what the variables assume, each as
`NCCL_IB_HCA=VALUE`, `NCCL_SOCKET_IFNAME=VALUE` or `file=PATH`. A value that the user exported in
place of ours is not looked at.
"""


def assumptions(*, plan: Plan, job: Job) -> tuple[str, ...]:
    """What the variables take for granted on every node, as arguments of the check."""
    names = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME")
    variables = tuple(
        f"{variable.name}={variable.value}"
        for variable in environment(plan=plan, job=job)
        if variable.name in names
    )
    network = network_between(plan)
    files = [script.path for script in cloud_scripts(plan) if script.found]
    if not isinstance(network, str) and network.transport == "efa":
        files += network.net_plugins[:1]
    return (*variables, *(f"file={path}" for path in files))
