"""Training: how much data a step takes and in which number formats; which program trains, and with
which PyTorch.

The trainer runs the reference decoder, and by `parallelize` a model of one's own or of Hugging
Face's. torchtitan, Megatron-LM and Accelerate are programs of their own: what they can say of a
plan is in `spec/programs/`, and `emit-launch --target` takes a plan for one as it is.

A model that is not the reference decoder is known to `parallelize` by its blocks only; what needs
to know more of it is refused there (trainer/user/model.py and its neighbours; a test holds the two
together).

Of a release of PyTorch major and minor decide. A pre-release counts as the release that it leads
to: NVIDIA's images hold such builds, `2.10.0a0+b558c986e8.nv25.11`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from math import inf
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.adapters import Adapters
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.runtime import Runtime, RuntimeName, StackFamily, runtime_named
from fsdpplan.spec.values import (
    RemembersHash,
    remembered_hash,
    require_choice,
    require_fraction,
    require_positive_int,
)

ProgramName = Literal["reference", "own", "hf", "torchtitan", "megatron", "accelerate"]


Logits = Literal["none", "computed", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a program can apply of a layout."""

    words: str
    """What to call it in a sentence."""
    knows_blocks: bool
    """It is built for the trainer: its attention can be recomputed alone, its tokens sent to
    experts, its vocabulary padded."""
    says_how: bool
    """Tensor parallelism and a loss in pieces need words of the program: a `tp_plan`, a head, and
    the loss by `token_loss`. False: they are found in the model."""
    has_open_attention: bool
    """Its attention can be replaced by one that ranks share."""
    runtimes: tuple[RuntimeName, ...] = ("fsdp2",)
    """Runtimes that price what it does; the first by default. The reference decoder is of any."""
    is_target: bool = False
    """It is launched by `emit-launch --target` of its name."""
    grows_segments: bool = False
    """Its launcher, ours or its own, lets the allocator's segments grow (`expandable_segments`)."""
    compiles_loss: bool = False
    """Where blocks are compiled the loss is, too. Others leave it to the script."""
    reshards_stages: bool = False
    """It lets FSDP free the blocks of a pipeline's stages, where it is told to."""
    returned_logits: Logits = "none"
    """What a loop holds until backward is done, because the model returns its logits beside the
    loss: nothing, the logits, or a copy of them in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a program must do for a part of a layout, beside `parallelize(model, plan)`."""

    setting: str
    words: str


_PROGRAMS: dict[ProgramName, Program] = {
    "reference": Program(
        words="the reference decoder",
        grows_segments=True,
        knows_blocks=True,
        says_how=False,
        has_open_attention=True,
        compiles_loss=True,
    ),
    "own": Program(
        words="a model of your own",
        grows_segments=True,
        knows_blocks=False,
        says_how=True,
        has_open_attention=False,
    ),
    "hf": Program(
        words="a Hugging Face model",
        grows_segments=True,
        knows_blocks=False,
        says_how=False,
        has_open_attention=True,
        returned_logits="computed",
    ),
    "torchtitan": Program(
        words="torchtitan",
        grows_segments=True,
        knows_blocks=True,
        says_how=False,
        has_open_attention=True,
        compiles_loss=True,
        is_target=True,
        # torchtitan/models/llama3/infra/parallelize.py: "default" does not with a pipeline,
        # "always" does
        reshards_stages=True,
    ),
    "megatron": Program(
        words="Megatron-LM",
        knows_blocks=True,
        says_how=False,
        has_open_attention=True,
        runtimes=("megatron", "megatron_lm"),
        is_target=True,
    ),
    "accelerate": Program(
        words="Accelerate",
        knows_blocks=True,
        says_how=False,
        has_open_attention=True,
        runtimes=("fsdp2", "autocast"),
        is_target=True,
        returned_logits="fp32",
    ),
}


def program_needs(name: ProgramName, layout: Layout) -> tuple[Need, ...]:
    """What a program that calls `parallelize` must do for `layout`; none where two lines do."""
    program, needs = program_named(name), []
    if program.knows_blocks:
        return ()
    if layout.tp > 1 and program.says_how:
        needs.append(Need(setting=f"tp {layout.tp}", words="parallelize(..., tp_plan={...})"))
    if layout.pp > 1:
        needs.append(Need(setting=f"pp {layout.pp}", words="forward_backward for the step"))
    if layout.loss_chunks > 1 and program.says_how:
        pieces = f"loss_chunks {layout.loss_chunks}"
        needs.append(Need(setting=pieces, words="token_loss, and its head as lm_head or head="))
    return tuple(needs)


