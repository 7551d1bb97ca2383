from __future__ import annotations

import itertools

import pytest

import labutils as lab
from labutils import machine
from labutils.config.card import CONTEXT_GIB
from labutils.machine import SMALLEST_GIB
from labutils.prediction.memory import needed_gib, predict_memory
from labutils.prediction.search import Plans, _checkpointing, _recipes, fit, named
from labutils.prediction.sizes import largest_micro_batch
from labutils.prediction.time import predict_time
from tests.helpers import slow

SMALL = {"model": "gpt2-nano", "seq_len": 512, "micro_batch_size": 4, "tokens_per_step": 2048}


def candidates(config: lab.Config, card_name: str) -> list[dict]:
    """All changes that `fit` may propose, in the order in which it asks for them."""
    card = machine.card_of(card_name)
    return [
        recipe | checkpointing | size
        for recipe in _recipes(config, card)
        for checkpointing in _checkpointing(config)
        for size in Plans(config, card).sizes(recipe)
    ]


def test_nothing_is_changed_where_the_config_fits():
    config = lab.load_config("fp32", **SMALL)
    asked = needed_gib(predict_memory(config))
    assert fit(config, asked + 0.001).changes == {}


def test_where_little_is_missing_no_change_costs_time():
    config = lab.load_config("fp32", **SMALL, optimizer_impl="foreach")
    found = fit(config, needed_gib(predict_memory(config)) - 0.001)
    assert found.changes and found.time_cost <= 0
    assert not {"gradient_checkpointing", "optimizer", "micro_batch_size"} & set(found.changes)


@pytest.mark.parametrize("share", [0.6, 0.35])
def test_what_is_proposed_fits_and_keeps_the_tokens_per_step(share):
    config = lab.load_config("fp32", **SMALL)
    budget = CONTEXT_GIB + share * (needed_gib(predict_memory(config)) - CONTEXT_GIB)
    found = fit(config, budget)
    assert found.fits(budget)
    changed = config.model_copy(update=found.changes)
    assert changed.tokens_per_step == config.tokens_per_step
    assert changed.tokens_per_step % (changed.seq_len * changed.micro_batch_size) == 0
    assert predict_memory(changed).phases == found.ledger.phases
    for key in found.changes:  # each is needed to fit, or to be as fast
        fewer = {other: value for other, value in found.changes.items() if other != key}
        without = Plans(config.on("cuda"), machine.card_of("a100")).of(fewer)
        assert not without.fits(budget) or without.step_ms > found.step_ms, named(fewer)


def test_where_nothing_fits_the_smallest_need_is_told():
    config = lab.load_config("fp32", **SMALL, activation="gelu_tanh")
    found = fit(config, CONTEXT_GIB)
    assert not found.fits(CONTEXT_GIB)
    assert {"gradient_checkpointing", "micro_batch_size"} <= set(found.changes)
    assert found.fits(found.needed_gib + 1e-6)


@slow
def test_nothing_is_proposed_that_the_device_lacks():
    config = lab.load_config("fp32", **SMALL)
    assert {c.get("precision") for c in candidates(config, "t4")} == {None, "fp16"}
    assert {c.get("precision") for c in candidates(config, "a100")} == {None, "bf16", "pure_bf16"}
    assert fit(config, CONTEXT_GIB, "t4").changes.get("precision") in (None, "fp16")


def test_a_plan_tells_the_time_of_its_step_and_is_the_quicker_of_the_two_ways():
    config = lab.load_config("fp32", **SMALL)
    budget = CONTEXT_GIB + 0.35 * (needed_gib(predict_memory(config)) - CONTEXT_GIB)
    found = fit(config, budget)
    changed = predict_time(config.model_copy(update=found.changes)).step_ms
    assert found.step_ms == pytest.approx(changed)
    assert found.time_cost == pytest.approx(changed / predict_time(config).step_ms - 1)
    plans = Plans(config.on("cuda"), machine.card_of("a100"))
    for checkpointing in _checkpointing(config):
        for recipe in _recipes(config, plans.card)[:2]:
            for plan in plans.first_that_fits(recipe | checkpointing, budget):
                assert found.step_ms <= 1.02 * plan.step_ms, named(plan.changes)


