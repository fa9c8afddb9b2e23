"""Whole logs of NCCL, read as the product reads them line by line."""

from __future__ import annotations

from collections.abc import Iterable

from fsdpplan.topology.read.nccl_log import NcclLogReader
from fsdpplan.topology.read.nccl_report import NcclReport


def read_nccl_log(lines: Iterable[str]) -> NcclReport:
    """The report of a whole log."""
    reader = NcclLogReader()
    for line in lines:
        reader.feed(line)
    return reader.report()
