"""Settings: what to measure, and for how long; as a value and as the program's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.values import require_choice, require_positive, require_positive_int

MeasuredDtype = Literal["bf16", "fp16", "fp32", "fp8"]
MeasuredDevice = Literal["cuda", "cpu"]
Shape = tuple[int, int, int]
"""m, n and k of (m x k) @ (k x n)."""

SMALLEST_BYTES = 2**10
LARGEST_BYTES = 2**30
DEFAULT_SECONDS = 60.0
DEFAULT_DTYPES: dict[MeasuredDevice, tuple[MeasuredDtype, ...]] = {
    "cuda": ("bf16", "fp8", "fp16", "fp32"),
    "cpu": ("fp32", "bf16"),
}
"""The first one gets the most shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Groups of one axis of a mesh."""

    name: str
    ranks: int
    stride: int
    """Ranks between neighbours of a group."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise SpecError(f"axis {self.name!r} is no name: use one such as dp_shard")
        require_positive_int(ranks=self.ranks, stride=self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One shape of causal attention on one rank."""

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int

    def __post_init__(self) -> None:
        require_positive_int(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            seq_len=self.seq_len,
            head_dim=self.head_dim,
        )
        if self.heads % self.kv_heads:
            raise SpecError(
                f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}, such as 32,8"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the measuring program is asked for."""

    device: MeasuredDevice
    seconds: float = DEFAULT_SECONDS
    """For everything, once the processes have found each other."""
    dtypes: tuple[MeasuredDtype, ...] = ()
    """Of matmuls; none: `DEFAULT_DTYPES` of the device."""
    shapes: tuple[Shape, ...] = ()
    """Of matmuls; none: a grid. Cubes of growing size are measured in any case."""
    attention: tuple[Attention, ...] = ()
    """None: a grid."""
    axes: tuple[Axis, ...] = ()
    """Axes of the plan's mesh, beside the levels of the network."""
    smallest_bytes: int = SMALLEST_BYTES
    """Of collectives."""
    largest_bytes: int = LARGEST_BYTES

    def __post_init__(self) -> None:
        require_choice("device", self.device, get_args(MeasuredDevice))
        for dtype in self.dtypes:
            require_choice("dtypes", dtype, get_args(MeasuredDtype))
        require_positive(seconds=self.seconds)
        for shape in self.shapes:
            require_positive_int(m=shape[0], n=shape[1], k=shape[2])
        require_positive_int(smallest_bytes=self.smallest_bytes, largest_bytes=self.largest_bytes)
        if self.smallest_bytes > self.largest_bytes:
            raise SpecError(
                f"smallest_bytes {self.smallest_bytes} is above largest_bytes "
                f"{self.largest_bytes}: exchange them"
            )

    @property
    def matmul_dtypes(self) -> tuple[MeasuredDtype, ...]:
        """The number formats of matmuls."""
        return self.dtypes or DEFAULT_DTYPES[self.device]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of collectives: powers of 4 times the smallest, and the largest."""
        sizes = []
        size = self.smallest_bytes
        while size < self.largest_bytes:
            sizes.append(size)
            size *= 4
        return (*sizes, self.largest_bytes)


def words(settings: Settings) -> tuple[str, ...]:
    """The program's arguments for `settings`."""
    pairs = [
        ("--device", settings.device),
        ("--seconds", f"{settings.seconds:g}"),
        ("--smallest-bytes", str(settings.smallest_bytes)),
        ("--largest-bytes", str(settings.largest_bytes)),
    ]
    lists = (
        ("--dtypes", ",".join(settings.dtypes)),
        ("--shapes", ";".join(_numbers_text(shape) for shape in settings.shapes)),
        ("--attention", ";".join(_attention_text(one) for one in settings.attention)),
    )
    pairs += [(name, text) for name, text in lists if text]
    pairs += [("--axis", f"{axis.name}:{axis.ranks}:{axis.stride}") for axis in settings.axes]
    return tuple(word for pair in pairs for word in pair)


def parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    """The settings in the program's arguments, and where the log goes."""
    parser = _Parser(prog="python -m fsdpplan.topology.measure", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=get_args(MeasuredDevice), required=True)
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS)
    parser.add_argument("--dtypes", type=_listed(str, ","), default=())
    parser.add_argument("--shapes", type=_listed(_shape, ";"), default=())
    parser.add_argument("--attention", type=_listed(_attention, ";"), default=())
    parser.add_argument("--axis", type=_told(_axis), action="append", default=[])
    parser.add_argument("--smallest-bytes", type=int, default=SMALLEST_BYTES)
    parser.add_argument("--largest-bytes", type=int, default=LARGEST_BYTES)
    given = parser.parse_args(arguments)
    settings = Settings(
        device=given.device,
        seconds=given.seconds,
        dtypes=given.dtypes,
        shapes=given.shapes,
        attention=given.attention,
        axes=tuple(given.axis),
        smallest_bytes=given.smallest_bytes,
        largest_bytes=given.largest_bytes,
    )
    return settings, given.out


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SpecError(
            f"the measuring program was started wrongly: {message}; start it by fsdpplan calibrate"
        )


def _listed(of: Callable[[str], object], separator: str) -> Callable[[str], object]:
    """A reader of several things with `separator` between them."""

    def items(text: str) -> tuple[object, ...]:
        return tuple(of(part) for part in text.split(separator))

    return _told(items)


def _told(of: Callable[[str], object]) -> Callable[[str], object]:
    """`of` with its own words for what is wrong, which argparse would replace."""

    def read(text: str) -> object:
        try:
            return of(text)
        except SpecError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _shape(text: str) -> Shape:
    m, n, k = _numbers(text, count=3)
    return m, n, k


def _attention(text: str) -> Attention:
    batch, heads, kv_heads, seq_len, head_dim = _numbers(text, count=5)
    return Attention(
        batch=batch, heads=heads, kv_heads=kv_heads, seq_len=seq_len, head_dim=head_dim
    )


def _axis(text: str) -> Axis:
    name, _, numbers = text.partition(":")
    ranks, stride = _numbers(numbers, count=2, separator=":")
    return Axis(name=name, ranks=ranks, stride=stride)


def _numbers(text: str, *, count: int, separator: str = ",") -> tuple[int, ...]:
    parts = text.split(separator)
    if len(parts) != count or not all(part.isdecimal() for part in parts):
        raise SpecError(f"{text!r} must be {count} whole numbers with {separator!r} between them")
    return tuple(map(int, parts))


def _numbers_text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _attention_text(one: Attention) -> str:
    return _numbers_text((one.batch, one.heads, one.kv_heads, one.seq_len, one.head_dim))
