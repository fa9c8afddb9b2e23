"""The reference decoder against Hugging Face's models with the same weights, in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.spec.model import Model
from fsdpplan.trainer.model.decoder import Decoder
from tests.strategies import any_models, models
from tests.trainer import plans
from tests.trainer.hf_cases import CASES, VOCAB

transformers = pytest.importorskip("transformers")


def with_tanh_gelu(model: nn.Module) -> None:
    """Give MPT, which has no option for it, the tanh form of GELU."""
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.approximate = "tanh"


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_hugging_face_with_the_same_weights(name: str) -> None:
    family, widths, fields, rename = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **widths, attn_implementation="eager", use_cache=False
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
        for key, buffer in theirs.named_buffers():
            if key.endswith("e_score_correction_bias"):  # what balances experts
                buffer.normal_(std=0.3)
    with_tanh_gelu(theirs)
    ours = Decoder(plans.config_of(**fields))
    weights = dict(rename({key: value.clone() for key, value in theirs.state_dict().items()}))
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(key.endswith("expert_bias") for key in missing)
    tokens = torch.randint(VOCAB, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=2e-4, atol=2e-4)


def test_a_decoder_in_two_parts_is_the_decoder() -> None:
    decoder = Decoder(plans.config_of())
    first = Decoder(decoder.config, blocks=range(3), has_head=False)
    last = Decoder(decoder.config, blocks=[3], has_embedding=False)
    weights = decoder.state_dict()
    for part in (first, last):
        part.load_state_dict({name: weights[name] for name in part.state_dict()})
    assert set(first.state_dict()) | set(last.state_dict()) == set(weights)
    tokens = torch.randint(VOCAB, (2, 8))
    torch.testing.assert_close(last(first(tokens)), decoder(tokens))


def built(model: Model) -> Decoder:
    with torch.device("meta"):
        return Decoder(plans.config_of_model(model))


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


BUILT = [name for name in model_names() if not load_model(name).unlike_reference]


@pytest.mark.parametrize("name", BUILT)
def test_the_decoder_has_as_many_parameters_as_the_planner_counts(name: str) -> None:
    model = replace(load_model(name), layers=min(load_model(name).layers, 6))
    assert parameters_of(built(model)) == parameter_count(model)


@settings(max_examples=25, deadline=None)
@given(any_models() | models())
def test_any_shape_has_as_many_parameters_as_the_planner_counts(model: Model) -> None:
    model = replace(model, layers=max(2, model.experts.dense_layers + 1 if model.experts else 0))
    assert parameters_of(built(model)) == parameter_count(model)
