"""Exercise of notebook 04 that is code: a training loop whose floor of memory must stay flat."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from labutils.course.exercises.core import Problem, exercise
from labutils.memory import snapshot

N_STEPS, ROWS = 8, 64
FIRST_COMPARED = 2  # the first two steps make gradients and what a loop keeps of one step
# A step may keep a number or two as tensors: mse_loss keeps a storage of all rows for its mean.
# Right loops add 0.1 to 0.9 KiB a step, up to 0.4 of it in Python; whole outputs 128 KiB and more.
FLAT_KIB = 2
Training = Callable[..., Any]  # (model, batches, held_out, optimizer)


def try_training(training: Training, alive_bytes: Callable[[], int]) -> tuple:
    """Run a training loop on a small network, the same each time.

    Returns its result, `alive_bytes()` after each optimizer step, and the model's first layer.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *batches, held_out = [(torch.randn(ROWS, 16), torch.randn(ROWS, 1)) for _ in range(N_STEPS + 1)]
    held_out[0].mul_(2)  # the largest output is one of theirs
    floors = []
    optimizer.register_step_post_hook(lambda *_: floors.append(alive_bytes()))
    return training(model, batches, held_out, optimizer), floors, model[0]


def without_leak(model, batches, held_out, optimizer):
    """Train as the leaking loop of the notebook does, and keep numbers only."""
    losses, curve, largest = [], [], []
    model[0].register_forward_hook(lambda *three: largest.append(three[2].max().item()))
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        curve.append(nn.functional.mse_loss(model(held_out[0]), held_out[1]).item())
    return losses, curve, [max(largest)]


def wrong_result(result: Any) -> Problem:
    """Compare losses, held-out losses and the largest output with those of a loop that is right."""
    if not isinstance(result, tuple | list) or len(result) != 3:
        return "return three things: the losses, the held-out losses and the largest output."
    right = try_training(without_leak, int)[0]  # int() is 0: no memory is asked for here
    names = "losses", "held-out losses", "largest output of all batches, and of held-out data,"
    losses, curve, largest = result
    for name, values, expected in zip(names, (losses, curve, [largest]), right, strict=True):
        numbers = [float(value) for value in values]
        if len(numbers) != len(expected):
            return f"the {name} are to be {len(expected)}, one for each step."
        # a loop may compute in float64, or with NumPy: its numbers are others in the last digits
        if not np.allclose(numbers, expected, rtol=0, atol=1e-5):
            return f"the {name} are others than before. A repair must not change the training."
    return None


@exercise(
    "List all that is still referenced when a step is over: three lists. What do they hold?",
    "A tensor with a graph keeps what its graph keeps. Which of the three losses and outputs "
    "never goes backward?",
    "A Python number keeps no tensor. Where can one number take the place of a tensor? And who "
    "takes the hook away?",
)
def repair(training: Training) -> Problem:
    """Check that a training loop no longer leaks.

    The function is `training(model, batches, held_out, optimizer)`, with batches of (x, y). It
    returns the loss of each step, the held-out loss after each step, and the largest output of
    `model[0]`. It is run on a small network. The bytes alive after each optimizer step must not
    rise, neither in tensors nor in Python's own memory, and the results must be those of the
    leaking loop.
    """
    with snapshot.record() as recorded:
        result, floors, first_layer = try_training(training, lambda: recorded.alive_bytes)
    if problem := wrong_result(result):
        return problem
    if len(floors) != N_STEPS:
        return f"the optimizer stepped {len(floors)} times; there are {N_STEPS} batches."
    losses, curve, largest = result
    tracemalloc.start()  # in a second run: the recorder itself takes Python's memory
    try:
        in_python = try_training(training, lambda: tracemalloc.get_traced_memory()[0])[1]
    finally:
        tracemalloc.stop()
    in_tensors, in_python = (
        np.diff(each[FIRST_COMPARED:]).mean() / 1024 for each in (floors, in_python)
    )
    # the sum: a list of numbers, or a NumPy copy, takes as much as the tensor that it stands for
    rise = in_tensors + in_python
    if rise > FLAT_KIB:
        why = "Some list holds tensors, whole or with a graph. Which number of each is needed?"
        if in_python > in_tensors:
            why = (
                "Lists of numbers, or NumPy arrays, hold in Python's memory what the tensors held. "
                "Which number of each is needed?"
            )
        elif getattr(curve[-1], "grad_fn", None):
            why = (
                "The held-out losses that you return still have a graph, and no backward pass "
                "frees what it keeps."
            )
        return (
            f"the floor rises by {rise:,.1f} KiB a step. {why} `detach` lets go of a "
            "graph; the tensor itself stays. `del` removes a name, and garbage collection frees "
            "what nobody holds: a list holds these."
        )
    if getattr(losses[-1], "grad_fn", None) or getattr(largest, "grad_fn", None):
        return (
            "the floor is flat: backward has freed what the graphs kept. But what you return still "
            "holds its graph: each loss, or the largest output. Keep numbers."
        )
    if first_layer._forward_hooks:
        return (
            "the floor is flat. But the hook is still registered after the training: a second "
            "training would add another. `register_forward_hook` returns a handle with `remove()`."
        )
    return None
