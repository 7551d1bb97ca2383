"""Try a reader's FP16 step over one window of unequal micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from labutils.checks.core import first_problem
from labutils.checks.toy import Rows, clipped, make_toy
from labutils.checks.windows import (
    NO_CLIPPING,
    NOT_ACCUMULATED,
    RIGHT,
    WINDOW_ROWS,
    Watch,
    candidate_gradients,
    make_micro_batches,
    nearest,
    window_gradient,
)

AmpWindow = Callable[
    [nn.Module, list[Rows], torch.optim.Optimizer, torch.amp.GradScaler, float], object
]
LOSS_SCALE = 256.0
TOLERANCE = 0.03  # FP16 products are off by some 0.001


def try_window(step: AmpWindow) -> str | None:
    """Return what is wrong with a step over a window; None if it is right."""
    window = make_micro_batches(WINDOW_ROWS[:4])
    return first_problem(
        lambda: _unclipped_window(step, window),
        lambda: _clipped_window(step, window),
        lambda: _overflowing_window(step, window),
        lambda: _second_window(step, window),
    )


def _unclipped_window(step: AmpWindow, window: list[Rows]) -> str | None:
    toy = make_toy(loss_scale=LOSS_SCALE)
    watch = Watch(toy)
    before = toy.weights()
    step(toy.model, window, toy.optimizer, toy.scaler, NO_CLIPPING)
    if not watch.rows:
        return "the function never called the model."
    if watch.most_rows > max(WINDOW_ROWS):
        return NOT_ACCUMULATED
    if watch.dtypes[0] != torch.float16:
        return f"the first layer gave {watch.dtypes[0]}: is autocast on, and for which dtype?"
    if len(watch.steps) != 1:
        return f"the optimizer stepped {len(watch.steps)} times for one window."
    moved = before - toy.weights()
    candidates = candidate_gradients(before, window, len(window))
    if moved.norm() > 0.3 * LOSS_SCALE * candidates[RIGHT].norm():
        return (
            "the step is about as many times too long as the loss scale is large: is the scale "
            "ever taken out?"
        )
    if moved.norm() < 10 / LOSS_SCALE * candidates[RIGHT].norm():
        return "the step is far too short: was the scale taken out more than once?"
    found = nearest(moved, candidates, TOLERANCE)
    if found is None:
        return "the step is not that of the mean over all rows of the window."
    return None if found == RIGHT else found


def _clipped_window(step: AmpWindow, window: list[Rows]) -> str | None:
    toy = make_toy(loss_scale=LOSS_SCALE)
    before = toy.weights()
    right = window_gradient(before, window)
    max_norm = 0.3 * right.norm().item()
    step(toy.model, window, toy.optimizer, toy.scaler, max_norm)
    moved = before - toy.weights()
    if moved.norm() < 0.1 * max_norm:
        return (
            "with clipping the step is far too short: were scaled gradients compared with "
            "max_grad_norm?"
        )
    if moved.norm() > 1.1 * max_norm:
        return (
            "the step is longer than max_grad_norm allows: are the gradients of the whole window "
            "clipped?"
        )
    if nearest(moved, {RIGHT: clipped(right, max_norm)}, TOLERANCE) is None:
        return (
            "clipped, but in another direction than the window's gradient: were parts of it "
            "clipped?"
        )
    return None


def _overflowing_window(step: AmpWindow, window: list[Rows]) -> str | None:
    toy = make_toy(loss_scale=LOSS_SCALE)
    before = toy.weights()
    first, (x, y), *others = window
    step(toy.model, [first, (x, y * 1e6), *others], toy.optimizer, toy.scaler, NO_CLIPPING)
    if not torch.equal(toy.weights(), before):
        return (
            "one micro-batch overflowed, and the weights changed. The whole window must be "
            "skipped, by the scaler."
        )
    scale = toy.scaler.get_scale()
    if scale != LOSS_SCALE / 2:
        return (
            f"after an overflow in one window the scale went from {LOSS_SCALE:g} to {scale:g}: "
            "updated once?"
        )
    return None


def _second_window(step: AmpWindow, window: list[Rows]) -> str | None:
    toy = make_toy()
    step(toy.model, window, toy.optimizer, toy.scaler, NO_CLIPPING)
    middle = toy.weights()
    step(toy.model, window, toy.optimizer, toy.scaler, NO_CLIPPING)
    right = {RIGHT: window_gradient(middle, window)}
    if nearest(middle - toy.weights(), right, tolerance=0.1) is None:
        return "the second window also contains the first one's gradients: they were never cleared."
    return None
