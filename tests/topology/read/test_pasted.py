from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.run.detect import found_node, recorded_hosts, survey_of_recordings
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.topology import Topology
from fsdpplan.topology.conclude.levels import topology_of
from fsdpplan.topology.conclude.machine import machine_of
from fsdpplan.topology.read.gpu_names import UNNAMED_GPU
from fsdpplan.topology.read.pasted import Pasted, is_pasted, recording_of_pasted
from fsdpplan.topology.read.pci import path_in
from fsdpplan.topology.survey import survey_of

FOUR = """\
	GPU0	GPU1	GPU2	GPU3	NIC0	NIC1	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	NV18	NV18	NV18	PIX	SYS	0-31	0	N/A
GPU1	NV18	 X 	NV18	NV18	NODE	SYS	0-31	0	N/A
GPU2	NV18	NV18	 X 	NV18	SYS	NODE	32-63	1	N/A
GPU3	NV18	NV18	NV18	 X 	SYS	PIX	32-63	1	N/A
NIC0	PIX	NODE	SYS	SYS	 X 	SYS
NIC1	SYS	SYS	NODE	PIX	SYS	 X
"""
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""
LIST = "".join(
    f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-257d8671-d0e6-d1a7-dea9-95224{i}a668fa)\n"
    for i in range(4)
)
IBSTAT = """\
CA 'mlx5_0'
	CA type: MT4129
	Number of ports: 1
	Firmware version: 28.39.2048
	Node GUID: 0x0
	Port 1:
		State: Active
		Physical state: LinkUp
		Rate: 400
		Base lid: 30
		Link layer: InfiniBand
CA 'mlx5_bond_0'
	Firmware version: 28.39.2048
	Port 1:
		State: Active
		Rate: 400
		Link layer: InfiniBand
"""
IBSTATUS = """\
Infiniband device 'mlx5_0' port 1 status:
	default gid:	 fe80:0000
	state:		 4: ACTIVE
	phys state:	 5: LinkUp
	rate:		 200 Gb/sec (4X HDR)
	link_layer:	 Ethernet
Infiniband device 'mlx5_1' port 2 status:
	state:		 1: DOWN
	rate:		 10 Gb/sec (4X SDR)
	link_layer:	 InfiniBand
"""
XML = """\
<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64">
    <pci busid="0000:04:00.0" class="0x060400" vendor="0x1000" device="0xc030">
      <pci busid="0000:05:00.0" class="0x030200" vendor="0x10de" device="0x2330" \
link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:f3:00.0" count="9" tclass="0x068000"/>
          <nvlink target="0000:f4:00.0" count="9" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:06:00.0" class="0x020700" vendor="0x15b3" device="0x1021">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
  <cpu host_hash="0x1" numaid="1" affinity="ffff0000" arch="x86_64">
    <pci busid="0000:84:00.0" class="0x060400" vendor="0x1000" device="0xc030">
      <pci busid="0000:85:00.0" class="0x030200" vendor="0x10de" device="0x2330" \
link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="90" rank="1" gdr="1">
          <nvlink target="0000:f3:00.0" count="9" tclass="0x068000"/>
          <nvlink target="0000:f4:00.0" count="9" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:86:00.0" class="0x020700" vendor="0x15b3" device="0x1021">
        <nic><net name="mlx5_1" dev="1" speed="400000" port="1" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
</system>
"""


def machine(*texts: str) -> Machine:
    pasted = [Pasted(text=text, where=f"{i}.txt") for i, text in enumerate(texts)]
    return machine_of(recording_of_pasted(pasted, host="pasted"))


def one_line(text: str) -> tuple[str, Machine | None]:
    """Why it is refused, or what was read."""
    try:
        return "", machine(text)
    except SpecError as error:
        return str(error), None


def concluded(*texts: str) -> tuple[Machine, Topology]:
    read = machine(*texts)
    return read, topology_of(read)


