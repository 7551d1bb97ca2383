from __future__ import annotations

import math
import os
import signal
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.techniques.precision import grad_scaler
from labutils.training import train as module
from labutils.workload.build import build_optimizer
from tests.helpers import (
    CPU,
    count_rows,
    rate_of,
    regression_batches,
    squared_error_sum,
    two_layers,
)

train = partial(lab.train, loss_fn=squared_error_sum, count_targets=count_rows, progress=False)


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_seed_gives_identical_losses_twice():
    series = []
    for _ in range(2):
        model = lab.build_model("gpt2-nano", seed=3)
        blocks, _ = lab.load_corpus().split(32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        record = lab.train(
            model, lab.batches(blocks, 2, 0), lab.lm_loss_sum, optimizer, steps=4, progress=False
        )
        series.append(record.series.loss)
    assert series[0] == series[1]


def test_clipping_acts_on_unscaled_gradients():
    model = two_layers()
    before = flat(model)
    scaler = grad_scaler("fp16", CPU, init_scale=2.0**10)
    record = train(
        model,
        regression_batches(1),
        optimizer=sgd(model, 1.0),
        steps=1,
        precision="fp16",
        scaler=scaler,
        max_grad_norm=0.01,
    )
    assert (flat(model) - before).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert 0.01 < record.series.grad_norm[0] < 100


def test_an_overflow_skips_the_step_and_halves_the_scale():
    model = two_layers()
    before = flat(model)
    huge = {key: value * 1e4 for key, value in regression_batches(1)[0].items()}
    scaler = grad_scaler("fp16", CPU, init_scale=2.0**16)
    record = train(
        model,
        [huge],
        optimizer=sgd(model),
        steps=1,
        precision="fp16",
        scaler=scaler,
        max_grad_norm=1.0,
    )
    assert record.series.skipped == [True]
    assert torch.equal(flat(model), before)
    assert scaler.get_scale() == 2.0**15


def test_lasting_non_finite_losses_stop_the_run_and_keep_the_record():
    model = two_layers()
    good, bad = regression_batches(2)
    bad["x"] = bad["x"] * math.nan
    record = train(model, [good, good] + [bad] * 20, optimizer=sgd(model), steps=22)
    assert record.outcome == "non_finite"
    assert len(record.series.loss) == 7
    assert "since step 3" in record.reason
    assert "learning_rate" in record.reason


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step(number):
    def batches():
        for i, batch in enumerate(regression_batches(6)):
            if i == 2:
                os.kill(os.getpid(), number)
            yield batch

    model = two_layers()
    before = signal.signal(number, signal.default_int_handler)  # a background shell ignores Ctrl-C
    try:
        record = train(model, batches(), optimizer=sgd(model), steps=6)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert (record.outcome, len(record.series.loss)) == ("interrupted", 3)
    assert len(record.series.step_ms) == 3 and "after 3 of 6 steps" in record.reason
    assert all(p.grad is None for p in model.parameters())


def test_batches_that_end_early_are_reported():
    model = two_layers()
    record = train(model, regression_batches(3), optimizer=sgd(model), steps=5)
    assert len(record.series.loss) == 3
    assert "ended after 3 of 5 steps" in record.reason


def test_held_out_loss_is_taken_without_dropout_and_training_goes_on():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    held_out = [
        *regression_batches(1, size=9, seed=9),
        *regression_batches(1, size=3, seed=8),
    ]  # no mean of means
    record = train(
        model,
        regression_batches(4),
        optimizer=sgd(model, 1e-9),
        steps=4,
        held_out=held_out,
        eval_every=2,
    )
    assert [step for step, _ in record.held_out] == [2, 4]
    assert record.held_out[0][1] == pytest.approx(record.held_out[1][1], rel=1e-4)
    assert model.training
    model.eval()
    expected = sum(squared_error_sum(model, b).item() for b in held_out) / 12
    assert record.held_out[1][1] == pytest.approx(expected, rel=1e-5)


def test_unsupported_precision_is_refused_before_any_work():
    model = two_layers()
    with pytest.raises(RuntimeError, match="tf32"):
        train(model, regression_batches(1), optimizer=sgd(model), steps=1, precision="tf32")


def test_training_and_evaluation_run_in_the_precision_asked_for(monkeypatch):
    model, dtypes = two_layers().eval(), []
    model[0].register_forward_hook(
        lambda module, _i, out: dtypes.append((module.training, out.dtype))
    )
    settings = []
    real = lab.precision.tf32
    monkeypatch.setattr(module, "tf32", lambda on: settings.append(on) or real(on))
    held_out = regression_batches(1)
    train(
        model,
        regression_batches(1),
        optimizer=sgd(model),
        steps=1,
        precision="bf16",
        held_out=held_out,
    )
    assert dtypes == [(True, torch.bfloat16), (False, torch.bfloat16)]
    assert settings == [False]


def test_no_graph_outlives_its_micro_batch():
    """A loss that is logged with its graph keeps what the graph refers to until the log is read."""
    graphs, alive = [], []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            graphs.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def loss_fn(model, batch):
        alive.append(sum(graph() is not None for graph in graphs))
        return Marked.apply(squared_error_sum(model, batch))

    model = two_layers()
    train(
        model,
        regression_batches(6),
        loss_fn=loss_fn,
        optimizer=sgd(model),
        steps=2,
        grad_accum_steps=3,
    )
    assert alive == [0] * 6


def test_schedule_warms_up_then_falls_to_a_tenth():
    config = lab.load_config(
        "fp32", steps=100, lr_warmup_steps=10, learning_rate=1.0, lr_schedule="cosine"
    )
    rates = [rate_of(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    constant = lab.load_config(
        "fp32", steps=100, lr_warmup_steps=0, learning_rate=1.0, lr_schedule="constant"
    )
    assert {rate_of(step, constant) for step in range(100)} == {1.0}


def test_schedule_reaches_the_optimizer():
    model = two_layers()
    record = train(
        model,
        regression_batches(3),
        optimizer=sgd(model),
        steps=3,
        learning_rate_at=lambda step: 0.1 * (step + 1),
    )
    assert record.series.learning_rate == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_optimizer_implementations_agree(optimizer):
    weights = []
    for chosen in ("fused", "foreach"):
        model = two_layers()
        config = lab.load_config(
            "fp32", optimizer=optimizer, optimizer_impl=chosen, learning_rate=0.01
        )
        train(model, regression_batches(5), optimizer=build_optimizer(model, config), steps=5)
        weights.append(flat(model))
    assert torch.allclose(*weights, atol=1e-6)


def test_weight_decay_spares_biases():
    model = two_layers()
    groups = build_optimizer(model, lab.load_config("fp32", weight_decay=0.5)).param_groups
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    assert all(p.dim() == 1 for p in groups[1]["params"])
    assert sum(len(g["params"]) for g in groups) == 4


@pytest.mark.parametrize("full_at", [0, 3])
def test_running_out_of_memory_keeps_the_steps_so_far(full_at):
    model = two_layers()

    def batches():
        for i, batch in enumerate(regression_batches(6)):
            if i == full_at:
                torch.empty(2**50, dtype=torch.uint8)  # more than any machine has
            yield batch

    if not full_at:  # nothing to keep
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            train(model, batches(), optimizer=sgd(model), steps=6)
        return
    record = train(model, batches(), optimizer=sgd(model), steps=6)
    assert (record.outcome, len(record.series.loss), len(record.series.step_ms)) == (
        "out_of_memory",
        3,
        3,
    )
    assert record.reason == "after 3 of 6 steps: asked for 1,048,576.00 GiB more"
    assert all(p.grad is None for p in model.parameters())