def program_named(name: ProgramName) -> Program:
    """What the program of that name can do."""
    return _PROGRAMS[name]


@lru_cache(maxsize=8)
def _resharding(traits: Runtime) -> Runtime:
    """The runtime in a program that lets it free the blocks of a pipeline's stages."""
    return replace(traits, reshards_stages=True)


_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,3})(?:[.+a-z_-][0-9A-Za-z.+_-]*)?", re.ASCII)
_IMAGE = re.compile(r"(?P<name>[^:@]+):(?P<tag>[^:@]+)(?:@.*)?")


@dataclass(frozen=True, slots=True, order=True)
class TorchRelease:
    """A release of PyTorch, by the two numbers that decide what it can do."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST = TorchRelease(2, 8)
"""The first release under which the trainer runs."""
NEWEST_TESTED = TorchRelease(2, 15)
"""The last release that the trainer was tested under; newer ones are tried, and said to be new."""

NVIDIA_IMAGES: dict[str, TorchRelease] = {
    **dict.fromkeys(("25.05", "25.06", "25.08"), TorchRelease(2, 8)),
    **dict.fromkeys(("25.09", "25.10"), TorchRelease(2, 9)),
    **dict.fromkeys(("25.11", "25.12", "26.01"), TorchRelease(2, 10)),
    **dict.fromkeys(("26.02", "26.03"), TorchRelease(2, 11)),
    **dict.fromkeys(("26.04", "26.05"), TorchRelease(2, 12)),
    **dict.fromkeys(("26.06", "26.07"), TorchRelease(2, 13)),
    "26.08": TorchRelease(2, 14),
}
"""Release in each image nvcr.io/nvidia/pytorch:YY.MM-py3. Source: `torch.__version__` in it, which
ends in the image's own name (2.9.0a0+145a3a7bda.nv25.10); the same stand in its release notes,
docs.nvidia.com/deeplearning/frameworks/pytorch-release-notes/rel-25-12.html."""


@lru_cache(maxsize=64)
def torch_release(version: str) -> TorchRelease:
    """The release of a version: `2.9`, `2.9.1`, `2.13.0+cu128`, `2.10.0a0+git.nv25.11`."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise SpecError(
            f"torch {version!r} is no version of PyTorch: write it as 2.9 or 2.9.1, or as "
            "torch.__version__ prints it"
        )
    return TorchRelease(int(found[1]), int(found[2]))


def require_supported(release: TorchRelease) -> None:
    """Raise SpecError where the trainer does not run under `release`."""
    if release < OLDEST:
        raise SpecError(
            f"torch {release} is older than {OLDEST}, the oldest that the trainer runs under: "
            f"pip install 'torch>={OLDEST}', or take an image with it, such as {image_with(OLDEST)}"
        )


def image_with(release: TorchRelease) -> str:
    """A public image that has `release` or, where none is known, the newest known one."""
    months = [month for month, has in NVIDIA_IMAGES.items() if has == release]
    return f"nvcr.io/nvidia/pytorch:{max(months or NVIDIA_IMAGES)}-py3"


def release_of_image(image: str) -> TorchRelease | None:
    """What a public image holds, by its name; None of one that is not known.

    Images of the PyTorch project name the version in their tag: `pytorch/pytorch:2.9.1-cuda12.8-
    cudnn9-runtime`.
    """
    found = _IMAGE.fullmatch(image.removeprefix("docker://").replace("#", "/"))
    if found is None:
        return None
    name, tag = found["name"].removeprefix("docker.io/"), found["tag"]
    if name == "nvcr.io/nvidia/pytorch":
        return NVIDIA_IMAGES.get(tag.partition("-")[0])
    version = tag.partition("-")[0]
    is_ours = name == "pytorch/pytorch" and _VERSION.fullmatch(version) is not None
    return torch_release(version) if is_ours else None


