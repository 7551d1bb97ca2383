"""Exercises of notebook 01: one FP16 step, a scaler's log, a control."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from labutils.checks.core import exercise, first_problem
from labutils.checks.toy import clipped, gradient, make_toy

AmpStep = Callable[
    [nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer, torch.amp.GradScaler, float],
    object,
]
LEARNING_RATE, LOSS_SCALE, MAX_GRAD_NORM = 1.0, 1024.0, 0.05
# The runs that the notebook lists.
CONTROL_RUNS: dict[str, dict[str, str | float]] = {
    "A": {"products": "FP32", "weights": "FP32", "rate": 3e-5, "seed": 0},
    "B": {"products": "BF16", "weights": "FP32", "rate": 3e-5, "seed": 0},
    "C": {"products": "BF16", "weights": "BF16", "rate": 3e-5, "seed": 0},
    "D": {"products": "BF16", "weights": "BF16", "rate": 2e-3, "seed": 0},
    "E": {"products": "BF16", "weights": "FP32", "rate": 3e-5, "seed": 1},
}


@exercise(
    hints=(
        "If two runs differ in one thing only, this thing is the cause of what differs.",
        "Compare two runs key by key. How many keys differ?",
        "The seed counts, too: two seeds begin with other weights.",
    )
)
def control_runs(answer: Sequence[str] | None) -> str | None:
    """Check which two of CONTROL_RUNS show the effect of 16-bit weights alone: two letters."""
    is_pair = isinstance(answer, (list, tuple, set)) and len(set(answer)) == 2
    if not is_pair or not set(answer) <= set(CONTROL_RUNS):
        return f"the answer is a pair of the letters {', '.join(CONTROL_RUNS)}."
    first, second = (CONTROL_RUNS[letter] for letter in answer)
    unlike = [cause for cause, value in first.items() if second[cause] != value]
    if unlike == ["weights"]:
        return None
    if "weights" not in unlike:
        return (
            "the weights of both runs have the same dtype. So their difference says nothing about "
            "16-bit weights."
        )
    others = ", ".join(cause for cause in unlike if cause != "weights")
    return f"these runs differ in more than the weights ({others}). Which was the cause?"


@exercise(
    hints=(
        "A scaler that works skips steps now and then. Look at what becomes of the scale in each "
        "log.",
        "Each skip halves the scale, five clean steps in a row double it. Where does it end?",
        "If the gradients were finite, some small scale would let them pass.",
    )
)
def scaler_log(logs: Mapping[str, str], answer: Sequence[str] | None) -> str | None:
    """Check which log shows gradients that no scale makes finite, and which growing gradients.

    In a log each `.` is a clean step, each `x` a skipped one. The answer is two letters.
    """
    if not isinstance(answer, (list, tuple)) or len(answer) != 2 or not set(answer) <= set(logs):
        return f"the answer is two of the letters {', '.join(logs)}, in the order of the questions."
    walks = {letter: _exponents(log) for letter, log in logs.items()}
    healthy = {letter for letter, walk in walks.items() if walk[-1] >= walk[len(walk) // 2] - 1}
    hopeless = min(walks, key=lambda letter: walks[letter][-1])
    growing = (set(logs) - healthy - {hopeless}).pop()
    if tuple(answer) == (hopeless, growing):
        return None
    if tuple(answer) == (growing, hopeless):
        return "these are the two runs, but in the other order."
    for letter in answer:
        if letter in healthy:
            return (
                f"run {letter} is healthy: its scale started too high and was found by skipping. "
                "Later one step is skipped after each doubling."
            )
    return "two different runs are asked for."


def _exponents(log: str) -> list[int]:
    """Return log2 of the scale after each step: from 24 on, doubled after 5 clean steps."""
    exponents, exponent, clean = [], 24, 0
    for step in log:
        clean = clean + 1 if step == "." else 0
        exponent += (clean == 5) - (step == "x")
        clean %= 5
        exponents.append(exponent)
    return exponents


@exercise(
    hints=(
        "Four calls belong to the scaler: scale, unscale_, step, update. Which are there, and in "
        "which order?",
        "The norm that clipping compares with max_grad_norm must be that of the true gradients.",
        "What must happen to gradients before the next backward pass adds to them?",
    )
)
def amp_step(step: AmpStep | None) -> str | None:
    """Check one FP16 training step: `step(model, x, y, optimizer, scaler, max_grad_norm)`.

    The loss is the mean squared error. The step is run on a small network on the CPU: on ordinary
    data, on data that overflows, and repeatedly.
    """
    return first_problem(
        lambda: _ordinary_step(step), lambda: _overflowing_step(step), lambda: _second_step(step)
    )


def _ordinary_step(step: AmpStep) -> str | None:
    toy = make_toy(LEARNING_RATE, LOSS_SCALE)
    dtypes = []
    toy.model[0].register_forward_hook(lambda _module, _inputs, out: dtypes.append(out.dtype))
    before = toy.weights()
    step(toy.model, toy.x, toy.y, toy.optimizer, toy.scaler, MAX_GRAD_NORM)
    moved = toy.weights() - before
    if not dtypes:
        return "the function never called the model."
    if dtypes[0] != torch.float16:
        return f"the first layer gave {dtypes[0]}: is autocast on, and for which dtype?"
    if moved.norm() == 0:
        return "an ordinary step did not change the weights."
    expected = LEARNING_RATE * clipped(gradient(before, toy.x, toy.y), MAX_GRAD_NORM)
    ratio = (moved.norm() / expected.norm()).item()
    if ratio < 0.01:
        return (
            "the step is about as many times too short as the loss scale is large. The scaled "
            "gradients were clipped, and the scale was taken out of them afterwards."
        )
    if ratio > 1.5:
        return (
            "the step is longer than max_grad_norm allows: are the gradients clipped, and after "
            "the scale is taken out?"
        )
    return None


def _overflowing_step(step: AmpStep) -> str | None:
    toy = make_toy(LEARNING_RATE, LOSS_SCALE)
    before = toy.weights()
    step(toy.model, toy.x, toy.y * 1e6, toy.optimizer, toy.scaler, MAX_GRAD_NORM)
    if not torch.equal(toy.weights(), before):
        return (
            "on an overflow the weights changed. The optimizer must step through the scaler, "
            "which skips such a step."
        )
    if toy.scaler.get_scale() >= LOSS_SCALE:
        return (
            "after an overflow the loss scale is as high as before, so the next step overflows "
            "too: who updates it?"
        )
    return None


def _second_step(step: AmpStep) -> str | None:
    toy = make_toy(LEARNING_RATE, loss_scale=1.0)  # a larger one would hide left-over gradients
    step(toy.model, toy.x, toy.y, toy.optimizer, toy.scaler, 1e9)
    middle = toy.weights()
    left_over = any(p.grad is not None for p in toy.model.parameters())
    step(toy.model, toy.x, toy.y, toy.optimizer, toy.scaler, 1e9)
    expected = LEARNING_RATE * gradient(middle, toy.x, toy.y)
    error = (middle - toy.weights() - expected).norm()
    if left_over and error > 0.3 * expected.norm():
        return "the second step also contains the first one's gradients: they were never cleared."
    return None
