"""Training: formats that go together."""

from __future__ import annotations

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.spec.training import Training


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"runtime": "autocast", "precision": "fp32"}, "--precision bf16"),
        ({"runtime": "autocast", "precision": "fp8"}, "--precision bf16"),
        ({"runtime": "autocast", "reduce_dtype": "bf16"}, "--reduce-dtype fp32"),
        ({"precision_switch": "fp8@80%"}, "must be fp8@0.8 in a plan"),
        ({"precision_switch": "fp16@0.8"}, "such as fp8@80%"),
        ({"precision_switch": "fp8@1.0"}, "between 0 and 1"),
        ({"precision_switch": "fp8@0.8", "precision": "fp8"}, "another --precision"),
        ({"precision_switch": "fp8@0.8", "precision": "fp16"}, "another --precision"),
        ({"precision_switch": "fp8@0.8", "param_dtype": "bf16"}, "--param-dtype fp32"),
        ({"precision_switch": "fp8@0.8", "optimizer": "adamw_8bit"}, "adamw or muon"),
        ({"precision_switch": "fp8@0.8", "runtime": "megatron"}, "--runtime out"),
        ({"precision_switch": "fp8@0.8", "program": "hf"}, "--program and"),
        ({"param_dtype": "bf16", "precision": "fp16"}, "--precision bf16"),
        ({"param_dtype": "bf16", "precision": "fp8"}, "--param-dtype fp32"),
        ({"param_dtype": "bf16", "optimizer": "muon"}, "--optimizer adamw"),
        ({"param_dtype": "bf16", "runtime": "megatron"}, "leave --param-dtype out"),
        ({"runtime": "deepspeed"}, "fsdp2, .*autocast"),
        ({"seq_len": 0}, "seq_len must be"),
        ({"global_batch": True}, "global_batch must be"),
        ({"tokens": -1}, "tokens must be"),
        ({"headroom_fraction": 1.5}, "between 0 and 1"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], advice: str) -> None:
    with pytest.raises(SpecError, match=advice):
        Training(**{"seq_len": 1024, "global_batch": 8, **options})  # type: ignore[arg-type]


def test_fsdp2_gathers_the_compute_dtype_and_autocast_fp32() -> None:
    assert Training(seq_len=1, global_batch=1).gathered_dtype == "bf16"
    assert Training(seq_len=1, global_batch=1, runtime="autocast").gathered_dtype == "fp32"


def test_tokens_of_a_step() -> None:
    assert Training(seq_len=4096, global_batch=1024).tokens_per_step == 4 * 2**20
