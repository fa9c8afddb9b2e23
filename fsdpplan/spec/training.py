"""Training: how much data a step takes and in which number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.checks import require_choice, require_fraction, require_positive_int
from fsdpplan.spec.program import ProgramName, program_named
from fsdpplan.spec.remembered import RemembersHash, remembered_hash
from fsdpplan.spec.runtime import Runtime, RuntimeName, runtime_named
from fsdpplan.spec.torch_release import TorchRelease, torch_release

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
ReduceDtype = Literal["fp32", "bf16"]
Optimizer = Literal["adamw", "adamw_8bit", "muon"]
Fp8Recipe = Literal["tensorwise", "rowwise", "delayed"]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one element, by the names used in options, JSON and profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(RemembersHash):
    """What one optimizer step is asked to do."""

    __hash__ = remembered_hash

    seq_len: int
    """Tokens a sequence."""
    global_batch: int
    """Sequences an optimizer step, over all data-parallel ranks."""
    precision: Precision = "bf16"
    """Number format of matmuls; master weights are fp32."""
    reduce_dtype: ReduceDtype = "fp32"
    """Number format in which gradients are reduced."""
    optimizer: Optimizer = "adamw"
    """Optimizer recipe; decides the bytes of state a parameter. `adamw_8bit`: moments in 8 bits;
    `muon`: the blocks' matrices by Muon, the rest by AdamW."""
    tokens: int | None = None
    """Tokens of the whole training, for the time to train; None: not asked."""
    runtime: RuntimeName = "fsdp2"
    """The software that trains. `fsdp2`: PyTorch's `fully_shard` with its mixed-precision policy,
    and its DDP under autocast. `autocast`: DDP and FSDP alike under `torch.autocast`, parameters
    gathered and gradients reduced in fp32, as FSDP1 scripts without `MixedPrecision` do. The
    others are named in `fsdpplan.spec.runtime`, each with its traits."""
    torch: str | None = None
    """Release of PyTorch that the job trains with, `2.9`; None: not said, and not looked at."""
    program: ProgramName = "reference"
    """What trains: the reference decoder, a model of the user's own or one of Hugging Face, the
    last two by `parallelize`, or a program of others that `emit-launch --target` knows."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """Scales of fp8 matmuls, with precision fp8: one a tensor computed on the spot, one a row, or
    one a tensor from earlier steps (Transformer Engine's delayed scaling)."""
    fp8_all_gather: bool = False
    """With precision fp8: FSDP gathers weights already cast to fp8."""
    headroom_fraction: float = 0.08
    """Share of device memory that a plan must leave free."""
    fits_fraction: float = 0.95
    """Chance to fit in device memory that a plan must have, as its peak's band has it; up to a half
    asks for no more than the expected peak does."""

    def __post_init__(self) -> None:
        require_positive_int(seq_len=self.seq_len, global_batch=self.global_batch)
        if self.tokens is not None:
            require_positive_int(tokens=self.tokens)
        require_choice("precision", self.precision, get_args(Precision))
        require_choice("reduce_dtype", self.reduce_dtype, get_args(ReduceDtype))
        require_choice("optimizer", self.optimizer, get_args(Optimizer))
        require_choice("runtime", self.runtime, get_args(RuntimeName))
        require_choice("program", self.program, get_args(ProgramName))
        require_choice("fp8_recipe", self.fp8_recipe, get_args(Fp8Recipe))
        if self.fp8_all_gather and (self.precision != "fp8" or self.fp8_recipe == "rowwise"):
            raise SpecError(
                "fp8_all_gather needs precision fp8 with one scale a tensor: use fp8_recipe "
                "tensorwise or leave it out"
            )
        require_fraction(headroom_fraction=self.headroom_fraction)
        if not 0 <= self.fits_fraction < 1:
            raise SpecError(
                f"fits_fraction must be at least 0 and below 1, not {self.fits_fraction!r}: no "
                "peak is known for certain"
            )
        if self.torch is not None and str(torch_release(self.torch)) != self.torch:
            raise SpecError(f"torch must be major.minor, {torch_release(self.torch)}, in a plan")
        if self.runtime == "autocast":
            self._require_autocast()
        runtimes = program_named(self.program).runtimes
        if self.program != "reference" and self.runtime not in runtimes:
            raise SpecError(
                f"program {self.program} is trained by runtime {runtimes[0]}, not by "
                f"{self.runtime}: leave --program out, or use --runtime {runtimes[0]}"
            )
        if self.optimizer != "adamw" and self.runtime != "fsdp2":
            raise SpecError(
                f"optimizer {self.optimizer} is that of runtime fsdp2, not of {self.runtime}: use "
                "--optimizer adamw, or --runtime fsdp2"
            )

    def _require_autocast(self) -> None:
        if self.precision not in ("bf16", "fp16"):
            raise SpecError(
                f"runtime autocast computes in bf16 or fp16, not {self.precision}: use "
                "--precision bf16, or --runtime fsdp2"
            )
        if self.reduce_dtype != "fp32":
            raise SpecError(
                f"runtime autocast has fp32 gradients and reduces them as they are, not in "
                f"{self.reduce_dtype}: use --reduce-dtype fp32, or --runtime fsdp2"
            )

    @property
    def traits(self) -> Runtime:
        """What the runtime does."""
        return runtime_named(self.runtime)

    @property
    def torch_release(self) -> TorchRelease | None:
        """The release of PyTorch, if it was said."""
        return None if self.torch is None else torch_release(self.torch)

    @property
    def activation_dtype(self) -> Precision:
        """Number format of activations: fp8 is only that of matmuls' operands."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def gathered_dtype(self) -> Precision:
        """Number format in which FSDP gathers the blocks' matrices."""
        if self.traits.gathers_fp32:
            return "fp32"
        return "fp8" if self.fp8_all_gather else self.activation_dtype

    @property
    def scales_loss(self) -> bool:
        """Gradients are divided by a loss scale before they are used."""
        return self.precision == "fp16" and self.runtime == "fsdp2"

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step over all ranks."""
        return self.seq_len * self.global_batch
