"""Layers in 16 bits, and how far each layer's gradient is from float64's."""

from __future__ import annotations

import pytest
import torch

from labutils import by_layer
from labutils.techniques.loss import lm_loss_sum
from labutils.techniques.precision import autocast
from labutils.training.loop import train
from labutils.workload.data import batches, sequences
from tests.helpers import CPU


@pytest.fixture(scope="module")
def model():
    return by_layer.model_after(0, 0, CPU)


@pytest.fixture(scope="module")
def batch():
    return by_layer.batch_of(0, CPU)


@pytest.fixture(scope="module")
def right(model, batch):
    return by_layer.float64_gradients(model, batch)


def error(model, batch, right, layers, dtype=torch.bfloat16):
    loss = by_layer.RoundedLayers(model, layers, dtype)
    return by_layer.total_error(by_layer.gradients_of(model, lambda: loss(batch)), right)


def test_every_layer_with_weights_has_one_kind(model):
    kinds = by_layer.layers_by_kind(model)
    layers = [layer for names in kinds.values() for layer in names]
    assert len(layers) == len(set(layers)) and all(kinds.values())
    with_weights = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        with_weights.add(name.rpartition(".")[0])
    assert with_weights <= set(layers)


def test_nothing_rounded_is_float32(model, batch, right):
    plain = by_layer.gradients_of(model, lambda: by_layer.mean_loss(model, batch))
    rounded = by_layer.RoundedLayers(model, [], torch.bfloat16)
    unrounded = by_layer.gradients_of(model, lambda: rounded(batch))
    assert by_layer.total_error(unrounded, plain) < 1e-6  # the loss adds in another order
    assert by_layer.total_error(plain, right) < 1e-5


@pytest.mark.parametrize("kind", by_layer.KINDS)
def test_each_kind_alone_makes_an_error_and_all_together_a_larger_one(model, batch, right, kind):
    kinds = by_layer.layers_by_kind(model)
    everything = [layer for names in kinds.values() for layer in names]
    alone = error(model, batch, right, kinds[kind])
    assert 1e-4 < alone < error(model, batch, right, everything) < 0.02


def test_weights_of_the_logits_and_of_the_embedding_are_rounded_apart(model):
    for layer, other in (("lm_head", "transformer.wte"), ("transformer.wte", "lm_head")):
        weights = by_layer.RoundedLayers(model, [layer], torch.bfloat16)._weights()
        stored = model.lm_head.weight
        assert torch.equal(weights[f"{layer}.weight"], stored.bfloat16().float())
        assert torch.equal(weights[f"{other}.weight"], stored)


def test_hooks_are_gone_after_an_error(model, batch):
    rounded = by_layer.RoundedLayers(model, ["lm_head"], torch.bfloat16)
    with pytest.raises(KeyError):
        rounded({"input_ids": batch["input_ids"]})
    assert not model.lm_head._forward_hooks and not model.lm_head._forward_pre_hooks


def test_rounded_products_are_as_wrong_as_autocast(model, batch, right):
    def loss():
        with autocast("bf16", CPU):
            return by_layer.mean_loss(model, batch)

    kinds = by_layer.layers_by_kind(model)
    products = [*kinds["attention"], *kinds["MLP"], *kinds["logits"]]
    real = by_layer.typical_error(by_layer.gradients_of(model, loss), right)
    loss_of = by_layer.RoundedLayers(model, products, torch.bfloat16)
    emulated = by_layer.gradients_of(model, lambda: loss_of(batch))
    # how a kernel orders its sums is its own affair
    assert by_layer.typical_error(emulated, right) == pytest.approx(real, rel=0.3)


def test_an_unknown_layer_is_refused(model):
    with pytest.raises(ValueError, match="no such layers: lm_haed"):
        by_layer.RoundedLayers(model, ["lm_haed"], torch.bfloat16)


def test_a_loss_scale_is_divided_out_and_overflow_stays_visible(model, batch, right):
    everything = by_layer.layers_by_kind(model)
    layers = [layer for names in everything.values() for layer in names]
    loss = by_layer.RoundedLayers(model, layers, torch.float16)
    good = by_layer.gradients_of(model, lambda: loss(batch), 4096.0)
    assert by_layer.total_error(good, right) < 2e-3
    over = by_layer.gradients_of(model, lambda: loss(batch), 2.0**30)
    assert not torch.isfinite(torch.tensor(by_layer.total_error(over, right)))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors_are_relative_to_each_layer():
    right = {"a.weight": torch.tensor([3.0]), "a.bias": torch.tensor([4.0])}
    right |= {"b.weight": torch.tensor([1e-3]), "c.weight": torch.tensor([2.0])}
    wrong = right | {"a.bias": torch.tensor([4.5]), "b.weight": torch.tensor([2e-3])}
    errors = by_layer.errors_by_layer(wrong, right)
    assert errors == pytest.approx({"a": 0.1, "b": 1.0, "c": 0.0})
    assert by_layer.typical_error(wrong, right) == pytest.approx(0.1)
    assert by_layer.total_error(wrong, right) == pytest.approx(0.5 / 29**0.5, rel=1e-3)


def test_a_run_is_repeated_by_its_seed():
    def weight(*arguments, **named):
        return by_layer.model_after(2, *arguments, **named).lm_head.weight

    plain = weight(1, CPU)
    assert torch.equal(weight(1, CPU), plain)
    assert not torch.equal(weight(2, CPU), plain)
    nudged = weight(1, CPU, nudge=1e-7)
    # Adam divides by the size of a gradient, so a weight moves by up to 1e-3 in each step
    assert not torch.equal(nudged, plain) and (nudged - plain).abs().max() < 2.1e-3


def test_a_nudge_is_relative_and_has_either_sign():
    plain, nudged = by_layer.model_after(0, 1, CPU), by_layer.model_after(0, 1, CPU, nudge=1e-3)
    ratio = nudged.lm_head.weight / plain.lm_head.weight - 1
    assert torch.allclose(ratio.abs(), torch.full_like(ratio, 1e-3), atol=1e-6)
    assert 0.4 < (ratio > 0).float().mean() < 0.6


def test_its_steps_are_those_of_the_training_loop():
    start, trained = (by_layer.model_after(n, 1, CPU).lm_head.weight for n in (0, 3))
    model = by_layer.model_after(0, 1, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=by_layer.LEARNING_RATE)
    text = batches(sequences(by_layer.SEQ_LEN), by_layer.TRAINED_ROWS, 1)
    train(model, text, lm_loss_sum, optimizer, steps=3, progress=False)
    # Adam makes whole steps of gradients that are nearly 0, whatever their last bits
    assert (trained - model.lm_head.weight).norm() < 0.02 * (trained - start).norm()


def test_a_layer_gets_and_gives_16_bit_numbers(model, batch):
    mlp, seen = model.transformer.h[0].mlp, {}
    hooks = [mlp.act.register_forward_hook(lambda _m, inputs, _o: seen.update(into=inputs[0]))]
    hooks.append(mlp.c_proj.register_forward_pre_hook(lambda _m, x: seen.update(out=x[0])))
    for layers, is_rounded in (([], False), (["transformer.h.0.mlp.act"], True)):
        by_layer.RoundedLayers(model, layers, torch.bfloat16)(batch)
        for value in seen.values():
            assert torch.equal(value.bfloat16().float(), value) is is_rounded
    for hook in hooks:
        hook.remove()
