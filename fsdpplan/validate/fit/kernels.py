"""Fit the numbers of matmuls and collectives to tables of measured kernels.

    python -m fsdpplan.validate.fit.kernels [--check] [--tables FOLDER] [--date YYYY-MM-DD]

Fitted are four constants that all CUDA devices share, the matmul ceiling of each device with rows,
and at most five numbers of each level of links with rows; nothing belongs to a source or a row. The
mean error is made least, each row counting 30 % at most, so that a few that nothing explains do not
bend the rest. The numbers go into `hardware_profiles` with how they were found; `--check` says
whether the profiles hold what a fresh fit gives, and exits with 1 if not.

Fit matmuls: two numbers that all CUDA devices share, and five of each device with rows.

Each (device, format, size class) counts alike, so that the many products of middling size do not
outweigh the short ones, where starts show, and the long ones, which throttle.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from fsdpplan.cost.kernels.rates import matmul_flops
from fsdpplan.files.profiles.catalogue import load_device, profile_text, profiles_folder
from fsdpplan.files.profiles.edit import with_numbers, with_source
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.cluster import Device
from fsdpplan.validate.compare.kernel_scores import size_class
from fsdpplan.validate.compare.kernels import (
    CollectiveRow,
    MatmulRow,
    by_sweep,
    predicted_matmul_seconds,
    read_collectives,
    read_matmuls,
    swept_devices,
)
from fsdpplan.validate.fit.levels import (
    FROM_BYTES,
    LARGE_BYTES,
    LEVELS,
    collective_errors,
    fit_levels,
    rows_of,
)
from fsdpplan.validate.fit.search_numbers import Fitted, Numbers, Range, capped, least

SHARED = {
    "fp8_fraction": Range(lowest=0.1, highest=1.0, starts=(0.95,)),
    "throttle_seconds": Range(lowest=1e-3, highest=5e-2, starts=(5e-3,)),
}
"""Of `physics`: what all CUDA devices share."""

OWN = {
    "matmul_fraction": Range(lowest=0.1, highest=0.99, starts=(0.82,)),
    "matmul_fill_depth": Range(lowest=1.0, highest=1024.0, starts=(128.0,)),
    "matmul_wave_fraction": Range(lowest=0.01, highest=1.0, starts=(0.3,)),
    "matmul_start_seconds": Range(lowest=1e-6, highest=1e-5, starts=(3e-6,)),
    "throttled_fraction": Range(lowest=0.5, highest=1.0, starts=(0.85,)),
}
"""Of each device: its ceiling, what a tile, a last wave and a kernel cost beside their work, and
the rate that its power limit leaves. Kernels before Hopper start a block of threads a tile, and
leave the last wave as it falls; later ones stay resident and share it out. No kernel starts in less
than 1 us."""

ROUNDS = 3
"""Devices one after the other with the shared numbers held, then those with the devices held."""


def fit_matmuls(rows: Sequence[MatmulRow]) -> dict[str, dict[str, float]]:
    """The shared numbers (`physics`) and each device's own for which the rows err least."""
    names = tuple(swept_devices().values())
    classes = _by_class(rows)
    shared = {name: one.starts[0] for name, one in SHARED.items()}
    own = {device: {name: one.starts[0] for name, one in OWN.items()} for device in names}
    for _ in range(ROUNDS):
        for device in names:
            mine = tuple(group for group in classes if group[0].device == device)

            def error(
                point: Numbers, device: str = device, mine: Sequence[list[MatmulRow]] = mine
            ) -> float:
                return _error(mine, {"physics": shared, device: point})  # noqa: B023

            own[device] = least(error, _from(OWN, own[device]))

        def shared_error(point: Numbers) -> float:
            return _error(classes, {"physics": point, **own})

        shared = least(shared_error, _from(SHARED, shared))
    return {"physics": shared, **own}


def _error(classes: Sequence[list[MatmulRow]], fitted: Fitted) -> float:
    devices = {name: _fitted_device(name, fitted) for name in fitted if name != "physics"}
    return fmean(capped(matmul_errors(group, devices)) for group in classes)


def _from(ranges: Mapping[str, Range], point: Numbers) -> dict[str, Range]:
    """`ranges`, searched from `point` on."""
    return {name: replace(one, starts=(point[name],)) for name, one in ranges.items()}


def _by_class(rows: Iterable[MatmulRow]) -> list[list[MatmulRow]]:
    classes: dict[tuple[str, str], list[MatmulRow]] = {}
    for row in rows:
        size = size_class(matmul_flops(m=row.m, n=row.n, k=row.k))
        classes.setdefault((row.sweep, size), []).append(row)
    return list(classes.values())


def fitted_devices(fitted: Fitted) -> dict[str, Device]:
    """Devices with rows, with the fitted numbers; {}: as their profiles have them."""
    return {name: _fitted_device(name, fitted) for name in swept_devices().values()}


def _fitted_device(name: str, fitted: Fitted) -> Device:
    device = load_device(name).device
    if name not in fitted:
        return device
    # few rows are bound by memory, and its share is fitted to training steps: left out here, so
    # that neither fit waits for the other
    changes = {**fitted["physics"], **fitted[name], "memory_fraction": 1.0}
    return replace(device, fit=replace(device.fit, **changes))  # type: ignore[arg-type]


