"""What a rank sees of the tiny step, and how far it is from its part of what one process has."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..clip import copies
from ..config import PlanConfig
from ..model.weights import named_parameters, part_of
from ..parallel.assemble import Assembled
from ..parallel.context_parallel import own_positions
from ..parallel.mesh import batch_rank, place
from ..parallel.pipeline_stages import rank_shares
from ..parallel.shards import local, local_gradient
from ..parallel.tied_tables import HEAD, TABLE, copied_parameters
from ..private_torch import without_dispatch_modes
from .plan import kinds_of, sequence_number
from .reference import Reference, watch

TOLERANCE = 1e-4
"""Of fp32: a hundred times what sums in another order come to, and less than the share of one rank
of thousands."""
LATER_TOLERANCE = 3e-2
"""Of the second step: AdamW's first update is a sign, which rounding turns where gradients vanish.
With parameters of before the step the loss is off by ten times as much."""
UPDATE_TOLERANCE = 2e-2
"""Muon orthogonalises, on GPUs in bf16."""
LEAST_SCALE = 1e-2
"""Of the root mean square of all gradients: those of keys' biases are 0 but for rounding, which is
not to be measured by itself."""
SEEN_GRADIENT = 1e-4
"""Smaller ones are not looked at behind AdamW, which takes their sign."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a rank saw of the step; what is right is left empty."""

    rank: int
    gathered: list[str] = field(default_factory=list)
    """Parameters that forward was given with other values."""
    outputs: list[str] = field(default_factory=list)
    """Parts of the model whose input or output is wrong, as `watch` names them."""
    losses: list[float] = field(default_factory=list)
    """(found, one process's), where they differ."""
    norms: list[float] = field(default_factory=list)
    squares: float = 0.0
    """This rank's share of the squared norm."""
    gradients: list[str] = field(default_factory=list)
    """Parameters whose gradient is wrong, in the order of forward."""
    compared: int = 0
    """Parameters in all."""
    ratio: float | None = None
    """What all wrong ones are of one process's, where that is one number; 0: there are none."""
    updates: list[str] = field(default_factory=list)
    """Parameters that the optimizer moved otherwise."""
    later_losses: list[float] = field(default_factory=list)
    later_norms: list[float] = field(default_factory=list)
    digest: str = ""
    """Of the bits that replicas must share."""
    worst: dict[str, float] = field(default_factory=dict)
    """How far each quantity is from one process's, at most, over what it may be."""

    @property
    def is_right(self) -> bool:
        """Apart from the digest, which says nothing by itself."""
        return not (
            self.gathered
            or self.outputs
            or self.losses
            or self.norms
            or self.gradients
            or self.updates
            or self.later_losses
            or self.later_norms
        )

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What this rank keeps of its step, in case that somebody asks why."""

    seen: Seen
    gradients: Mapping[str, Tensor]
    """This rank's parts, on the CPU."""
    cuts: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]]
    """Name -> how a parameter is split, if it is."""
    named: Callable[[str], str]
    """A parameter's name in one process."""
    bits: Mapping[str, int]
    """Name -> checksum of what replicas must share."""


def one_process_name(plan: PlanConfig, name: str) -> str:
    """A parameter's name in one process, where tied tables are one."""
    return TABLE if plan.model.tied_embeddings and name == HEAD else name


