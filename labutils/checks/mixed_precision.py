"""Exercises of notebook 01: what FP16 holds, bytes per parameter, a control, one FP16 step."""

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


@exercise(
    hints=(
        "Two thresholds matter at the small end: where full precision ends, and where everything "
        "ends.",
        "min_normal is not the smallest number. Look at min_subnormal, and at what rounding does "
        "to half of it.",
        "Round to nearest: what lies below half of the smallest number becomes 0, what lies above "
        "does not.",
    )
)
def fp16_survivors(values: Sequence[float], answer: Sequence[float] | None) -> str | None:
    """Check which of `values` are neither 0 nor inf once stored in FP16, and print the verdict."""
    if not isinstance(answer, (list, tuple, set)) or not set(answer) <= set(values):
        return "the answer is a list of some of the given values."
    stored = torch.tensor(values, dtype=torch.float64).to(torch.float16)
    survives = (stored != 0) & stored.isfinite()
    right = {value for value, ok in zip(values, survives, strict=True) if ok}
    missing = right - set(answer)
    extra = set(answer) - right
    if missing and min(missing) < torch.finfo(torch.float16).smallest_normal:
        return (
            "a small value is given up too early. What ends at 6.1e-05 is full precision, not "
            "the numbers."
        )
    if missing:
        return "a value that is well inside the range is missing."
    if extra and max(extra) > 1:
        return (
            "a value is beyond the largest FP16 number. BF16 would hold it: same size, other "
            "split of bits."
        )
    if extra:
        return (
            "a small value is closer to 0 than to the smallest FP16 number, so rounding takes it "
            "to 0."
        )
    return None


@exercise(
    hints=(
        "List what a step needs beside activations: weights, gradients, what the optimizer "
        "remembers. In which dtype?",
        "Section 4 prints the dtype of each of them under autocast. How many bytes has one number "
        "of that dtype?",
        "AdamW remembers two numbers per parameter: a mean and a mean of squares. Momentum is a "
        "mean only.",
    )
)
def bytes_per_parameter(answer: float | None) -> str | None:
    """Check the bytes per parameter that SGD with momentum under autocast keeps for any batch.

    Weights, gradients and optimizer state count; the 16-bit copies that live during a step do not.
    """
    right = sum(torch.finfo(dtype).bits // 8 for dtype in _static_dtypes())
    misconceptions = {
        right + 4: "that is AdamW. How many numbers does momentum remember?",
        right // 2: (
            "that is everything halved, as the saying goes. Section 4 shows the dtypes under "
            "autocast."
        ),
        right - 4: (
            "one float32 number per parameter is missing: weight, gradient, or what momentum "
            "remembers?"
        ),
        right - 2: (
            "one tensor per parameter is counted in 16 bits. Which one did you expect to shrink?"
        ),
        right + 2: "the 16-bit copies exist, but only during a step; count what stays.",
    }
    if answer == right:
        return None
    return misconceptions.get(
        answer, "give one number: for each thing that exists per parameter, its bytes, summed."
    )


def _static_dtypes() -> list[torch.dtype]:
    """Return the dtypes of weight, gradient and momentum after a real step under autocast."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[layer.weight]["momentum_buffer"]
    return [layer.weight.dtype, layer.weight.grad.dtype, momentum.dtype]


@exercise(
    hints=(
        "If two runs differ in one thing only, this thing is the cause of what differs.",
        "Compare two runs key by key. How many keys differ?",
        "The seed counts, too: two seeds begin with other weights.",
    )
)
def control_runs(
    runs: Mapping[str, Mapping[str, str | float]], answer: Sequence[str] | None
) -> str | None:
    """Check which two of `runs` show the effect of 16-bit weights alone.

    `runs` is {letter: {what is set: its value}}, "weights" among it; the answer is two letters.
    """
    is_pair = isinstance(answer, (list, tuple, set)) and len(set(answer)) == 2
    if not is_pair or not set(answer) <= set(runs):
        return f"the answer is a pair of the letters {', '.join(runs)}."
    first, second = (runs[letter] for letter in answer)
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