Precision = Literal["bf16", "fp16", "fp32", "fp8"]
ReduceDtype = Literal["fp32", "bf16"]
ParamDtype = Literal["fp32", "bf16"]
Optimizer = Literal["adamw", "adamw_8bit", "muon"]
Fp8Recipe = Literal["tensorwise", "rowwise", "delayed"]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one element, by the names used in options, JSON and profiles."""


POWERSGD_RANK = 1
POWERSGD_FIRST = 1000
"""torch's defaults: the rank, and steps that are not compressed."""
LEAST_POWERSGD_FIRST = 2
"""DDP makes its buckets anew after the first step."""


def normal_compression(text: str, *, name: str = "gradient_compression") -> str:
    """`text`, as options take it, with all that it leaves out. Raises SpecError."""
    if text in ("none", "bf16"):
        return text
    kind, *numbers = text.split(":")
    ok = kind == "powersgd" and len(numbers) <= 2
    if not ok or not all(number.isascii() and number.isdigit() for number in numbers):
        raise SpecError(
            f"{name} must be none, bf16 or powersgd[:RANK[:FIRST]], not {text!r}: "
            "such as powersgd:4:1000"
        )
    rank, first = [*map(int, numbers), *(POWERSGD_RANK, POWERSGD_FIRST)[len(numbers) :]]
    if rank < 1 or first < LEAST_POWERSGD_FIRST:
        raise SpecError(
            f"{name} powersgd has a rank of at least 1 and {LEAST_POWERSGD_FIRST} "
            f"first steps or more that are sent whole, not {rank} and {first}: use powersgd:1:1000"
        )
    return f"powersgd:{rank}:{first}"


SWITCHED: tuple[Precision, ...] = ("bf16", "fp8")
"""Precisions between which a run can change: parameters are fp32 in both, and no loss is scaled."""


def normal_switch(text: str, name: str = "precision_switch") -> str:
    """`fp8@80%` or `fp8@0.8` as plans have it, fp8@0.8. Raises SpecError for what is neither, nor
    `none`."""
    if text == "none":
        return text
    to, at, share = text.partition("@")
    number = share.removesuffix("%")
    try:
        fraction = float(Decimal(number) / (100 if share.endswith("%") else 1))
    except (ArithmeticError, ValueError):
        at = ""
        fraction = 0.0
    if not at or to not in SWITCHED or not number.isascii() or not 0 < fraction < 1:
        raise SpecError(
            f"{name} must be none or PRECISION@SHARE, {' or '.join(SWITCHED)} behind a share of "
            f"the steps between 0 and 1, not {text!r}: such as fp8@80%"
        )
    return f"{to}@{fraction!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Probabilities with which training sets elements to 0, and scales up the others."""

    attention: float = 0.0
    """Of attention's probabilities."""
    residual: float = 0.0
    """Of what attention and the feed-forward network add to the residual stream."""
    embedding: float = 0.0
    """Of what the first block reads."""

    def __post_init__(self) -> None:
        for name in DROPOUT_NAMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < 1:
                raise SpecError(
                    f"dropout of {name} must be at least 0 and below 1, not {value!r}: such as 0.1"
                )

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name):g}" for name in DROPOUT_NAMES)

    @property
    def drops(self) -> bool:
        """Whether any element is dropped."""
        return max(self.attention, self.residual, self.embedding) > 0


DROPOUT_NAMES = ("attention", "residual", "embedding")


def parsed_dropout(text: str, name: str = "dropout") -> Dropout:
    """`0.1`, which is of all three, or `attention=0.1,residual=0.1`, of the named. Raises
    SpecError."""
    named = dict.fromkeys(DROPOUT_NAMES, text)
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        named = {key.strip(): value for key, _, value in pairs}
    try:
        values = {key: float(value) for key, value in named.items()}
    except ValueError:
        values = {}
    if not values or not values.keys() <= set(DROPOUT_NAMES):
        raise SpecError(
            f"{name} must be a probability, or {'=P,'.join(DROPOUT_NAMES)}=P, not {text!r}: such "
            "as 0.1 or residual=0.1"
        )
    return Dropout(**values)


