"""Traffic of Muon: parts of matrices go to the ranks that orthogonalise them, and back."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.kernels.muon import deal_rounds, muon_matrices
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.spec.case import Case
from fsdpplan.spec.training import DTYPE_BYTES


def muon_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """Two all-to-alls a round: each rank sends its parts of all matrices once, and results back."""
    matrices = muon_matrices(case, stage)
    for group, rounds in deal_rounds(matrices).items():
        elements = sum(one.local_elements for one in matrices if one.sharers == group)
        yield Calls(
            collective="all_to_all",
            group=group,
            dtype="bf16",
            count=2 * rounds,
            call_bytes=elements * DTYPE_BYTES["bf16"] // rounds,
        )