class Look:
    """Compares what a rank has with its part of what one process has."""

    def __init__(self, plan: PlanConfig, assembled: Assembled, reference: Reference) -> None:
        self._plan, self._assembled, self._reference = plan, assembled, reference
        self.seen = Seen(rank=dist.get_rank())
        self._place = place(plan.layout, self.seen.rank)
        self._counted_elsewhere = copied_parameters(plan)
        self._parameters = {
            name: parameter
            for name, parameter in named_parameters(assembled.model)
            if parameter.requires_grad
        }
        self._gradients: dict[str, Tensor] = {}
        self._bits: dict[str, int] = {}
        self._checked: set[str] = set()
        self._scale = rms(torch.cat([each.flatten() for each in reference.gradients.values()]))

    def kept(self) -> Kept:
        """What is kept when the model is let go of."""
        return Kept(
            seen=self.seen,
            gradients=self._gradients,
            cuts={
                name: (parameter.device_mesh, parameter.placements)
                for name, parameter in self._parameters.items()
                if isinstance(parameter, DTensor)
            },
            named=partial(one_process_name, self._plan),
            bits=self._bits,
        )

    @contextmanager
    def at_forward(self) -> Iterator[None]:
        """Compare parameters as forward is given them, and what parts of the model give."""
        handles = [
            module.register_forward_pre_hook(
                lambda module, _, path=path: self._at_parameters(path, module)
            )
            for path, module in self._assembled.model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        expected = self._expected_outputs()

        def look(name: str, values: Tensor) -> None:
            self._at_output(name, values, expected[name])

        handles += watch(self._assembled.model, look)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _at_parameters(self, path: str, module: nn.Module) -> None:
        with without_dispatch_modes():
            self._compare_parameters(path, module)

    def _compare_parameters(self, path: str, module: nn.Module) -> None:
        for own_name, parameter in module.named_parameters(recurse=False):
            name = one_process_name(self._plan, f"{path}.{own_name}")
            if name in self._checked:
                continue
            self._checked.add(name)
            found = local(parameter)
            expected = part_of(self._reference.initial[name], parameter).to(found.device)
            if found.shape != expected.shape or not torch.equal(found, expected):
                self.seen.gathered.append(name)

    @torch.no_grad()
    def _at_output(self, name: str, output: Tensor, expected: list[Tensor]) -> None:
        """Which micro-batch it is of, schedules and recomputation know: it must be one of them."""
        with without_dispatch_modes():
            found, scale = local(output).detach(), rms(self._reference.outputs[name])
            error = min(error_of(found, each.to(found.device), scale) for each in expected)
        self._note("outputs", error, TOLERANCE)
        if not error <= TOLERANCE and name not in self.seen.outputs:
            self.seen.outputs.append(name)

    def _expected_outputs(self) -> dict[str, list[Tensor]]:
        """Of each watched part, this rank's piece of each micro-batch."""
        layout, length = self._plan.layout, self._plan.training.seq_len
        own = self._own_positions()
        each = len(own) // layout.tp if layout.tp > 1 else len(own)
        own = own[self._place.tp * each : (self._place.tp + 1) * each]
        assert len(own) <= length
        return {
            name: [output[kinds][:, own] for kinds in self._own_kinds()]
            for name, output in self._reference.outputs.items()
        }

    def _own_kinds(self) -> list[list[int]]:
        """Of each micro-batch of this rank, the kinds of its sequences."""
        layout = self._plan.layout
        part, kinds = batch_rank(layout, self.seen.rank), kinds_of(self._plan)
        return [
            [
                sequence_number(layout, micro_batch=micro_batch, part=part, row=row) % kinds
                for row in range(layout.micro_batch)
            ]
            for micro_batch in range(layout.num_microbatches)
        ]

    def _own_positions(self) -> Tensor:
        if self._plan.layout.cp == 1:
            return torch.arange(self._plan.training.seq_len)
        return own_positions(self._plan, cp_rank=self._place.cp)

    def expected_loss(self, losses: Tensor) -> float | None:
        """The mean loss of this rank's targets; None on ranks that have no loss."""
        if self._plan.layout.pp > 1:
            shares = rank_shares(self._plan, pp_rank=self._place.pp)
            if not any(share.is_last for share in shares):
                return None
        kinds = [kind for batch in self._own_kinds() for kind in batch]
        return float(losses[kinds][:, self._own_positions()].mean())

    def keep_gradients(self, *_: object) -> None:
        """Before the optimizer's step."""
        self._gradients = {
            name: local_gradient(parameter).detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self._parameters.items()
        }

    def at_gradients(self, *_: object) -> None:
        """Before the optimizer's first step: compare gradients that are not clipped."""
        if self._gradients:
            return
        self.keep_gradients()
        seen = self.seen
        for name, parameter in self._parameters.items():
            found, expected = self._gradients[name], self._own(name, self._reference.gradients)
            seen.compared += 1
            here = 0.0 if name in self._counted_elsewhere else 1.0
            assert parameter.grad is not None
            shares = copies(parameter.grad, self._assembled.meshes)
            seen.squares += here * float(found.square().sum()) / shares
            scale = rms(self._reference.gradients[one_process_name(self._plan, name)])
            error = error_of(found, expected, max(scale, LEAST_SCALE * self._scale))
            self._note("gradients", error, TOLERANCE)
            if not error <= TOLERANCE:
                seen.gradients.append(name)
        seen.ratio = self._ratio()
        self._bits |= {
            f"the gradient of {name}": _checksum(gradient)
            for name, gradient in self._gradients.items()
        }

    def _ratio(self) -> float | None:
        """The number that makes all wrong gradients of one process's, if there is one."""
        found, expected = (
            torch.cat([each[name].flatten() for name in self.seen.gradients] or [torch.zeros(0)])
            for each in (
                self._gradients,
                {n: self._own(n, self._reference.gradients) for n in self.seen.gradients},
            )
        )
        squares = float(expected.square().sum())
        if not squares:
            return None
        ratio = float((found * expected).sum()) / squares
        left = float((found - ratio * expected).norm()) / sqrt(squares)
        return ratio if left <= 10 * TOLERANCE * max(1.0, abs(ratio)) else None

    @torch.no_grad()
    def after_first(self, loss: float, norm: float) -> None:
        """Compare the loss, the norm and what the optimizer did."""
        self.seen.losses = self._differing_loss(loss, self._reference.losses, TOLERANCE)
        self.seen.norms = self._differing("norms", norm, self._reference.norm, 10 * TOLERANCE)
        for name, parameter in self._parameters.items():
            now = local(parameter).detach().cpu()
            self._bits[name] = _checksum(now)
            gradient = self._own(name, self._reference.gradients)
            counts = gradient.abs() > SEEN_GRADIENT * self._scale
            found = (now - self._own(name, self._reference.initial))[counts]
            expected = self._own(name, self._reference.updates)[counts]
            error = error_of(found, expected, rms(expected)) if expected.numel() else 0.0
            self._note("updates", error, UPDATE_TOLERANCE)
            if not error <= UPDATE_TOLERANCE:
                self.seen.updates.append(name)
        for name, buffer in self._assembled.model.named_buffers():
            self._bits[name] = _checksum(buffer.detach().cpu())
        words = " ".join(map(str, self._bits.values()))
        kernels = torch.backends.cpu.get_cpu_capability()  # others round otherwise
        self.seen.digest = f"{kernels} {zlib.crc32(words.encode()):08x}"

    def after_second(self, loss: float, norm: float) -> None:
        """Compare the loss and norm that the updated parameters give."""
        reference, tolerance = self._reference, LATER_TOLERANCE
        self.seen.later_losses = self._differing_loss(loss, reference.later_losses, tolerance)
        self.seen.later_norms = self._differing(
            "later norms", norm, reference.later_norm, tolerance
        )

    def sums(self) -> tuple[float, float, float]:
        """(squares of this rank's gradients, their products with one process's, the squares of
        those); of parts that several ranks have, each counts its share."""
        sums = torch.zeros(3, dtype=torch.float64)
        for name, found in self._gradients.items():
            expected = self._own(name, self._reference.gradients)
            three = torch.stack([found * found, found * expected, expected * expected])
            share = copies(self._parameters[name], self._assembled.meshes)
            sums += three.double().flatten(1).sum(1) / share
        found_squares, products, expected_squares = sums.tolist()
        return found_squares, products, expected_squares

    def _own(self, name: str, wholes: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of what one process has of a parameter."""
        return part_of(wholes[one_process_name(self._plan, name)], self._parameters[name])

    def _differing_loss(self, found: float, losses: Tensor, tolerance: float) -> list[float]:
        expected = self.expected_loss(losses)
        if expected is None:
            return []
        what = "losses" if losses is self._reference.losses else "later losses"
        return self._differing(what, found, expected, tolerance)

    def _differing(self, what: str, found: float, expected: float, tolerance: float) -> list[float]:
        error = abs(found - expected) / abs(expected)
        self._note(what, error, tolerance)
        return [] if error <= tolerance else [found, expected]

    def _note(self, what: str, error: float, tolerance: float) -> None:
        worst = self.seen.worst
        worst[what] = max(worst.get(what, 0.0), error / tolerance)


def rms(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def error_of(found: Tensor, expected: Tensor, scale: float) -> float:
    """Root mean square of the difference, over `scale`; infinite where shapes differ or something
    is no number."""
    if found.shape != expected.shape:
        return inf
    if not found.numel():
        return 0.0
    error = rms(found - expected) / scale if scale else float(found.abs().max() > 0)
    return error if error == error else inf


def _checksum(values: Tensor) -> int:
    """Of the bits: another one where one of them is another."""
    if values.element_size() == 4:
        values = values.contiguous().view(torch.int32)
    numbers = values.flatten().to(torch.int64)
    weights = torch.arange(1, len(numbers) + 1, dtype=torch.int64) * 2 + 1
    return int((numbers * weights).sum())
