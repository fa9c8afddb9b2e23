"""Cases of `single_gpu.py`: one model on one device, and its plan."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from fsdpplan import __version__
from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.huggingface.config import read_hf_config
from fsdpplan.search.defaults import named_layout
from fsdpplan.search.pins import Pins
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import ActivationCheckpointing, Sharding
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Estimate, Plan
from fsdpplan.spec.training import Training
from fsdpplan.units import format_gib

KERNELS = ("eager", "compiled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to train one model on one device."""

    model: Model
    training: Training
    """Its global batch is one micro-batch."""
    compiled: bool
    checkpointing: ActivationCheckpointing
    sharding: Sharding | None = None
    """None: what `fsdpplan estimate` takes for one device."""

    @property
    def batch(self) -> str:
        """Sequences and tokens of a step."""
        return f"{self.training.global_batch} x {self.training.seq_len}"

    @property
    def kernels(self) -> str:
        """Who writes the blocks' kernels."""
        return KERNELS[self.compiled]

    @property
    def name(self) -> str:
        """How rows and messages call it."""
        return f"{self.model.name} {self.batch} {self.kernels} {self.checkpointing}"


def model_and_batch(word: str) -> tuple[Model, int]:
    """The model and the micro-batch of `NAME:4`; NAME may be the path of a config.json."""
    name, _, count = word.partition(":")
    model = read_hf_config(Path(name)).model if name.endswith(".json") else load_model(name)
    return model, int(count or 1)


def planned(case: Trial, cluster: Cluster) -> Plan:
    """The plan of a case, as `fsdpplan estimate` predicts it. Raises SpecError if it cannot run.

    FSDP over one rank, which `estimate` refuses since it shards nothing, is predicted here, too:
    what it does on a device is what it does on many.
    """
    model, training = case.model, case.training
    pins = Pins(
        sharding=case.sharding,
        micro_batch=training.global_batch,
        activation_checkpointing=case.checkpointing,
        compile=case.compiled,
    )
    layout = named_layout(pins, cluster=cluster, training=training).layout
    case_of_trial = Case(model=model, cluster=cluster, training=training, layout=layout)
    predicted = estimate(case_of_trial)
    needed = predicted.memory.peak_device_bytes
    room = available_bytes(cluster=cluster, training=training)
    if needed > room:
        raise SpecError(f"it needs {format_gib(needed)} of {format_gib(room)}")
    if not predicted.runnable:
        raise SpecError("the trainer does not run it")
    return plan_of(case_of_trial, predicted=predicted)


def plan_of(case: Case, *, predicted: Estimate | None = None) -> Plan:
    """A case as a plan that nothing was searched for."""
    return Plan(
        model=case.model,
        cluster=case.cluster,
        training=case.training,
        layout=case.layout,
        estimate=predicted or estimate(case),
        alternatives=(),
        sources=(),
        assumptions=(),
        warnings=(),
        versions=(("fsdpplan", __version__), ("python", platform.python_version())),
    )