_NO_DROPOUT = Dropout()
DEFAULT_HEADROOM_FRACTION = 0.08
"""Of the device memory, chosen here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(RemembersHash):
    """What one optimizer step is asked to do."""

    __hash__ = remembered_hash

    seq_len: int
    """Tokens a sequence."""
    global_batch: int
    """Sequences an optimizer step, over all data-parallel ranks."""
    precision: Precision = "bf16"
    """Number format of matmuls; master weights are fp32, unless `param_dtype` says otherwise."""
    precision_switch: str = "none"
    """`none`, or a change of `precision` in mid-run, as fp8@0.8: the precision of the rest, and the
    share of the steps that come before it. Parameters and moments stay as they are."""
    param_dtype: ParamDtype = "fp32"
    """Number format in which parameters are kept and updated. `bf16`: AdamW's moments are in it,
    too, and gradients when they have been reduced; there are no fp32 masters."""
    reduce_dtype: ReduceDtype = "fp32"
    """Number format in which gradients are reduced."""
    optimizer: Optimizer = "adamw"
    """Optimizer recipe; decides the bytes of state a parameter. `adamw_8bit`: moments in 8 bits;
    `muon`: the blocks' matrices by Muon, the rest by AdamW."""
    gradient_compression: str = "none"
    """How DDP sends gradients: `none`; `bf16`; or `powersgd:R:N`, as two matrices of rank R after N
    steps in which they are sent whole."""
    dropout: Dropout | None = None
    """What the reference decoder drops; None: not said, and nothing."""
    adapters: Adapters | None = None
    """Low-rank matrices that are trained in place of the model, which is frozen; None: all of the
    model is trained."""
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
    packed: bool = False
    """Sequences hold documents that are trained apart: attention stays inside each."""
    mean_document_tokens: int | None = None
    """Tokens of a document in the mean, which are taken to be of exponential lengths; None: not
    known, and priced as if each sequence were one."""
    headroom_fraction: float = DEFAULT_HEADROOM_FRACTION
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
        require_choice("param_dtype", self.param_dtype, get_args(ParamDtype))
        require_choice("optimizer", self.optimizer, get_args(Optimizer))
        require_choice("runtime", self.runtime, get_args(RuntimeName))
        require_choice("program", self.program, get_args(ProgramName))
        require_choice("fp8_recipe", self.fp8_recipe, get_args(Fp8Recipe))
        if self.precision_switch != "none":
            self._require_switch()
        any_fp8 = "fp8" in (self.precision, self.later_precision)
        if self.fp8_all_gather and (not any_fp8 or self.fp8_recipe == "rowwise"):
            raise SpecError(
                "fp8_all_gather needs precision fp8 with one scale a tensor: use fp8_recipe "
                "tensorwise or leave it out"
            )
        self._require_packable()
        require_fraction(headroom_fraction=self.headroom_fraction)
        if not 0 <= self.fits_fraction < 1:
            raise SpecError(
                f"fits_fraction must be at least 0 and below 1, not {self.fits_fraction!r}: no "
                "peak is known for certain"
            )
        if self.torch is not None and str(torch_release(self.torch)) != self.torch:
            raise SpecError(f"torch must be major.minor, {torch_release(self.torch)}, in a plan")
        if self.gradient_compression != "none":
            self._require_compressible()
        if self.param_dtype == "bf16":
            self._require_half_parameters()
        if self.dropout is not None and self.dropout.drops:
            self._require_droppable()
        if self.adapters is not None:
            self._require_adaptable()
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

    def _require_switch(self) -> None:
        text = self.precision_switch
        if text != normal_switch(text):
            raise SpecError(f"precision_switch must be {normal_switch(text)} in a plan")
        if self.precision not in SWITCHED or self.later_precision == self.precision:
            others = " and ".join(SWITCHED)
            raise SpecError(
                f"precision_switch {text} changes between {others}, and the run begins in "
                f"{self.precision}: use another --precision, or leave --precision-switch out"
            )
        if self.runtime != "fsdp2" or self.program != "reference":
            raise SpecError(
                "precision_switch is of fsdpplan's trainer, and this is program "
                f"{self.program} of runtime {self.runtime}: leave --precision-switch out, or leave "
                "--program and --runtime out"
            )
        if self.param_dtype != "fp32":
            raise SpecError(
                f"precision_switch {text} needs parameters that both precisions keep, and "
                f"param_dtype is {self.param_dtype}: use --param-dtype fp32"
            )
        if self.optimizer == "adamw_8bit":
            raise SpecError(
                f"precision_switch {text} moves the optimizer's state, and that of adamw_8bit is "
                "rounded anew by it: use --optimizer adamw or muon"
            )
        if self.powersgd_rank:
            raise SpecError(
                f"precision_switch {text} would drop what gradient_compression "
                f"{self.gradient_compression} keeps between steps: leave one of them out"
            )

    def _require_packable(self) -> None:
        if self.mean_document_tokens is not None:
            require_positive_int(mean_document_tokens=self.mean_document_tokens)
            if not self.packed:
                raise SpecError(
                    "mean_document_tokens is of packed sequences: use --pack too, or leave "
                    "--mean-document-tokens out"
                )
        if self.packed and (self.runtime != "fsdp2" or self.program in ("own", "hf")):
            raise SpecError(
                "packed sequences are trained apart by the reference decoder of runtime fsdp2, "
                f"and this is program {self.program} of runtime {self.runtime}: leave --pack out, "
                "or leave --program and --runtime out"
            )

    def _require_droppable(self) -> None:
        if self.runtime != "fsdp2" or self.program != "reference":
            raise SpecError(
                f"dropout {self.dropout} is of the reference decoder of runtime fsdp2, and this is "
                f"program {self.program} of runtime {self.runtime}, whose script says its own: use "
                "--dropout 0, or leave --program and --runtime out"
            )

    def _require_adaptable(self) -> None:
        if self.runtime != "fsdp2" or self.program != "reference":
            raise SpecError(
                "adapters are trained by the reference decoder of runtime fsdp2, and this is "
                f"program {self.program} of runtime {self.runtime}: leave --lora out, or leave "
                "--program and --runtime out"
            )
        if self.precision not in ("bf16", "fp32") or self.precision_switch != "none":
            raise SpecError(
                "adapters compute with their frozen base in bf16 or fp32 throughout: use "
                "--precision bf16, and leave --precision-switch out"
            )
        if self.param_dtype != "fp32":
            raise SpecError(
                "param_dtype is of parameters that are trained, and with adapters those are in "
                "--lora-dtype: use --lora-dtype bf16, and leave --param-dtype out"
            )
        if self.precision == "fp32" and self.adapters and self.adapters.dtype == "bf16":
            raise SpecError(
                "adapters in bf16 are computed with as they are, in bf16, not in fp32: use "
                "--precision bf16, or --lora-dtype fp32"
            )
        if self.optimizer == "muon":
            raise SpecError(
                "muon makes the updates of whole matrices orthogonal, and adapters are two thin "
                "ones each: use --optimizer adamw or adamw_8bit"
            )
        if self.gradient_compression != "none":
            raise SpecError(
                "gradients of adapters are small as they are: leave --gradient-compression out"
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

    def _require_half_parameters(self) -> None:
        if self.precision != "bf16":
            raise SpecError(
                f"param_dtype bf16 is computed with as it is, in bf16, not in {self.precision}: "
                "use --precision bf16, or --param-dtype fp32"
            )
        if self.runtime != "fsdp2":
            raise SpecError(
                f"param_dtype bf16 is that of runtime fsdp2; {self.runtime} keeps parameters as "
                "its traits say: leave --param-dtype out, or use --runtime fsdp2"
            )
        if self.optimizer == "muon":
            raise SpecError(
                "param_dtype bf16 is for AdamW, and muon has an fp32 momentum for fp32 "
                "parameters: use --optimizer adamw or adamw_8bit, or --param-dtype fp32"
            )

    def _require_compressible(self) -> None:
        kind = self.gradient_compression
        if kind != normal_compression(kind):
            raise SpecError(f"gradient_compression must be {normal_compression(kind)} in a plan")
        if self.runtime != "fsdp2":
            raise SpecError(
                f"gradient_compression is torch's DDP hooks, of runtime fsdp2, not of "
                f"{self.runtime}: leave --gradient-compression out, or use --runtime fsdp2"
            )
        if kind == "bf16" and self.reduce_dtype != "bf16":
            raise SpecError(
                f"gradient_compression bf16 reduces in bf16, not in {self.reduce_dtype}: use "
                "--reduce-dtype bf16, or leave one of them out"
            )
        if kind == "bf16":
            return
        formats = (self.param_dtype, self.reduce_dtype)
        if formats != ("fp32", "fp32") or self.precision == "fp16":
            raise SpecError(
                "gradient_compression powersgd keeps what it leaves out in fp32, without a loss "
                "scale: use --param-dtype fp32, --reduce-dtype fp32 and --precision bf16 or fp32"
            )

    @property
    def later_precision(self) -> Precision:
        """Number format of matmuls in the last part of the run."""
        if self.precision_switch == "none":
            return self.precision
        return "fp8" if self.precision_switch.startswith("fp8@") else "bf16"

    @property
    def peak_words(self) -> str:
        """`the bf16 peak`: what an MFU is a share of; of each part of a run its own."""
        names = tuple(dict.fromkeys(each.precision for _, each in self.phases))
        return f"the {names[0]} peak" if len(names) == 1 else f"the {' and '.join(names)} peaks"

    @property
    def phases(self) -> tuple[tuple[float, Training], ...]:
        """(share of the steps, what they do) of each part of the run; one where it does not
        change."""
        return ((1.0, self),) if self.precision_switch == "none" else _two_phases(self)

    def in_precision(self, precision: Precision) -> Training:
        """The part of the run in this precision, as a run of its own."""
        gathers = self.fp8_all_gather and precision == "fp8"
        return replace(self, precision=precision, precision_switch="none", fp8_all_gather=gathers)

    @property
    def powersgd_rank(self) -> int:
        """Rank of the matrices that gradients are sent as; 0: they are sent as they are."""
        kind = self.gradient_compression
        return int(kind.split(":")[1]) if kind.startswith("powersgd") else 0

    @property
    def dropped(self) -> Dropout:
        """What is dropped, nothing where nothing is said."""
        return _NO_DROPOUT if self.dropout is None else self.dropout

    @property
    def traits(self) -> Runtime:
        """What the runtime does, in the program that trains."""
        traits = runtime_named(self.runtime)
        if self.program == "reference" or not program_named(self.program).reshards_stages:
            return traits
        return _resharding(traits)

    @property
    def family(self) -> StackFamily:
        """Whose software it is: a program of others that runs on `fsdp2` is not the trainer."""
        family = self.traits.family
        is_others = family == "own" and program_named(self.program).is_target
        return "pytorch" if is_others else family

    @property
    def torch_release(self) -> TorchRelease | None:
        """The release of PyTorch, if it was said."""
        return None if self.torch is None else torch_release(self.torch)

    @property
    def stored_dtype(self) -> ParamDtype:
        """Number format in which what is trained is kept: of adapters their own."""
        return self.param_dtype if self.adapters is None else self.adapters.dtype

    @property
    def half_states(self) -> bool:
        """Parameters, their reduced gradients and AdamW's moments are all in 16 bits, without fp32
        masters: asked for, or what the runtime does."""
        if self.adapters is not None:
            return self.adapters.dtype == "bf16"
        return self.param_dtype == "bf16" or self.traits.half_states

    @property
    def activation_dtype(self) -> Precision:
        """Number format of activations: fp8 is only that of matmuls' operands."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def gathered_dtype(self) -> Precision:
        """Number format in which FSDP gathers the blocks' matrices."""
        if self.traits.gathers_fp32:
            return "fp32"
        gathers = self.fp8_all_gather and self.precision == "fp8"
        return "fp8" if gathers else self.activation_dtype

    @property
    def scales_loss(self) -> bool:
        """Gradients are divided by a loss scale before they are used."""
        return self.precision == "fp16" and self.runtime == "fsdp2"

    @property
    def document_tokens(self) -> float:
        """Mean length of the documents that attention stays inside; infinite where it is priced as
        that of whole sequences."""
        return self.mean_document_tokens or inf

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step over all ranks."""
        return self.seq_len * self.global_batch

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole training; None: its tokens are not said."""
        return None if self.tokens is None else self.steps_for(self.tokens)

    def steps_for(self, tokens: int) -> int:
        """Whole optimizer steps that so many tokens take."""
        return -(-tokens // self.tokens_per_step)


@lru_cache(maxsize=64)
def _two_phases(training: Training) -> tuple[tuple[float, Training], ...]:
    first = float(training.precision_switch.split("@")[1])
    return (
        (first, training.in_precision(training.precision)),
        (1 - first, training.in_precision(training.later_precision)),
    )
