"""The loop on any module: scaling, precision, evaluation, and how a training stops."""

import itertools
import math
import weakref

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.techniques.precision import grad_scaler
from labutils.training import train as module
from labutils.training.train import Series
from tests.helpers import CPU, count_rows, regression_batches, squared_error_sum, two_layers


def train(model, batches, *, steps=1, rate=0.1, loss_fn=squared_error_sum, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    how = {"steps": steps, "count_targets": count_rows, "progress": False}
    return lab.train(model, batches, loss_fn, optimizer, **how, **options)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    model, [batch] = two_layers(), regression_batches(1)
    before = model[0].weight.clone()
    huge = {key: value * 1e4 for key, value in batch.items()}
    scaler = grad_scaler("fp16", CPU, init_scale=2.0**16)
    options = {"precision": "fp16", "scaler": scaler, "max_grad_norm": 1.0}
    series = train(model, [huge] * 3, steps=3, **options)
    assert torch.equal(model[0].weight, before)
    assert series.skipped == [True] * 3
    assert series.loss_scale == [2.0**16, 2.0**15, 2.0**14]
    train(model, [batch], **options)
    assert not torch.equal(model[0].weight, before)


def test_losses_that_stay_non_finite_stop_the_training_and_leave_the_series():
    good, bad = regression_batches(2)
    bad["y"] = bad["y"] * 1e30  # its square is inf
    series = Series()
    with pytest.raises(FloatingPointError, match=r"since step 3: .* a lower learning_rate"):
        train(two_layers(), [good, good] + [bad] * 20, steps=22, series=series)
    assert len(series.loss) == 7 and all(map(math.isnan, series.grad_norm))  # nothing is clipped
    assert len(train(two_layers(), [good] + [bad] * 4, steps=9).loss) == 5  # the batches end


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_data_that_are_not_finite_are_named(bad):
    good, *others = regression_batches(7)
    masked = {"mask": torch.full((6, 6), -math.inf)}  # as attention masks are
    first = {"x": good["x"] * bad, "y": good["y"]} | masked
    with pytest.raises(FloatingPointError) as caught:
        train(two_layers(), [good, first, *(other | masked for other in others)], steps=7)
    assert "since step 2: `x` has NaN or inf in the data of step 2. Mend" in str(caught.value)


def test_batches_without_a_target_are_named_before_they_damage_the_weights():
    model, series, ids = lab.build_model(n_layer=1), Series(), torch.arange(16).view(1, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    none = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    window = [{"input_ids": ids, "labels": ids}, none]  # one of two may be empty
    options = {"grad_accum_steps": 2, "steps": 2, "series": series, "progress": False}
    with pytest.raises(ValueError, match=r"no target in the batches of step 2.* -100"):
        lab.train(model, [*window, none, none], lab.lm_loss_sum, optimizer, **options)
    assert len(series.loss) == 1 and all(p.isfinite().all() for p in model.parameters())
    with pytest.raises(ValueError, match="no target in the batches to evaluate on"):
        lab.evaluate(model, [none], lab.lm_loss_sum)


def test_running_out_of_memory_leaves_the_steps_so_far_and_no_gradients():
    passes = itertools.count()

    def loss_fn(model, batch):
        if next(passes) == 7:  # the second micro-batch of step 4
            torch.empty(2**50, dtype=torch.uint8)  # more than any machine has
        return squared_error_sum(model, batch)

    model, series = two_layers(), Series()
    options = {"steps": 4, "grad_accum_steps": 2, "series": series}
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train(model, regression_batches(9), loss_fn=loss_fn, **options)
    assert len(series.loss) == len(series.step_ms) == 3
    assert all(p.grad is None for p in model.parameters())


def test_held_out_loss_is_taken_without_dropout_and_training_goes_on():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    # of unequal sizes: no mean of means
    held_out = regression_batches(1, size=9, seed=9) + regression_batches(1, size=3, seed=8)
    options = {"steps": 4, "rate": 1e-9, "held_out": held_out, "eval_every": 2}
    series = train(model, regression_batches(4), **options)
    assert model.training
    model.eval()
    expected = sum(squared_error_sum(model, batch).item() for batch in held_out) / 12
    assert dict(series.held_out) == pytest.approx({2: expected, 4: expected}, rel=1e-4)


def test_training_and_evaluation_run_in_the_precision_asked_for(monkeypatch):
    model, dtypes, settings, batch = two_layers().eval(), [], [], regression_batches(1)
    model[0].register_forward_hook(lambda layer, _, out: dtypes.append((layer.training, out.dtype)))
    real = lab.precision.tf32
    monkeypatch.setattr(module, "tf32", lambda on: settings.append(on) or real(on))
    train(model, batch, precision="bf16", held_out=batch)
    assert dtypes == [(True, torch.bfloat16), (False, torch.bfloat16)] and settings == [False]
    with pytest.raises(RuntimeError, match="tf32"):
        train(model, batch, precision="tf32")


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

    train(two_layers(), regression_batches(6), loss_fn=loss_fn, steps=2, grad_accum_steps=3)
    assert alive == [0] * 6
