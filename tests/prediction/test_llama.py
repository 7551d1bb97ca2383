"""LLaMA that is too large to build: few layers tell the bytes of many."""

import pytest

from labutils.prediction import llama

RECIPES = [
    {"precision": "bf16", "checkpointing": False},
    {"precision": "pure_bf16", "optimizer": "adamw_8bit"},
    {"precision": "pure_bf16", "frozen": "qlora"},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_few_layers_tell_the_bytes_of_all(monkeypatch, recipe):
    monkeypatch.setitem(llama.SHAPES, "7B", (8, *llama.SHAPES["7B"][1:]))
    from_few = llama.predict_large("7B", **recipe).peak_bytes
    all_layers = llama.traced_ledger("7B", 8, **recipe).peak_bytes
    assert from_few == pytest.approx(all_layers, rel=0.005)


def test_frozen_weights_have_no_gradients_and_no_moments():
    full, lora, qlora = (
        llama.predict_large("1.1B", precision="pure_bf16", frozen=frozen) for frozen in llama.FROZEN
    )
    n = full.categories["parameters"] / 2
    assert full.phases["optimizer"]["optimizer state"] >= 4 * n
    assert lora.phases["optimizer"]["optimizer state"] < 0.1 * n
    assert lora.phases["optimizer"]["gradients"] < 0.1 * n
    assert qlora.categories["parameters"] < 0.5 * lora.categories["parameters"]


def test_unknown_sizes_and_kinds_are_refused():
    with pytest.raises(ValueError, match=r"no shape '8B'; there are: 1\.1B"):
        llama.predict_large("8B", precision="fp32")
    with pytest.raises(ValueError, match="none or lora or qlora; got 'dora'"):
        llama.predict_large("7B", precision="fp32", frozen="dora")