def test_a_matrix_says_gpus_nvlinks_and_the_nearest_adapters() -> None:
    read, topology = concluded(FOUR + LEGEND)
    assert [len(gpu.nvlinks) for gpu in read.gpus] == [18] * 4
    assert [island.kind for island in topology.islands] == ["nvswitch"]
    assert [nic.name for nic in read.nics] == ["mlx5_0", "mlx5_bond_0"]
    assert [gpu.numa_node for gpu in read.gpus] == [0, 0, 1, 1]
    assert read.gpus[2].cpu_affinity == "32-63"
    # and guesses nothing else
    assert {gpu.name for gpu in read.gpus} == {UNNAMED_GPU}
    assert topology.inside_bytes_per_second is topology.across_bytes_per_second is None
    assert topology.rails == ()
    said = " ".join(read.unread)
    for what in ("nvidia-smi -L", "ibstat", "mlx5_bond_0", "PCIe lanes"):
        assert what in said


def test_with_names_and_ports_beside_it_the_profile_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "lab-7.txt"
    place.write_text(FOUR + LEGEND + LIST + IBSTAT, encoding="utf-8")
    survey = survey_of_recordings(recorded_hosts([place]))
    topology = survey.topologies[0]
    assert topology.inside_bytes_per_second == 18 * 25e9
    assert [(r.nic, r.gpus) for r in topology.rails] == [
        ("mlx5_0", (0, 1)),
        ("mlx5_bond_0", (2, 3)),
    ]
    assert topology.across_bytes_per_second == 2 * 50e9 / 4
    node = found_node(survey)
    assert (node.name, node.device, node.gpus_per_node) == ("lab-7", "h100-sxm-80g", 4)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_texts_of_one_host_may_lie_in_several_files(order: Sequence[int], tmp_path: Path) -> None:
    texts = [("a.txt", FOUR + LEGEND), ("b.txt", LIST), ("c.txt", IBSTAT)]
    paths = []
    for i in order:
        name, text = texts[i]
        paths.append(tmp_path / name)
        paths[-1].write_text(text, encoding="utf-8")
    (recording,) = recorded_hosts(paths)
    read = machine_of(recording)
    assert read.host.name == "a"
    assert len(topology_of(read).rails) == 2


