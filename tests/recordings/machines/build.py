"""Builds the recordings of this folder: compact descriptions of machines -> full recordings.

    python -m tests.recordings.machines.build

Each machine says what it is built from; README.md has the list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.recordings.machines.tree import (
    A100_40G,
    A100_80G,
    A100_PCIE,
    GB200,
    H100,
    L40S,
    P2P_GPU_NOT_SUPPORTED,
    RTX_4090,
    Adapter,
    Tree,
)

HERE = Path(__file__).parent

INFINIBAND = (("IB/RoCE v1", "fe80::x"),)
ROCE = (
    ("IB/RoCE v1", "fe80::x"),
    ("RoCE v2", "fe80::x"),
    ("IB/RoCE v1", "::ffff:x.x.x.x"),
    ("RoCE v2", "::ffff:x.x.x.x"),
)
"""Each address of a RoCE port twice: once as v1, once as v2."""
LOCAL, REMOTE = "0-55,112-167", "56-111,168-223"
"""Cores of the two sockets of a DGX H100."""

DGX_H100 = (
    "DGX H100, from the table of network modules in its user guide (which adapter is next to which "
    "GPU, mlx5 and ibp names, so PCI buses), the deployment guide of DGX BasePOD (ports of the two "
    "dual-port ConnectX-7: storage and in-band management), `nvidia-smi topo -m` samples (PXB, 18 "
    "links, cores) and the file forms of the kernel's RDMA core; PCI buses of GPUs and bridges are "
    "chosen beside their adapters'"
)


def h100_board(tree: Tree, *, gpus: tuple[int, ...] = tuple(range(8))) -> None:
    """The eight pairs of an H100 and a ConnectX-7 below one pair of PCIe switches each."""
    places = (
        (0x15, "mlx5_0"),
        (0x3D, "mlx5_3"),
        (0x4C, "mlx5_4"),
        (0x5B, "mlx5_5"),
        (0x97, "mlx5_6"),
        (0xBD, "mlx5_9"),
        (0xCB, "mlx5_10"),
        (0xD9, "mlx5_11"),
    )
    for position, (bus, name) in enumerate(places):
        numa, cores = (0, LOCAL) if position < 4 else (1, REMOTE)
        top = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        tree.adapter(
            Adapter(
                name=name,
                chain=f"{top}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0",
                numa=numa,
                interface=f"ibp{bus + 3}s0",
                gids=INFINIBAND,
            )
        )
        tree.interface(
            f"ibp{bus + 3}s0",
            chain=f"{top}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0",
            driver="mlx5_core",
            megabits=400000,
            numa=numa,
        )
        below = f"0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0/0000:{bus + 5:02x}:00.0"
        if position in gpus:
            tree.gpu(H100, f"{top}/{below}/0000:{bus + 6:02x}:00.0", numa=numa, affinity=cores)
    switches = tuple(f"00000000:{bus:02X}:00.0" for bus in (0x05, 0x06, 0x07, 0x08))
    tree.switched(H100, links=18, switches=switches)


def h100_storage(tree: Tree) -> None:
    """Two dual-port ConnectX-7: first ports to the storage fabric, second ones a bond."""
    for first, bus, numa in (("mlx5_1", 0x26, 0), ("mlx5_7", 0xA7, 1)):
        card = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 3:02x}:00"
        second = f"mlx5_{int(first[5:]) + 1}"
        name = f"enp{bus + 3}s0f1np1"
        tree.adapter(
            Adapter(
                name=first,
                chain=f"{card}.0",
                numa=numa,
                interface=f"ibp{bus + 3}s0f0",
                gids=INFINIBAND,
            )
        )
        tree.interface(
            f"ibp{bus + 3}s0f0",
            chain=f"{card}.0",
            driver="mlx5_core",
            megabits=400000,
            numa=numa,
            networks=(("10.100.0.0", "255.255.0.0"),) if first == "mlx5_1" else (),
        )
        tree.adapter(
            Adapter(
                name=second,
                chain=f"{card}.1",
                numa=numa,
                rate="100 Gb/sec (4X EDR)",
                link_layer="Ethernet",
                interface=name,
                gids=ROCE[:2],
            )
        )
        tree.interface(name, chain=f"{card}.1", driver="mlx5_core", megabits=100000, numa=numa)
    tree.interface("bond0", megabits=200000, networks=(("10.1.0.0", "255.255.0.0"),), default=True)
    tree.interface("docker0", state="down", networks=(("172.17.0.0", "255.255.0.0"),))


def dgx_h100(*, gpus: tuple[int, ...] = tuple(range(8))) -> Tree:
    tree = Tree(about=f"{DGX_H100}.")
    tree.host("dgx-01")
    tree.software()
    h100_board(tree, gpus=gpus)
    h100_storage(tree)
    return tree


def nic_slow() -> Tree:
    tree = dgx_h100()
    tree.about = f"{DGX_H100}. One compute port has negotiated EDR."
    tree.files["/sys/class/infiniband/mlx5_5/ports/1/rate"] = "100 Gb/sec (4X EDR)\n"
    tree.files["/sys/class/net/ibp94s0/speed"] = "100000\n"
    return tree


def gpu_missing() -> Tree:
    tree = dgx_h100(gpus=(0, 1, 2, 3, 4, 6, 7))
    tree.about = f"{DGX_H100}. The sixth GPU has fallen off the bus; the driver counts seven."
    return tree


def slurm_node() -> Tree:
    tree = dgx_h100()
    tree.about = (
        f"{DGX_H100}. Inside an allocation of two nodes, with the fields that `scontrol show node` "
        "prints."
    )
    del tree.failed["scontrol version"]
    tree.files["/proc/sys/kernel/hostname"] = "gpu-003\n"
    tree.commands["scontrol version"] = "slurm 24.05.4\n"
    tree.commands["scontrol show node gpu-003"] = (
        "NodeName=gpu-003 Arch=x86_64 CoresPerSocket=56\n"
        "   CPUAlloc=224 CPUEfctv=224 CPUTot=224 CPULoad=1.02\n"
        "   AvailableFeatures=h100,ib\n   ActiveFeatures=h100,ib\n"
        "   Gres=gpu:h100:8(S:0-1)\n"
        "   NodeAddr=x NodeHostName=gpu-003 Version=24.05.4\n"
        "   RealMemory=2063840 AllocMem=0 FreeMem=1995210 Sockets=2 Boards=1\n"
        "   State=ALLOCATED ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A\n"
        "   Partitions=batch\n   CfgTRES=cpu=224,mem=2063840M,billing=224,gres/gpu=8\n"
    )
    tree.environment |= {
        "SLURMD_NODENAME": "gpu-003",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "48213",
        "SLURM_JOB_NODELIST": "gpu-[003-004]",
        "SLURM_JOB_PARTITION": "batch",
    }
    return tree


def dgx_a100() -> Tree:
    tree = Tree(
        about="DGX A100 80 GB, from the NCCL topology and `nvidia-smi topo -m` of one in NCCL "
        "issue 1505 (buses, NUMA nodes, PXB, storage adapters of 200 and 100 Gb/s on NUMA nodes of "
        "their own) and the matrix in ucx-py issue 749; buses of bridges are chosen."
    )
    tree.host(
        "dgxa-01",
        cpu="AMD EPYC 7742 64-Core Processor",
        vendor="AuthenticAMD",
        cores=64,
        numa_nodes=8,
    )
    tree.driver, tree.cuda = "550.90.07", "12.4"
    tree.software(nccl="2.26.2", torch="2.8.0")
    quads = (
        (0x00, 3, 0x01, (0x07, 0x0F), ((0x0C, "mlx5_0"), (0x12, "mlx5_1"))),
        (0x40, 1, 0x41, (0x47, 0x4E), ((0x4B, "mlx5_2"), (0x54, "mlx5_3"))),
        (0x80, 7, 0x81, (0x87, 0x90), ((0x8D, "mlx5_6"), (0x94, "mlx5_7"))),
        (0xB0, 5, 0xB1, (0xB7, 0xBD), ((0xBA, "mlx5_8"), (0xCC, "mlx5_9"))),
    )
    for root, numa, first, gpus, adapters in quads:
        top = f"pci0000:{root:02x}/0000:{root:02x}:01.1/0000:{first:02x}:00.0"
        cores = f"{numa * 16}-{numa * 16 + 15},{128 + numa * 16}-{143 + numa * 16}"
        for slot, bus in enumerate(gpus):
            chain = f"{top}/0000:{first + 1:02x}:0{slot}.0/0000:{bus - 2:02x}:00.0"
            chain = f"{chain}/0000:{bus - 1:02x}:00.0/0000:{bus:02x}:00.0"
            tree.gpu(A100_80G, chain, numa=numa, affinity=cores)
        for slot, (bus, name) in enumerate(adapters):
            chain = f"{top}/0000:{first + 1:02x}:0{slot + 4}.0/0000:{bus - 1:02x}:00.0"
            tree.adapter(
                Adapter(
                    name=name,
                    chain=f"{chain}/0000:{bus:02x}:00.0",
                    rate="200 Gb/sec (4X HDR)",
                    firmware="20.39.3004",
                    numa=numa,
                    generation=4,
                    device="0x101b",
                    interface=f"ibp{bus}s0",
                    gids=INFINIBAND,
                )
            )
    for number, root, bus, numa in ((4, 0x60, 0x61, 0), (10, 0xE0, 0xE1, 4)):
        card = f"pci0000:{root:02x}/0000:{root:02x}:03.1/0000:{bus:02x}:00"
        tree.adapter(
            Adapter(
                name=f"mlx5_{number}",
                chain=f"{card}.0",
                rate="200 Gb/sec (4X HDR)",
                firmware="20.39.3004",
                numa=numa,
                generation=4,
                device="0x101b",
                interface=f"ibp{bus}s0f0",
                gids=INFINIBAND,
            )
        )
        tree.adapter(
            Adapter(
                name=f"mlx5_{number + 1}",
                chain=f"{card}.1",
                rate="100 Gb/sec (4X EDR)",
                link_layer="Ethernet",
                firmware="20.39.3004",
                numa=numa,
                generation=4,
                device="0x101b",
                interface=f"enp{bus}s0f1np1",
                gids=ROCE,
            )
        )
        tree.interface(
            f"enp{bus}s0f1np1",
            chain=f"{card}.1",
            driver="mlx5_core",
            megabits=100000,
            numa=numa,
            networks=(("10.2.0.0", "255.255.0.0"),) if number == 4 else (),
            default=number == 4,
        )
    tree.switched(
        A100_80G, links=12, switches=tuple(f"00000000:C{bus:X}:00.0" for bus in range(4, 10))
    )
    return tree


def pcie_two_sockets() -> Tree:
    tree = Tree(
        about="Eight A100 80GB PCIe in two sockets, NVLink bridges (12 links) between neighbours, "
        "two GPUs below one PCIe switch, one HDR adapter a socket on a root port of its own, "
        "firmware of a ConnectX-6 and a ConnectX-4 Lx as `ibstat` in nccl-tests issue 128 has "
        "them; idle, so at PCIe 1.0. No single machine: buses are chosen."
    )
    tree.host("pcie-01", cpu="Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz", cores=32)
    tree.driver, tree.cuda = "535.183.01", "12.2"
    tree.software(gpudirect=True, nccl="2.21.5", torch="2.6.0")
    for numa, roots in ((0, (0x16, 0x49)), (1, (0x97, 0xC9))):
        cores = "0-31,64-95" if numa == 0 else "32-63,96-127"
        for root in roots:
            top = f"pci0000:{root:02x}/0000:{root:02x}:02.0/0000:{root + 1:02x}:00.0"
            for slot in (0, 1):
                end = f"0000:{root + 2:02x}:0{slot}.0/0000:{root + 3 + slot:02x}:00.0"
                tree.gpu(A100_PCIE, f"{top}/{end}", numa=numa, affinity=cores, generation=1)
    tree.joined(A100_PCIE, {gpu: (gpu ^ 1,) for gpu in range(8)}, links=12)
    for name, root, numa in (("mlx5_0", 0x30, 0), ("mlx5_1", 0xB0, 1)):
        chain = f"pci0000:{root:02x}/0000:{root:02x}:02.0/0000:{root + 1:02x}:00.0"
        tree.adapter(
            Adapter(
                name=name,
                chain=chain,
                rate="200 Gb/sec (4X HDR)",
                firmware="20.33.1048",
                numa=numa,
                generation=4,
                device="0x101b",
                interface=f"ibp{root + 1}s0",
                gids=INFINIBAND,
            )
        )
    chain = "pci0000:64/0000:64:02.0/0000:65:00.0"
    tree.adapter(
        Adapter(
            name="mlx5_2",
            chain=chain,
            rate="25 Gb/sec (1X EDR)",
            link_layer="Ethernet",
            firmware="14.32.1010",
            generation=3,
            width=8,
            device="0x1015",
            interface="ens1f0np0",
            gids=ROCE,
        )
    )
    tree.interface(
        "ens1f0np0",
        chain=chain,
        driver="mlx5_core",
        megabits=25000,
        networks=(("10.3.0.0", "255.255.255.0"),),
        default=True,
    )
    return tree


def rtx_4090() -> Tree:
    tree = Tree(
        about="Eight GeForce RTX 4090 without P2P (GNS in `nvidia-smi topo -p2p r`), from the NCCL "
        "log in nccl-tests issue 307 (buses, four GPUs below one switch a socket, the link between "
        "sockets); an Ethernet port of 10 Gb/s is chosen."
    )
    tree.host("ws-4090", cpu="Intel(R) Xeon(R) Platinum 8352V CPU @ 2.10GHz", cores=36)
    tree.limits(locked="8388608")
    tree.software(gpudirect=False, open_module=False)
    tree.p2p = P2P_GPU_NOT_SUPPORTED
    for numa, root, buses in ((0, 0x49, (0x4E, 0x4F, 0x50, 0x51)), (1, 0xC9, range(0xCE, 0xD2))):
        cores = "0-35,72-107" if numa == 0 else "36-71,108-143"
        top = f"pci0000:{root:02x}/0000:{root:02x}:02.0/0000:{root + 1:02x}:00.0"
        for slot, bus in enumerate(buses):
            end = f"0000:{root + 2:02x}:0{slot}.0/0000:{bus:02x}:00.0"
            tree.gpu(RTX_4090, f"{top}/{end}", numa=numa, affinity=cores, generation=1)
    tree.interface(
        "eno1",
        chain="pci0000:00/0000:00:1c.0/0000:02:00.0",
        driver="ixgbe",
        megabits=10000,
        networks=(("192.168.1.0", "255.255.255.0"),),
        default=True,
    )
    tree.interface("docker0", networks=(("172.17.0.0", "255.255.0.0"),))
    return tree


def gb200_tray() -> Tree:
    tree = Tree(
        about="One compute tray of a GB200 NVL72, from NVIDIA's table of its network ports "
        "(adapters, domains and buses, BlueField-3 for storage and management), the multi-node "
        "NVLink guide (4 GPUs a tray, 18 trays a domain) and GPU names and cores in sglang issue "
        "11208; cluster UUID and buses of GPUs are chosen."
    )
    tree.host(
        "tray-07",
        cpu="Neoverse-V2",
        vendor="ARM",
        architecture="aarch64",
        cores=72,
        threads=1,
        memory_gibibytes=960,
    )
    tree.driver, tree.cuda = "580.65.06", "13.0"
    tree.software()
    for domain, numa in ((0x08, 0), (0x09, 0), (0x18, 1), (0x19, 1)):
        at = f"{domain:04x}"
        gpu = tree.gpu(
            GB200,
            f"pci{at}:00/{at}:00:00.0/{at}:01:00.0",
            numa=numa,
            affinity="0-71" if numa == 0 else "72-143",
        )
        gpu["bus_id"] = f"{domain:08X}:01:00.0"
        gpu["fabric"] = {
            "cluster_uuid": "7a3d1c52b9e04f6890ab4c17d2e8f035",
            "clique": 32766,
            "state": 3,
            "status": 0,
        }
    tree.switched(GB200, links=18, switches=("00000000:00:00.0",))
    for name, domain in (("mlx5_0", 0x00), ("mlx5_1", 0x02), ("mlx5_4", 0x10), ("mlx5_5", 0x12)):
        at = f"{domain:04x}"
        tree.adapter(
            Adapter(
                name=name,
                chain=f"pci{at}:00/{at}:00:00.0/{at}:01:00.0/{at}:02:00.0/{at}:03:00.0",
                numa=domain >> 4,
                interface=f"ibP{domain}p3s0" if domain else "ibp3s0",
                gids=INFINIBAND,
            )
        )
    for first, domain in ((2, 0x06), (6, 0x16)):
        at = f"{domain:04x}"
        for function in (0, 1):
            chain = f"pci{at}:00/{at}:00:00.0/{at}:01:00.0/{at}:02:00.0/{at}:03:00.{function}"
            name = f"enP{domain}p3s0f{function}np{function}"
            tree.adapter(
                Adapter(
                    name=f"mlx5_{first + function}",
                    chain=chain,
                    rate="400 Gb/sec (4X NDR)" if function == 0 else "200 Gb/sec (4X HDR)",
                    link_layer="Ethernet",
                    firmware="32.43.1014",
                    numa=domain >> 4,
                    device="0xa2dc",
                    interface=name,
                    gids=ROCE,
                )
            )
            tree.interface(
                name,
                chain=chain,
                driver="mlx5_core",
                megabits=400000 if function == 0 else 200000,
                numa=domain >> 4,
                networks=((f"10.{4 + function}.0.0", "255.255.0.0"),),
                default=(first, function) == (2, 1),
            )
    return tree


def p5_efa() -> Tree:
    tree = Tree(
        about="AWS p5.48xlarge, from the NCCL topology that aws-ofi-nccl ships for it (4 EFA "
        "devices of 100 Gb/s below the bridge of each GPU, PCIe 4.0 x8), the device names in "
        "eks-charts pull request 1144 (so the buses), the bridges of the p5en in aws-ofi-nccl's "
        "test topology, and the kernel's EFA driver (rate 4X EDR, link layer Unknown)."
    )
    tree.host("ip-10-0-4-17", cpu="AMD EPYC 7R13 Processor", vendor="AuthenticAMD", cores=48)
    tree.driver = "570.172.08"
    tree.software(gpudirect=False)
    tree.files |= {
        "/sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
        "/sys/class/dmi/id/product_name": "p5.48xlarge\n",
    }
    plugin = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so"
    tree.links[plugin] = plugin
    for gpu in range(8):
        root, numa = 0x44 + 0x11 * gpu, gpu // 4
        top = f"pci0000:{root:02x}/0000:{root:02x}:00.0/0000:{root + 1:02x}:00.0"
        if gpu in (0, 4):
            chain = f"{top}/0000:{root + 2:02x}:00.0/0000:{root + 3:02x}:00.0"
            name = f"enp{root + 3}s0"
            tree.interface(
                name,
                chain=chain,
                driver="ena",
                numa=numa,
                networks=(("10.0.0.0", "255.255.240.0"),) if gpu == 0 else (),
                default=gpu == 0,
            )
        for device in range(4):
            bus = root + 0x0B + device
            tree.adapter(
                Adapter(
                    name=f"rdmap{bus}s0",
                    chain=f"{top}/0000:{root + 2:02x}:01.{device + 2}/0000:{bus:02x}:00.0",
                    rate="100 Gb/sec (4X EDR)",
                    link_layer="Unknown",
                    firmware="",
                    numa=numa,
                    generation=4,
                    width=8,
                    driver="efa",
                    vendor="0x1d0f",
                    device="0xefa1",
                    gids=INFINIBAND,
                )
            )
        chain = f"{top}/0000:{root + 2:02x}:02.0/0000:{root + 0x0F:02x}:00.0"
        cores = "0-47,96-143" if numa == 0 else "48-95,144-191"
        tree.gpu(H100, chain, numa=numa, affinity=cores)
    tree.switched(
        H100, links=18, switches=tuple(f"00000000:{bus:02X}:00.0" for bus in range(0xCC, 0xD0))
    )
    return tree


def a3_tcpx() -> Tree:
    tree = Tree(
        about="Google Cloud a3-highgpu-8g, from the provider's files for GPUDirect-TCPX "
        "(container-engine-accelerators: eth0 for the host, eth1 to eth4 for GPUs, two GPUs of one "
        "socket an interface, the cores of the sockets, the plugin in /var/lib/tcpx); 200 Gb/s an "
        "interface; buses are chosen."
    )
    tree.host("a3-0", cpu="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", cores=52)
    tree.driver, tree.cuda = "535.183.01", "12.2"
    tree.software(gpudirect=False, open_module=False, nccl="2.21.5", torch="2.6.0")
    tree.files |= {
        "/sys/class/dmi/id/sys_vendor": "Google\n",
        "/sys/class/dmi/id/product_name": "Google Compute Engine\n",
    }
    plugin = "/var/lib/tcpx/lib64/libnccl-net.so"
    tree.links[plugin] = plugin
    chain = "pci0000:00/0000:00:0c.0"
    tree.interface(
        "eth0",
        chain=chain,
        driver="gve",
        megabits=200000,
        networks=(("10.128.0.0", "255.255.240.0"),),
        default=True,
    )
    for number, bus in enumerate((0x04, 0x0A, 0x84, 0x8A), start=1):
        numa = 0 if number < 3 else 1
        cores = "0-51,104-155" if numa == 0 else "52-103,156-207"
        top = f"pci0000:{bus - 2:02x}/0000:{bus - 2:02x}:01.0/0000:{bus - 1:02x}:00.0"
        for slot in (0, 1):
            end = f"0000:{bus - 1:02x}:0{slot + 1}.0/0000:{bus + slot:02x}:00.0"
            tree.gpu(H100, f"{top}/{end}", numa=numa, affinity=cores)
        chain = f"{top}/0000:{bus - 1:02x}:03.0/0000:{bus + 2:02x}:00.0"
        tree.interface(
            f"eth{number}",
            chain=chain,
            driver="gve",
            megabits=200000,
            numa=numa,
            networks=((f"192.168.{number}.0", "255.255.255.0"),),
        )
    tree.switched(
        H100, links=18, switches=tuple(f"00000000:{bus:02X}:00.0" for bus in range(0x90, 0x94))
    )
    return tree


def mig() -> Tree:
    tree = Tree(
        about="Four A100-SXM4-40GB joined directly (4 links a pair, the HGX A100 4-GPU board), the "
        "first in MIG mode with two instances, from the MIG user guide (device names; each has "
        "half of the memory); one HDR adapter a socket; buses are chosen."
    )
    tree.host("hgx4-01", cpu="AMD EPYC 7543 32-Core Processor", vendor="AuthenticAMD", cores=32)
    tree.software()
    for gpu, (root, numa) in enumerate(((0x00, 0), (0x40, 0), (0x80, 1), (0xC0, 1))):
        cores = "0-31,64-95" if numa == 0 else "32-63,96-127"
        chain = f"pci0000:{root:02x}/0000:{root:02x}:01.1/0000:{root + 1:02x}:00.0"
        told = tree.gpu(A100_40G, chain, numa=numa, affinity=cores)
        if gpu == 0:
            told["mig"] = 1
            told["mig_devices"] = [
                {"name": "MIG 3g.20gb", "memory_bytes": 20480 * 2**20},
                {"name": "MIG 3g.20gb", "memory_bytes": 20480 * 2**20},
            ]
    everyone = (0, 1, 2, 3)
    tree.joined(A100_40G, {g: tuple(p for p in everyone if p != g) for g in everyone}, links=4)
    for name, root, numa in (("mlx5_0", 0x20, 0), ("mlx5_1", 0xA0, 1)):
        tree.adapter(
            Adapter(
                name=name,
                chain=f"pci0000:{root:02x}/0000:{root:02x}:03.1/0000:{root + 1:02x}:00.0",
                rate="200 Gb/sec (4X HDR)",
                firmware="20.39.3004",
                numa=numa,
                generation=4,
                device="0x101b",
                interface=f"ibp{root + 1}s0",
                gids=INFINIBAND,
            )
        )
        tree.interface(
            f"ibp{root + 1}s0",
            chain=f"pci0000:{root:02x}/0000:{root:02x}:03.1/0000:{root + 1:02x}:00.0",
            driver="mlx5_core",
            numa=numa,
            networks=(("10.6.0.0", "255.255.0.0"),) if name == "mlx5_0" else (),
            default=name == "mlx5_0",
        )
    return tree


def amd_mi300x() -> Tree:
    tree = Tree(
        about="Eight MI300X with ROCm: the KFD topology as the amdgpu driver publishes it (target "
        "90402 is gfx942, by rocm-cli pull request 343), PCI ids of the card; no NVIDIA driver."
    )
    tree.host("mi300-01", cpu="AMD EPYC 9534 64-Core Processor", vendor="AuthenticAMD", cores=64)
    tree.nvml_error = "no NVIDIA driver"
    tree.packages |= {"torch": "2.9.1+rocm6.4"}
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    for node in range(10):
        cpu = node < 2
        tree.files[f"{nodes}/{node}/properties"] = (
            f"cpu_cores_count {128 if cpu else 0}\n"
            f"simd_count {0 if cpu else 1216}\n"
            f"gfx_target_version {0 if cpu else 90402}\n"
            f"vendor_id {0 if cpu else 4098}\n"
            f"device_id {0 if cpu else 29857}\n"
            f"num_xcc {0 if cpu else 8}\n"
        )
    for bus, numa in zip(
        (0x05, 0x26, 0x46, 0x65, 0x85, 0xA6, 0xC6, 0xE5), (0, 0, 0, 0, 1, 1, 1, 1), strict=True
    ):
        tree.pci(
            f"pci0000:{bus - 5:02x}/0000:{bus - 5:02x}:01.1/0000:{bus:02x}:00.0",
            kind="0x120000",
            vendor="0x1002",
            device="0x74a1",
            numa=numa,
            generation=5,
            width=16,
        )
    tree.interface(
        "eno1",
        chain="pci0000:70/0000:70:01.1/0000:71:00.0",
        driver="bnxt_en",
        megabits=25000,
        networks=(("10.7.0.0", "255.255.0.0"),),
        default=True,
    )
    return tree


def nothing() -> Tree:
    tree = Tree(about="A virtual machine without any accelerator, from the kernel's file forms.")
    tree.host(
        "vm-1",
        cpu="Intel Xeon Processor (Icelake)",
        sockets=1,
        cores=4,
        threads=1,
        numa_nodes=1,
        memory_gibibytes=16,
    )
    tree.limits(locked="8388608")
    tree.nvml_error = "no NVIDIA driver"
    tree.packages |= {"torch": "2.9.1+cpu"}
    tree.interface(
        "eth0",
        chain="pci0000:00/0000:00:03.0/virtio0",
        driver="virtio_net",
        networks=(("10.8.0.0", "255.255.255.0"),),
        default=True,
    )
    return tree


def pcie_half_width() -> Tree:
    tree = Tree(
        about="Four L40S on root ports of one EPYC socket, idle (their links at PCIe 1.0 to save "
        "power), the third at 8 of 16 lanes; a 100 Gb/s Ethernet port; no single machine."
    )
    tree.host(
        "l40s-01",
        cpu="AMD EPYC 9354 32-Core Processor",
        vendor="AuthenticAMD",
        sockets=1,
        cores=32,
        numa_nodes=1,
        memory_gibibytes=755,
    )
    tree.software(gpudirect=False, open_module=False)
    for gpu, root in enumerate((0x00, 0x40, 0x80, 0xC0)):
        tree.gpu(
            L40S,
            f"pci0000:{root:02x}/0000:{root:02x}:01.1/0000:{root + 1:02x}:00.0",
            affinity="0-63",
            generation=1,
            width=8 if gpu == 2 else 16,
        )
    tree.interface(
        "eth0",
        chain="pci0000:20/0000:20:03.1/0000:21:00.0",
        driver="ice",
        megabits=100000,
        networks=(("10.9.0.0", "255.255.0.0"),),
        default=True,
    )
    return tree


def roce() -> Tree:
    tree = Tree(
        about="HGX H100 with eight RoCE ConnectX-7 and a bond of two ConnectX-6 Dx ports for "
        "storage, from the NCCL topology of such a board in nccl-tests issue 256 (adapter and "
        "GPU below one switch: PIX), NVIDIA's description of GID tables (each address as v1 and "
        "v2) and `ibstatus` of bonded ports in DeepEP issue 150."
    )
    tree.host("roce-01", cpu="Intel(R) Xeon(R) Platinum 8468", cores=48)
    tree.software()
    for gpu, root in enumerate((0x15, 0x26, 0x37, 0x48, 0x95, 0xA6, 0xB7, 0xD8)):
        numa = gpu // 4
        cores = "0-47,96-143" if numa == 0 else "48-95,144-191"
        top = f"pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{root + 1:02x}:00.0"
        tree.gpu(
            H100,
            f"{top}/0000:{root + 2:02x}:00.0/0000:{root + 3:02x}:00.0",
            numa=numa,
            affinity=cores,
        )
        chain = f"{top}/0000:{root + 2:02x}:01.0/0000:{root + 4:02x}:00.0"
        name = f"ens{10 + gpu}np0"
        tree.adapter(
            Adapter(
                name=f"mlx5_{gpu}",
                chain=chain,
                link_layer="Ethernet",
                numa=numa,
                interface=name,
                gids=ROCE,
            )
        )
        tree.interface(
            name,
            chain=chain,
            driver="mlx5_core",
            megabits=400000,
            numa=numa,
            networks=((f"10.20.{gpu}.0", "255.255.255.0"),),
        )
    chain = "pci0000:64/0000:64:02.0/0000:65:00.0"
    tree.adapter(
        Adapter(
            name="mlx5_bond_0",
            chain=chain,
            rate="100 Gb/sec (4X EDR)",
            link_layer="Ethernet",
            firmware="22.38.1002",
            generation=4,
            device="0x101d",
            interface="bond0",
            gids=ROCE,
        )
    )
    for function in (0, 1):
        tree.interface(
            f"ens1f{function}np{function}",
            chain=f"{chain[:-1]}{function}",
            driver="mlx5_core",
            megabits=100000,
        )
    tree.interface("bond0", megabits=200000, networks=(("10.10.0.0", "255.255.0.0"),), default=True)
    tree.switched(H100, links=18, switches=tuple(f"00000000:{bus:02X}:00.0" for bus in range(5, 9)))
    return tree


MACHINES: dict[str, Callable[[], Tree]] = {
    "a3-tcpx": a3_tcpx,
    "amd-mi300x": amd_mi300x,
    "dgx-a100": dgx_a100,
    "dgx-h100": dgx_h100,
    "gb200-tray": gb200_tray,
    "gpu-missing": gpu_missing,
    "mig": mig,
    "nic-slow": nic_slow,
    "nothing": nothing,
    "p5-efa": p5_efa,
    "pcie-half-width": pcie_half_width,
    "pcie-two-sockets": pcie_two_sockets,
    "roce": roce,
    "rtx-4090": rtx_4090,
    "slurm-node": slurm_node,
}


def recording_text(name: str) -> str:
    """What the file of one machine says: one fact a line, in a stable order."""
    lines = []
    for key, value in MACHINES[name]().document().items():
        if isinstance(value, dict) and key != "nvml" and value:
            rows = (f"  {_json(entry)}: {_json(value[entry])}" for entry in sorted(value))
            lines.append(f" {_json(key)}: {{\n" + ",\n".join(rows) + "\n }")
        elif key == "nvml" and value:
            rows = (f"  {_json(entry)}: {_nvml(part)}" for entry, part in value.items())
            lines.append(f" {_json(key)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            lines.append(f" {_json(key)}: {_json(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _nvml(part: Any) -> str:
    """One GPU or pair a line."""
    if not isinstance(part, list) or not part:
        return _json(part)
    return "[\n" + ",\n".join(f"   {_json(entry)}" for entry in part) + "\n  ]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)


def main() -> None:
    for name in MACHINES:
        (HERE / f"{name}.json").write_text(recording_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