def test_largest_micro_batch_fits_and_one_more_does_not():
    config = lab.load_config("bf16", model="gpt2-nano", seq_len=256)
    budget = CONTEXT_GIB + 0.5
    size = largest_micro_batch(config, budget)

    def asked(n: int) -> float:
        alone = lab.load_config(
            "bf16", model="gpt2-nano", seq_len=256, micro_batch_size=n, tokens_per_step=256 * n
        )
        return needed_gib(predict_memory(alone))

    assert asked(size) <= budget < asked(size + 1)
    assert largest_micro_batch(config, CONTEXT_GIB) == 0
    assert largest_micro_batch(config, 80, limit=8) == 8


def test_what_changes_the_learning_comes_last_and_a_step_in_backward_where_nothing_is_clipped():
    """Candidates in the order in which they are tried; the ledger is not asked."""

    def order(**changes) -> list[dict]:
        config = lab.load_config("fp32", **(SMALL | changes)).on("cuda")
        return candidates(config, "a100")

    tried = order(max_grad_norm=0.0)
    kinds = [
        ("optimizer_in_backward" in c, "optimizer" in c, c.get("precision") == "pure_bf16")
        for c in tried
    ]
    assert kinds == sorted(kinds) and kinds[-1] == (True, True, True)
    assert all("micro_batch_size" not in c for c in tried if "optimizer_in_backward" in c)
    assert not any("optimizer_in_backward" in c for c in order(max_grad_norm=1.0))
    assert not any(
        "optimizer_in_backward" in c for c in order(max_grad_norm=0.0, tokens_per_step=4096)
    )
    assert not any("optimizer" in c for c in order(optimizer="sgd"))
    for card, inside in itertools.product(("a100", "t4"), (True, False)):
        values = SMALL | {"max_grad_norm": 0.0, "optimizer_in_backward": inside}
        for changes in candidates(lab.load_config("fp32", **values).on("cuda"), card):
            lab.load_config("fp32", **values | changes)  # what is proposed can run


@slow
def test_the_solver_finds_a_recipe_for_xl_in_eight_gib():
    shape = {
        "model": "gpt2-xl",
        "seq_len": 1024,
        "micro_batch_size": 1,
        "tokens_per_step": 1024,
        "dropout": 0.0,
    }
    found = lab.fit(lab.load_config("fp32", **shape, max_grad_norm=0.0), 7.6, "rtx4060")
    assert found.fits(7.6)
    assert {"optimizer", "optimizer_in_backward", "gradient_checkpointing"} <= set(found.changes)


def test_the_smallest_gpt2_run_is_what_setup_asks_for():
    alone = lab.predict_memory(lab.load_config("fp32", micro_batch_size=1), "a100")
    assert (
        SMALLEST_GIB - 0.2 < needed_gib(alone) - CONTEXT_GIB <= SMALLEST_GIB
    )  # the context is there already


def test_where_memory_is_short_micro_batches_shrink_and_nothing_else(monkeypatch):
    plain = lab.fitting("fp32", "bf16")
    assert [c.name for c in plain] == ["fp32", "bf16"] and plain == [
        lab.load_config("fp32"),
        lab.load_config("bf16"),
    ]
    now = needed_gib(lab.predict_memory(plain[0], "cpu"), "cpu")
    monkeypatch.setattr(machine, "free_bytes", lambda _: 0.7 * now * 2**30)
    fp32, bf16 = (config.on("cpu") for config in lab.fitting("fp32", "bf16", steps=7))
    assert fp32.micro_batch_size == bf16.micro_batch_size == 2
    assert fp32.tokens_per_step == plain[0].on("cpu").tokens_per_step and fp32.steps == 7
    assert needed_gib(lab.predict_memory(fp32, "cpu"), "cpu") <= 0.7 * now
    monkeypatch.setattr(machine, "free_bytes", lambda _: 2**20)
    assert lab.fitting("fp32")[0].on("cpu").micro_batch_size == 1
