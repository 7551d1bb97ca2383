from __future__ import annotations

import pytest
import torch

import labutils as lab
from labutils.config.choices import MODELS
from labutils.prediction.arithmetic import (
    MODEL_PARAMETERS,
    least_bytes,
    n_parameters,
    static_gib,
)
from labutils.prediction.memory import predict_memory


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_counted_from_the_shape(model):
    with torch.device("meta"):  # where old versions of transformers do not tie the output embedding
        named = lab.build_model(model).named_parameters()
    assert n_parameters(model) == sum(
        p.numel() for key, p in named if not key.startswith("lm_head")
    )


def test_published_sizes():
    for name, model in (
        ("GPT-2 124M", "gpt2"),
        ("GPT-2 355M", "gpt2-medium"),
        ("GPT-2 1.5B", "gpt2-xl"),
    ):
        assert n_parameters(model) == MODEL_PARAMETERS[name]


def test_what_the_saying_gets_wrong():
    """Exhibits of the kind "a 7B model trains in 12 GB":

    Weights, gradients and Adam alone say otherwise.
    """
    assert static_gib(MODEL_PARAMETERS["7B"], "FP32 or autocast, AdamW") > 100
    assert static_gib(1e9, "FP32 or autocast, AdamW") > 8
    assert static_gib(MODEL_PARAMETERS["GPT-2 1.5B"], "FP32 or autocast, AdamW") > 16
    assert static_gib(
        MODEL_PARAMETERS["70B"], "QLoRA: frozen 4-bit weights alone"
    ) * 2**30 / 1e9 == pytest.approx(35.6, abs=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"precision": "pure_bf16"},
        {"optimizer": "adamw_8bit"},
        {"optimizer": "sgd"},
        {"optimizer": "adamw_8bit", "optimizer_in_backward": True, "max_grad_norm": 0.0},
    ],
)
def test_no_step_is_predicted_to_take_less_than_the_least(changes):
    shape = {"seq_len": 64, "micro_batch_size": 1, "tokens_per_step": 64}
    config = lab.load_config("fp32", **shape | changes, gradient_checkpointing="block")
    ledger = predict_memory(config, "a100")
    assert 0.6 * ledger.peak_bytes < least_bytes(config) < ledger.peak_bytes