def test_two_matrices_are_two_hosts_and_a_port_list_beside_them_is_of_none(
    tmp_path: Path,
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(FOUR, encoding="utf-8")
    (tmp_path / "c.txt").write_text(IBSTAT, encoding="utf-8")
    both = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert [machine_of(each).host.name for each in recorded_hosts(both)] == ["a", "b"]
    with pytest.raises(SpecError, match=r"c\.txt does not say of which of 2 hosts"):
        recorded_hosts([*both, tmp_path / "c.txt"])


A800_OF_NCCL_933 = (
    [2, 4, 6, 8, 1, 3, 5, 7],
    "NODE SYS PIX SYS NODE SYS NODE SYS NODE",
)
"""GPU -> its adapter, and the first GPU's row, of NVIDIA/nccl issue 933: A800, NV8 everywhere."""


def test_the_matrix_of_a_public_report() -> None:
    near = A800_OF_NCCL_933[0]

    def cell(one: str, other: str) -> str:
        if one == other:
            return "X"
        side = {f"GPU{i}": i // 4 for i in range(8)}
        side |= {f"NIC{nic}": i // 4 for i, nic in enumerate(near)} | {"NIC0": 0}
        if one.startswith("GPU") and other.startswith("GPU"):
            return "NV8"
        pair = {one, other}
        if any(pair == {f"GPU{i}", f"NIC{nic}"} for i, nic in enumerate(near)):
            return "PIX"
        return "NODE" if side[one] == side[other] else "SYS"

    names = [f"GPU{i}" for i in range(8)] + [f"NIC{i}" for i in range(9)]
    rows = [[cell(one, other) for other in names] for one in names]
    assert " ".join(rows[0][8:]) == A800_OF_NCCL_933[1]
    text = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\n"
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        affinity = ["0-47,96-143" if i < 4 else "48-95,144-191", str(i // 4)] if i < 8 else []
        text += "\t".join([name, *row, *affinity]) + "\n"
    ports = "".join(
        f"CA 'NIC{i}'\n\tFirmware version: 20.1\n\tPort 1:\n\t\tState: Active\n\t\tRate: 200\n"
        "\t\tLink layer: InfiniBand\n"
        for i in range(9)
    )
    listed = "".join(f"GPU {i}: NVIDIA A800-SXM4-80GB (UUID: GPU-{i})\n" for i in range(8))
    topology = concluded(text, ports, listed)[1]
    assert topology.islands[0].kind == "nvswitch"
    assert topology.inside_bytes_per_second == 8 * 25e9
    served = {rail.nic: rail.gpus for rail in topology.rails}
    assert served == {f"NIC{nic}": (i,) for i, nic in enumerate(near)}  # NIC0 is storage
    assert all(rail.path == "pix" for rail in topology.rails)


DIRECT = [
    ("NV4", 2, "NVIDIA RTX A6000", "nvlink", 4 * 14.0625e9),
    ("NV4", 4, "NVIDIA A100-SXM4-40GB", "nvlink", 12 * 25e9),
    ("NV6", 4, "Tesla V100-SXM3-32GB", "nvswitch", 6 * 25e9),
    ("NV12", 8, "NVIDIA A100-SXM4-80GB", "nvswitch", 12 * 25e9),
    ("NV18", 8, "NVIDIA B200", "nvswitch", 18 * 50e9),
    ("SYS", 4, "NVIDIA GeForce RTX 4090", "alone", None),
]


@pytest.mark.parametrize(("way", "gpus", "name", "kind", "bandwidth"), DIRECT)
def test_links_lead_to_switches_where_a_gpu_has_not_enough_for_its_peers(
    way: str, gpus: int, name: str, kind: str, bandwidth: float | None
) -> None:
    """A100 boards of 4 by NVLinks 4 each, DGX-2, HGX: NVIDIA's data sheets, one direction."""
    names = [f"GPU{i}" for i in range(gpus)]
    text = " ".join(names) + " CPU Affinity NUMA Affinity\n"
    for one in names:
        text += " ".join([one, *("X" if one == other else way for other in names), "0-7 0\n"])
    listed = "".join(f"GPU {i}: {name} (UUID: GPU-{i})\n" for i in range(gpus))
    topology = concluded(text, listed)[1]
    assert topology.islands[0].kind == kind
    assert topology.islands[0].bandwidth_bytes_per_second == bandwidth


ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[str], list[tuple[int, ...]]]:
    """Devices and where they hang: NUMA node, host bridge, switch, switch below it."""
    gpus, nics = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    small = st.integers(0, 1)
    return names, [draw(st.tuples(small, small, small, small)) for _ in names]


def drawn_way(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    shared = next((i for i in range(4) if one[i] != other[i]), 4)
    return ORDER[4 - shared]


def matrix_of(names: Sequence[str], places: Sequence[tuple[int, ...]]) -> str:
    text = " ".join(names) + " CPU Affinity NUMA Affinity GPU NUMA ID\n"
    for name, place in zip(names, places, strict=True):
        row = [
            "X" if name == other else drawn_way(place, there)
            for other, there in zip(names, places, strict=True)
        ]
        affinity = ["0-7", str(place[0]), "N/A"] if name.startswith("GPU") else []
        text += " ".join([name, *row, *affinity]) + "\n"
    return text


@given(trees())
def test_every_way_of_a_matrix_is_the_way_that_is_concluded(
    tree: tuple[list[str], list[tuple[int, ...]]],
) -> None:
    names, places = tree
    read = machine(matrix_of(names, places))
    nics = {nic.name: nic for nic in read.nics}
    for gpu, place in zip(read.gpus, places, strict=False):
        for name, there in zip(names, places, strict=True):
            if name in nics:
                way = path_in(read, str(gpu.bus_id), str(nics[name].bus_id))
                assert way == drawn_way(place, there).lower()


@given(trees(), st.integers(12, 90))
def test_a_wrapped_matrix_is_the_matrix(
    tree: tuple[list[str], list[tuple[int, ...]]], width: int
) -> None:
    text = matrix_of(*tree)
    wrapped = "\n".join("\n".join(textwrap.wrap(line, width)) for line in text.splitlines())
    assert machine(wrapped) == machine(text)


@given(st.integers(0, len(FOUR)))
def test_a_cut_matrix_says_what_is_lost_or_is_refused_by_its_line(at: int) -> None:
    if not is_pasted(FOUR[:at]):
        return
    refused, read = one_line(FOUR[:at])
    if read is None:
        assert re.match(r"0\.txt: line 1: ", refused)
    elif at < FOUR.rindex("SYS"):
        assert any("nvidia-smi topo -m" in each for each in read.unread)


def test_a_matrix_cut_after_two_rows_still_joins_its_gpus() -> None:
    read, topology = concluded("\n".join(FOUR.splitlines()[:3]), LIST)
    assert [island.gpus for island in topology.islands] == [(0, 1, 2, 3)]
    assert "rows of GPU2, GPU3, NIC0, NIC1" in " ".join(read.unread)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "GPU1	NV18	 X ",
            "GPU1	PIX	 X ",
            r"line 3: row GPU1 says PIX of GPU0, and line 2 NV18",
        ),
        ("GPU1	NV18	 X 	NV18", "GPU1	 X 	NV18", r"line 3: row GPU1 has"),
        (
            "PIX	SYS	0-31",
            "PIX	0-31",
            r"line 2: row GPU0 has 5 cells, and the heading names 6",
        ),
        ("GPU3	NV18", "GPU2	NV18", r"line 5: a second row GPU2"),
        ("GPU3	NIC0", "GPU1	NIC0", r"line 1: the heading"),
    ],
)
def test_a_broken_matrix_is_refused_by_line(old: str, new: str, message: str) -> None:
    assert old in FOUR
    with pytest.raises(SpecError, match=message):
        machine(FOUR.replace(old, new, 1))


def test_the_matrix_without_nvlinks_does_not_say_that_there_are_none() -> None:
    mp = FOUR.replace("NV18", "NODE") + LEGEND.replace(
        "  NV#  = Connection traversing a bonded set of # NVLinks\n", ""
    )
    assert any("topo -mp" in each for each in machine(mp).unread)
    assert not any("topo -mp" in each for each in machine(FOUR + LEGEND).unread)


def test_ports_are_read_as_both_programs_print_them() -> None:
    first, second = machine(IBSTATUS).nics
    assert (first.name, first.state, first.link_layer) == ("mlx5_0", "active", "ethernet")
    assert first.rate_bytes_per_second == 25e9
    assert (second.port, second.state, second.rate_bytes_per_second) == (2, "down", None)
    assert machine(IBSTAT).nics[0].rate_bytes_per_second == 50e9


def test_the_topology_that_nccl_dumps() -> None:
    read, topology = concluded(XML)
    assert [gpu.name for gpu in read.gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert topology.inside_bytes_per_second == 18 * 25e9
    assert topology.islands[0].kind == "nvswitch"
    assert [(rail.nic, rail.gpus, rail.path) for rail in topology.rails] == [
        ("mlx5_0", (0,), "pix"),
        ("mlx5_1", (1,), "pix"),
    ]
    assert topology.across_bytes_per_second == 50e9
    assert any("those of the job" in each for each in read.unread)


def test_direct_links_and_sockets_of_a_dump() -> None:
    direct = re.sub(r'target="0000:f[34]:00.0" (.*)"0x068000"', r'target="X" \1"0x030200"', XML)
    one, two = direct.split("</cpu>", 1)
    text = one.replace('"X"', '"0000:85:00.0"') + "</cpu>" + two.replace('"X"', '"0000:05:00.0"')
    read, topology = concluded(
        text.replace('name="mlx5_0"', 'name="eth0"').replace('port="1"', 'port="0"', 1)
    )
    assert topology.islands[0].kind == "nvlink"
    assert [nic.name for nic in read.nics] == ["mlx5_1"]
    assert [each.name for each in read.interfaces] == ["eth0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'<!DOCTYPE x [<!ENTITY a "b">]>\n{XML}', "line 1: XML with <!DOCTYPE"),
        (XML.replace("<cpu", '<!ENTITY a "b"><cpu', 1), "line 2: XML with <!ENTITY"),
        (XML[: len(XML) // 2], "line 1.: NCCL's topology breaks off"),
        ("<system>" + "<pci>" * 100, "nests at most"),
        ("<system>" + "<net/>" * 30_000 + "</system>", "has at most"),
        (XML.replace('host_hash="0x1" numaid="1"', 'host_hash="0x2" numaid="1"'), "2 hosts"),
        (XML.replace("&", "").replace('"ffff"', '"&lol;"'), "breaks off"),
        (FOUR + XML, "keep one of them"),
    ],
)
def test_hostile_and_broken_dumps_are_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        machine(text)


UNKNOWN = [
    ("#!/bin/bash\n#SBATCH -N 2\nsrun x\n", "a Slurm script"),
    ("# nThread 1 nGpus 1 minBytes 8 maxBytes 8\n", "a table of nccl-tests"),
    ("===== Weight between two GPUs =====\n       GPU0  GPU1\nGPU0  0  40\n", "rocm-smi"),
    ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "an accelerate"),
    ("[model]\nname = 'llama3'\n", "a torchtitan configuration"),
    ("import torch\n", "a Python program"),
    ("| NVIDIA-SMI 550.54  Driver |\n", "the table of nvidia-smi"),
    ("<?xml version='1.0'?><a/>", "XML or HTML"),
    ("host:1 [0] NCCL INFO Channel 00\n", "a log of NCCL"),
    ("a\tb\nхост\n", "it begins with"),
]


@pytest.mark.parametrize(("text", "what"), UNKNOWN)
def test_an_unknown_file_is_named_by_what_it_seems_to_be(
    text: str, what: str, tmp_path: Path
) -> None:
    place = tmp_path / "pasted"
    place.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=f"(?s)pasted: .*{what}"):
        recorded_hosts([place])


@pytest.mark.parametrize(
    ("text", "what"),
    [('{"zero_optimization": {"stage": 3}}', "DeepSpeed"), ('{"model_type": "llama"}', "config")],
)
def test_json_that_is_no_recording_is_named_too(text: str, what: str, tmp_path: Path) -> None:
    place = tmp_path / "pasted.json"
    place.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=what):
        recorded_hosts([place])


PARTS = (FOUR, LEGEND, LIST, IBSTAT, IBSTATUS, XML)


@st.composite
def scrambled(draw: st.DrawFn) -> str:
    """Pieces of what is read, cut, repeated and with other characters in between."""
    text = ""
    for _ in range(draw(st.integers(1, 4))):
        part = draw(st.sampled_from(PARTS))
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(part))] * 2)))
        text += part[start:end] + draw(
            st.sampled_from(["", "\n", "\x00", "GPU0 X", "<system>", "é\u2028", "NV99 ", "9" * 40])
        )
    return text


@settings(max_examples=300)
@given(scrambled())
def test_no_paste_ends_otherwise_than_in_a_host_or_one_line(text: str) -> None:
    if is_pasted(text):
        refused, read = one_line(text)
        assert "\n" not in refused
        if read is not None:
            survey_of([read])