def matmul_errors(rows: Iterable[MatmulRow], devices: Mapping[str, Device]) -> list[float]:
    """Predicted over measured, less 1, of each row."""
    return [
        predicted_matmul_seconds(row, device=devices[row.device]) / row.seconds - 1 for row in rows
    ]


TABLES = profiles_folder().parent / "tests" / "golden" / "bench"


def new_profiles(fitted: Fitted, *, tables: Tables, date: str | None) -> dict[str, str]:
    """Text of each profile with the fitted numbers and how they were found, by name."""
    texts: dict[str, str] = {}
    for key, numbers in fitted.items():
        name, _, level = key.partition(":")
        text = texts.get(name) or profile_text(name)
        text = with_numbers(text, numbers, level=level or None)
        source = next((fit.source for fit in LEVELS if fit.key == key), "matmul_fit")
        words = _words(key, fitted, tables) | ({"date": date} if date else {})
        texts[name] = with_source(text, source, words)
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The measured rows."""

    matmuls: tuple[MatmulRow, ...]
    collectives: tuple[CollectiveRow, ...]


def read_tables(folder: Path) -> Tables:
    """Both tables of a folder."""
    return Tables(
        matmuls=read_matmuls(folder / "matmul.csv"),
        collectives=read_collectives(folder / "collectives.csv"),
    )


def _words(key: str, fitted: Fitted, tables: Tables) -> dict[str, str]:
    """`how` and `from` of what was fitted under `key`."""
    level = next((level for level in LEVELS if level.key == key), None)
    program = "by fsdpplan.validate.fit.kernels"
    if level is not None:
        rows = rows_of(level, tables.collectives)
        sizes = [abs(error) for error in collective_errors(rows, fitted)]
        large = [s for row, s in zip(rows, sizes, strict=True) if row.gathered_bytes >= LARGE_BYTES]
        how = (
            f"{program}: least capped error of cost/network/collectives.py over {len(rows)} rows; "
            f"median error {median(sizes):.1%} from 1 MiB, {median(large):.1%} from 64 MiB"
        )
        return {"how": _percent(how), "from": "tests/golden/bench/collectives.csv"}
    mine = [row for row in tables.matmuls if key in ("physics", row.device)]
    devices = fitted_devices(fitted)
    medians = ", ".join(
        f"{median(map(abs, matmul_errors(sweep, devices))):.1%} {name}"
        for name, sweep in by_sweep(mine).items()
    )
    how = (
        f"{program}: least capped error of cost/kernels/rates.py over {len(mine)} rows with "
        f"m, n, k >= 1024; median error {medians}"
    )
    return {"how": _percent(how), "from": "tests/golden/bench/matmul.csv"}


def _percent(text: str) -> str:
    """`3.1%` as `3.1 %`."""
    return re.sub(r"(\d)%", r"\1 %", text)


def error_table(tables: Tables, fitted: Fitted) -> str:
    """Median errors by sweep: of the profiles as they are, and with `fitted`."""
    lines = [f"{'sweep':44} {'rows':>5} {'before':>8} {'after':>8}"]
    before, after = fitted_devices({}), fitted_devices(fitted)
    for name, rows in by_sweep(tables.matmuls).items():
        pair = [median(map(abs, matmul_errors(rows, devices))) for devices in (before, after)]
        lines.append(_line(f"matmul {name}", len(rows), pair))
    for least_bytes, words in ((FROM_BYTES, "from 1 MiB"), (LARGE_BYTES, "from 64 MiB")):
        calls = [row for row in tables.collectives if row.gathered_bytes >= least_bytes]
        for name, sweep in by_sweep(calls).items():
            pair = [median(map(abs, collective_errors(sweep, values))) for values in ({}, fitted)]
            lines.append(_line(f"{name} {words}", len(sweep), pair))
    return "\n".join(lines)


def _line(name: str, count: int, pair: Sequence[float]) -> str:
    return f"{name:44} {count:5} {pair[0]:8.1%} {pair[1]:8.1%}"


def count_of_constants(fitted: Fitted) -> str:
    """How many numbers were fitted, and where they belong."""
    shared = len(fitted["physics"])
    devices = sum(key in swept_devices().values() for key in fitted)
    links = {key: len(numbers) for key, numbers in fitted.items() if ":" in key}
    listed = ", ".join(f"{count} of {key}" for key, count in links.items())
    own = len(fitted[next(iter(swept_devices().values()))])
    return f"fitted: {shared} shared, {own} of each of {devices} devices, and of links {listed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print the errors, and write the profiles or compare with them."""
    parser = argparse.ArgumentParser(description="Fit matmul and link numbers of the profiles.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if they differ")
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the two tables")
    parser.add_argument("--date", help="date to write beside the numbers; kept if not given")
    options = parser.parse_args(arguments)
    tables = read_tables(options.tables)
    fitted = fit_matmuls(tables.matmuls) | fit_levels(tables.collectives)
    print(error_table(tables, fitted))
    print(count_of_constants(fitted))
    texts = new_profiles(fitted, tables=tables, date=options.date)
    stale = [name for name, text in texts.items() if text != profile_text(name)]
    if options.check:
        print(f"stale: {', '.join(stale) or 'none'}")
        return 1 if stale else 0
    for name in stale:
        write_text_atomically(profiles_folder() / f"{name}.toml", texts[name])
    print(f"written: {', '.join(stale) or 'none, all were up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
