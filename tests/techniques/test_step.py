"""In every precision, windows of padded, unequal micro-batches, the last one short, equal full
batches.

The gradients are compared, not the losses: at the first step every bug leaves the loss alone.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.techniques.precision import grad_scaler
from labutils.techniques.step import take_step
from labutils.training import train as module
from tests.helpers import CPU

# 6 micro-batches of 2 sequences: a window of 4, and a last window of 2
LENGTHS = [24, 4, 9, 3, 16, 20, 5, 2, 24, 7, 3, 12]
IDS = torch.randint(2048, (12, 24), generator=torch.Generator().manual_seed(0))
CLIP = 2.0  # below the norm of these gradients, so that clipping acts
# Rounding only: a sum in another order is off by some eps of the dtype that products run in, more
# where terms cancel.
TOLERANCE = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2.4e-2}


def micro_batches() -> list[dict[str, torch.Tensor]]:
    return lab.padded_window(IDS, LENGTHS, 2)


def full_batches() -> list[dict[str, torch.Tensor]]:
    """The two windows as one batch each."""
    first = lab.padded_window(IDS[:8], LENGTHS[:8], 8)
    return first + lab.padded_window(IDS[8:], LENGTHS[8:], 4)


def run(
    batches, precision: str = "fp32", grad_accum_steps: int = 1, clip: float = CLIP
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the gradient and the loss of each optimizer step of a run at a rate of 0, so that all
    steps see the same weights.
    """
    model = lab.build_model("gpt2-nano", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = []

    def note(*_):
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    optimizer.register_step_pre_hook(note)
    series = lab.train(
        model,
        batches,
        lab.lm_loss_sum,
        optimizer,
        steps=2,
        grad_accum_steps=grad_accum_steps,
        precision=precision,
        scaler=grad_scaler(precision, CPU, init_scale=2.0**10),
        max_grad_norm=clip,
        progress=False,
    )
    return gradients, series.loss


def largest_error(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    if len(gradients) != len(expected):
        return float("inf")
    pairs = zip(gradients, expected, strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.fixture(scope="module")
def expected():
    return {precision: run(full_batches(), precision) for precision in TOLERANCE}


@pytest.mark.parametrize("precision", TOLERANCE)
def test_accumulated_windows_equal_full_batches(precision, expected):
    gradients, losses = run(micro_batches(), precision, 4)
    expected_gradients, expected_losses = expected[precision]
    assert largest_error(gradients, expected_gradients) < TOLERANCE[precision]
    assert gradients[0].norm().item() == pytest.approx(CLIP, rel=1e-2)  # clipping did act
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE[precision])


def own_mean(loss_fn):
    return lambda model, batch: loss_fn(model, batch) / lab.count_targets(batch)


def each(window, before=lambda: None, after=lambda: None):
    for micro_batch in window:
        before()
        yield micro_batch
        after()


def no_division(model, window, loss_fn, optimizer, *, n_targets, **how):
    return take_step(model, window, own_mean(loss_fn), optimizer, n_targets=1, **how)


def mean_of_means(model, window, loss_fn, optimizer, *, n_targets, **how):
    window = list(window)
    return take_step(model, window, own_mean(loss_fn), optimizer, n_targets=len(window), **how)


def short_window_divided_as_if_full(model, window, loss_fn, optimizer, *, n_targets, **how):
    window = list(window)
    as_if_full = n_targets * 4 / len(window)
    return take_step(model, window, loss_fn, optimizer, n_targets=as_if_full, **how)


def unshifted_labels_counted(model, window, loss_fn, optimizer, *, n_targets, **how):
    window = list(window)
    n_labels = sum(int((batch["labels"] != -100).sum()) for batch in window)
    return take_step(model, window, loss_fn, optimizer, n_targets=n_labels, **how)


def windows_of_i_modulo_n_equal_to_0(model, window, loss_fn, optimizer, *, n_targets, **how):
    """The first window ends after micro-batch 0."""
    window = list(window)
    if len(window) == 4:
        window = window[:1]
    n_targets = sum(map(lab.count_targets, window))
    return take_step(model, window, loss_fn, optimizer, n_targets=n_targets, **how)


def last_window_dropped(model, window, loss_fn, optimizer, **how):
    window = list(window)
    if len(window) < 4:
        return torch.zeros(())
    return take_step(model, window, loss_fn, optimizer, **how)


def gradients_not_cleared(model, window, loss_fn, optimizer, **how):
    optimizer.zero_grad = lambda set_to_none: None
    return take_step(model, window, loss_fn, optimizer, **how)


def cleared_per_micro_batch(model, window, loss_fn, optimizer, **how):
    return take_step(model, each(window, before=optimizer.zero_grad), loss_fn, optimizer, **how)


def clipped_per_micro_batch(model, window, loss_fn, optimizer, **how):
    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), how["max_grad_norm"])

    return take_step(model, each(window, after=clip), loss_fn, optimizer, **how)


def unscaled_per_micro_batch(model, window, loss_fn, optimizer, *, scaler, **how):
    def unscale():
        scaler.unscale_(optimizer)
        scaler.update()

    idle = SimpleNamespace(scale=scaler.scale, unscale_=lambda _: None, update=lambda: None)
    idle.step = lambda optimizer: optimizer.step()
    return take_step(model, each(window, after=unscale), loss_fn, optimizer, scaler=idle, **how)


def clipped_before_unscaling(model, window, loss_fn, optimizer, *, scaler, **how):
    late = SimpleNamespace(scale=scaler.scale, unscale_=lambda _: None, update=scaler.update)
    late.step = scaler.step  # which unscales what is not unscaled
    return take_step(model, window, loss_fn, optimizer, scaler=late, **how)


BUGS = {  # what is added to a run: the clipping's norm, and the precision
    mean_of_means: (CLIP, "fp32"),
    windows_of_i_modulo_n_equal_to_0: (CLIP, "fp32"),
    last_window_dropped: (CLIP, "fp32"),
    gradients_not_cleared: (CLIP, "fp32"),
    cleared_per_micro_batch: (CLIP, "fp32"),
    clipped_per_micro_batch: (CLIP, "fp32"),
    # only the gradient's length is wrong, which clipping would hide
    no_division: (1e9, "fp32"),
    short_window_divided_as_if_full: (1e9, "fp32"),
    unshifted_labels_counted: (1e9, "fp32"),
    unscaled_per_micro_batch: (CLIP, "fp16"),
    clipped_before_unscaling: (CLIP, "fp16"),
}
FAR_OUTSIDE = {"fp32": 1000 * TOLERANCE["fp32"], "fp16": 20 * TOLERANCE["fp16"]}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.replace("_", " "))
def test_each_classic_bug_in_the_step_is_caught(bug, monkeypatch):
    """Far outside the tolerance, not just outside."""
    clip, precision = BUGS[bug]
    right, _ = run(full_batches(), precision, 1, clip)
    monkeypatch.setattr(module, "take_step", bug)
    wrong, _ = run(micro_batches(), precision, 4, clip)
    assert largest_error(wrong, right) > FAR_OUTSIDE[precision]
