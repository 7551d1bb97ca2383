"""Exercise of further/scaler: a training step that is wrong in exactly one way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from labutils.checks.core import exercise
from labutils.checks.toy import Toy, clipped, gradient, make_toy

AmpStep = Callable[
    [nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer, torch.amp.GradScaler, float],
    object,
]
LEARNING_RATE, LOSS_SCALE, MAX_GRAD_NORM, NO_LIMIT = 1.0, 1024.0, 0.05, 1e9
# Relative error of an FP16 step on the toy network: rounding gives less than a hundredth.
TOLERANCE = 0.05
CLIPPING = "clipping"


@exercise(
    hints=(
        "Which line of the step decides how long it is? All other lines must keep their effect.",
        "An inf must still be found, the scale must still fall, and the gradients must still be "
        "cleared. What may change is the norm that clipping sees, or whether it clips.",
        "Look at the table of orders above: some of its rows have a wrong length and nothing "
        "else wrong.",
    )
)
def break_clipping(step: AmpStep | None) -> str | None:
    """Check a step that is wrong on purpose: of five checks exactly *clipping* may fail.

    `step(model, x, y, optimizer, scaler, max_grad_norm)` is run on a small network on the CPU.
    """
    failed = [name for name, passes in CHECKS.items() if not passes(step)]
    others = ", ".join(name for name in failed if name != CLIPPING)
    if not failed:
        return "all five checks pass, so this step is still right."
    if CLIPPING not in failed:
        return f"the check of clipping passes. These fail: {others}."
    if others:
        return f"clipping fails, but it is not alone. These fail too: {others}."
    return None


def _multiplies_in_fp16(step: AmpStep) -> bool:
    toy, dtypes = make_toy(LEARNING_RATE, LOSS_SCALE), []
    toy.model[0].register_forward_hook(lambda _module, _inputs, out: dtypes.append(out.dtype))
    _take(step, toy, MAX_GRAD_NORM)
    return dtypes[:1] == [torch.float16]


def _moves(step: AmpStep) -> bool:
    toy = make_toy(LEARNING_RATE, LOSS_SCALE)
    before = toy.weights()
    _take(step, toy, MAX_GRAD_NORM)
    return not torch.equal(toy.weights(), before)


def _has_the_clipped_length(step: AmpStep) -> bool:
    toy = make_toy(LEARNING_RATE, LOSS_SCALE)
    before = toy.weights()
    _take(step, toy, MAX_GRAD_NORM)
    expected = LEARNING_RATE * clipped(gradient(before, toy.x, toy.y), MAX_GRAD_NORM)
    # a step that is too short obeys the limit and is wrong all the same
    length = (toy.weights() - before).norm()
    return bool((length - expected.norm()).abs() < TOLERANCE * expected.norm())


def _skips_an_overflow(step: AmpStep) -> bool:
    toy = make_toy(LEARNING_RATE, LOSS_SCALE)
    before = toy.weights()
    step(toy.model, toy.x, toy.y * 1e6, toy.optimizer, toy.scaler, MAX_GRAD_NORM)
    is_lower = toy.scaler.get_scale() < LOSS_SCALE
    return is_lower and torch.equal(toy.weights(), before)


def _clears_gradients(step: AmpStep) -> bool:
    toy = make_toy(LEARNING_RATE)  # without a loss scale, which would hide old gradients
    _take(step, toy, NO_LIMIT)
    seen: list[torch.Tensor] = []
    weight = toy.model[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    expected = gradient(toy.weights(), toy.x, toy.y)[: weight.numel()]
    _take(step, toy, NO_LIMIT)
    if not seen:
        return False
    error = (seen[-1].flatten() - expected).norm()
    return bool(error < TOLERANCE * expected.norm())


def _take(step: AmpStep, toy: Toy, max_grad_norm: float) -> None:
    step(toy.model, toy.x, toy.y, toy.optimizer, toy.scaler, max_grad_norm)


CHECKS: dict[str, Callable[[AmpStep], bool]] = {
    "products in FP16": _multiplies_in_fp16,
    "the weights move": _moves,
    CLIPPING: _has_the_clipped_length,
    "an overflow is skipped": _skips_an_overflow,
    "old gradients are cleared": _clears_gradients,
}
