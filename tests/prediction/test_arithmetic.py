from __future__ import annotations

import pytest
import torch

import labutils as lab
from labutils.config.choices import MODELS
from labutils.prediction.arithmetic import (
    MODEL_PARAMETERS,
    closed_form,
    least_bytes,
    n_parameters,
    static_gib,
)
from labutils.prediction.memory import predict_memory
from tests.helpers import slow


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


@pytest.mark.parametrize(
    ("batch", "seq_len"),
    [pytest.param(1, 128, marks=slow), (4, 512), pytest.param(16, 1024, marks=slow)],
)
def test_closed_form_is_roughly_the_ledger(batch, seq_len):
    """Within an eighth, and never so far above it that the solver would discard what fits."""
    shape = {"seq_len": seq_len, "micro_batch_size": batch, "tokens_per_step": batch * seq_len}
    recipes = (
        *(("bf16", "every_3", 0), ("fp32", "selective", 0), ("bf16", "offload", 512)),
        *(
            ("fp32", "none", 0),
            ("bf16", "none", 0),
            ("bf16", "block", 512),
            ("pure_bf16", "block", 0),
        ),
    )
    for name, block, chunk in recipes:
        config = lab.load_config(
            "fp32", precision=name, gradient_checkpointing=block, loss_chunk_tokens=chunk, **shape
        )
        ratio = closed_form(config).peak_bytes / predict_memory(config).peak_bytes
        assert 0.875 < ratio < 1.1, (name, block, chunk, ratio)


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
