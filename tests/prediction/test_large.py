"""LLaMA that is too large to build: few layers tell the bytes of many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labutils.prediction import large

SMALL = large.Shape(width=256, inner=688, n_layer=6, n_head=4, n_kv_head=2, vocabulary=1000)
RECIPES = [
    {"precision": "fp32"},
    {"precision": "bf16"},
    {"precision": "pure_bf16", "optimizer": "adamw_8bit"},
    {"precision": "pure_bf16", "frozen": "lora"},
    {"precision": "pure_bf16", "frozen": "qlora"},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_few_layers_tell_the_bytes_of_all(recipe, checkpointing):
    shape = replace(large.SHAPES["7B"], n_layer=8)
    batch = {"micro_batch_size": 1, "seq_len": 2048, "checkpointing": checkpointing}
    found = large.predict_large(shape, **recipe, **batch)
    asked = {"optimizer": "adamw", "frozen": "none"} | recipe | batch
    every = large._few_layers(shape, n_layer=shape.n_layer, device="a100", **asked)
    assert found.peak_bytes == pytest.approx(every.peak_bytes, rel=0.005)


def test_the_count_of_parameters_is_the_model_s():
    for shape in (SMALL, large.SHAPES["7B"], large.SHAPES["70B"]):
        model = large.llama(shape, shape.n_layer, torch.bfloat16)
        assert sum(p.numel() for p in model.parameters()) == shape.n_parameters


def test_frozen_weights_have_no_gradients_and_no_moments():
    full, lora, qlora = (
        large.predict_large(SMALL, precision="pure_bf16", frozen=frozen) for frozen in large.FROZEN
    )
    n = SMALL.n_parameters
    assert full.phases["optimizer"]["optimizer state"] >= 4 * n
    assert lora.phases["optimizer"]["optimizer state"] < 0.6 * n
    assert lora.phases["optimizer"]["gradients"] < 0.3 * n
    assert qlora.categories["parameters"] < 0.5 * lora.categories["parameters"]


def test_unknown_sizes_and_kinds_are_refused():
    with pytest.raises(ValueError, match=r"no shape '8B'; there are: 1\.1B"):
        large.predict_large("8B", precision="fp32")
    with pytest.raises(ValueError, match="none or lora or qlora; got 'dora'"):
        large.predict_large(SMALL, precision="fp32", frozen="dora")
