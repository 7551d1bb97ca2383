"""Try a reader's training loop: does the floor of its memory stay flat, with the same losses?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from labutils.memory import snapshot

N_STEPS, ROWS, WIDTH = 8, 64, 256
FIRST_COMPARED = 2  # the first two steps make gradients and what a loop keeps of one step
# A step may keep a number or two as tensors: mse_loss keeps a storage of all rows for its mean.
FLAT_BYTES = 16 * ROWS
TOLERANCE = 1e-5
Training = Callable[[nn.Module, list, tuple, torch.optim.Optimizer], Any]


class Trial:
    """What a training returns, the model after it, and the bytes alive after each step."""

    def __init__(self, training: Training) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        *batches, held_out = [(torch.randn(ROWS, 16), torch.randn(ROWS, 1)) for _ in range(9)]
        self.floors: list[int] = []
        with snapshot.record() as recorded:

            def note_floor(*_: object) -> None:
                self.floors.append(sum(n_bytes for _, n_bytes, _ in recorded.events))

            optimizer.register_step_post_hook(note_floor)
            self.result = training(self.model, batches, held_out, optimizer)


def try_training(training: Training) -> str | None:
    """Return what is wrong with a repaired training loop; None if it is right."""
    trial = Trial(training)
    if problem := _wrong_result(trial.result, Trial(without_leak).result):
        return problem
    n_steps = len(trial.floors)
    if n_steps != N_STEPS:
        return f"the optimizer stepped {n_steps} times; there are {N_STEPS} batches."
    losses, curve, _ = trial.result
    growth = (trial.floors[-1] - trial.floors[FIRST_COMPARED]) / (N_STEPS - 1 - FIRST_COMPARED)
    if growth > FLAT_BYTES:
        why = "Some list holds whole tensors. Which number of each is needed?"
        if _has_graph(curve):
            why = (
                "The held-out losses that you return still have a graph, and no backward pass "
                "frees what it keeps."
            )
        return (
            f"the floor rises by {growth / 1024:,.1f} KiB a step. {why} `detach` lets go of a "
            "graph; the tensor itself stays. `del` removes a name, and garbage collection frees "
            "what nobody holds: a list holds these."
        )
    if _has_graph(losses):
        return (
            "the floor is flat: backward has freed what the graphs kept. But each loss that you "
            "return still holds its graph. Keep numbers."
        )
    if trial.model[0]._forward_hooks:
        return (
            "the floor is flat. But the hook is still registered after the training: a second "
            "training would add another. `register_forward_hook` returns a handle with `remove()`."
        )
    return None


def without_leak(model, batches, held_out, optimizer):
    losses, curve, largest = [], [], []
    hook = model[0].register_forward_hook(lambda *three: largest.append(three[2].max().item()))
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            curve.append(nn.functional.mse_loss(model(held_out[0]), held_out[1]).item())
    hook.remove()
    return losses, curve, max(largest)


def _wrong_result(result: Any, right: tuple) -> str | None:
    """Compare losses, held-out losses and the largest output."""
    if not isinstance(result, tuple) or len(result) != 3:
        return "return three things: the losses, the held-out losses and the largest output."
    for name, values, expected in zip(("losses", "held-out losses"), result, right, strict=False):
        if not isinstance(values, Sequence | torch.Tensor) or len(values) != N_STEPS:
            return f"the {name} are to be {N_STEPS}, one for each step."
        if not _near(values, expected):
            return f"the {name} are others than before. A repair must not change the training."
    if not _near([result[2]], [right[2]]):
        return "the largest output is another one: it is that of all batches and of held-out data."
    return None


def _near(values: Sequence[Any], expected: Sequence[float]) -> bool:
    numbers = torch.tensor([float(value) for value in values])
    return torch.allclose(numbers, torch.tensor(expected), rtol=0, atol=TOLERANCE)


def _has_graph(values: Sequence[Any]) -> bool:
    return any(getattr(value, "grad_fn", None) is not None for value in values)
