"""How far off the projects are that the constants have never seen, for the pages that say so.

Read from `tests/golden/bench/held_out.json`, which `make fit` writes: nothing is predicted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist, mean, median, quantiles

from fsdpplan.files.profiles.catalogue import load_profile
from fsdpplan.files.profiles.devices import PHYSICS, PhysicsProfile
from fsdpplan.files.runs.table import bundled_runs, known_runs
from fsdpplan.validate.compare.pairs import log_residual
from fsdpplan.validate.fit.bands import is_inside
from fsdpplan.validate.fit.held_out import HELD_OUT, HeldOutRow, read_held_out
from fsdpplan.validate.runs.projects import HALF_AUTOCAST, POORLY_TUNED, is_tuned

NAMES = {
    "torchtitan": "torchtitan: FSDP2, tensor parallelism, fp8, on A100 and H100",
    "mosaicml_llmfoundry": "MosaicML LLM Foundry: FSDP1 on A100 and H100",
    "fms_fsdp": "fms-fsdp: FSDP1 and HSDP, eager and compiled",
    "internevo": "InternEvo: ZeRO-1 on 8 to 1,024 A100",
    "bloom_prequel": "BLOOM's search: Megatron-DeepSpeed in 3D on up to 384 A100",
    "nemo": "NeMo: Megatron Core in fp8 on H100",
    "dgxc_benchmarking": "DGX Cloud benchmarks: NeMo, MaxText, Pax on up to 2,304 H100 and GB200",
    "megatron_2020_tables": "Megatron-LM of 2020 on V100 and A100",
    POORLY_TUNED: "nanotron's sweep, pp 1 and tp up to 8",
    "libai_benchmark": "LiBai and Megatron-LM on an unnamed GPU, taken as V100",
    "xtuner_megatron_moe": "XTuner and Megatron: large mixtures on H800",
    HALF_AUTOCAST: "one script, GPT-2 Large on H100",
}
"""What the projects of the published runs are, in the order of the pages."""

_MEDIAN_OF_NORMAL = NormalDist().inv_cdf(0.75)


def held_out_table(name: str) -> Iterator[str]:
    """Lines of the table `name`: `projects`, one a line, or `strangers`, their mean."""
    projects = _rows_by_project()
    if name == "projects":
        yield "| project | rows | median error | nine in ten within |"
        yield "|---|---:|---:|---:|"
        for project, what in NAMES.items():
            errors = _errors(projects[project])
            most = quantiles(errors, n=10, method="inclusive")[-1]
            yield f"| {what} | {len(errors)} | {100 * median(errors):.1f} % | {100 * most:.0f} % |"
    elif name == "strangers":
        physics = load_profile(PHYSICS)
        assert isinstance(physics, PhysicsProfile)
        bands = dict(physics.errors)
        counted = [rows for project, rows in projects.items() if project != HALF_AUTOCAST]
        middle = mean(median(_errors(rows)) for rows in counted)
        inside = mean(mean(is_inside(row, bands) for row in rows) for rows in counted)
        yield "| a stack that the constants have never seen | |"
        yield "|---|---:|"
        yield f"| median error, as a mean over {len(counted)} projects | {100 * middle:.1f} % |"
        least = _floor(counted)
        yield f"| what the spread between them and inside each allows | {100 * least:.1f} % |"
        yield f"| steps inside the 80 % band, as a mean over them | {100 * inside:.0f} % |"
    else:
        raise ValueError(f"no table of held-out errors named {name!r}: projects or strangers")


def _floor(projects: Sequence[Sequence[HeldOutRow]]) -> float:
    """The median error of a prediction that is right for the mean of all projects, in the mean.

        mean over projects of Q sqrt(b**2 + w**2)

    Q = 0.674 is the median of |N(0, 1)|, b the root mean square of the projects' medians of
    log(measured / predicted), and w the spread around a project's own median (its median over Q).
    """
    residuals = [[log_residual(row) for row in rows] for rows in projects]
    middles = [median(each) for each in residuals]
    between = mean(middle**2 for middle in middles)
    around = [
        median(abs(one - middle) for one in each) / _MEDIAN_OF_NORMAL
        for each, middle in zip(residuals, middles, strict=True)
    ]
    return mean(_MEDIAN_OF_NORMAL * (between + inside**2) ** 0.5 for inside in around)


def _errors(rows: Sequence[HeldOutRow]) -> list[float]:
    return [abs(row.predicted_step_seconds / row.measured_step_seconds - 1) for row in rows]


def _rows_by_project() -> dict[str, list[HeldOutRow]]:
    """Of nanotron only its plain layouts, as everywhere."""
    table: Path = bundled_runs()
    runs = known_runs()
    projects: dict[str, list[HeldOutRow]] = defaultdict(list)
    for row in read_held_out(table.parent / HELD_OUT).rows:
        if is_tuned(runs[row.row]):
            projects[row.project].append(row)
    return projects
