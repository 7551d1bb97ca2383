"""Runs of a reader's training step on a small network, and what each misconception would do there.

A step gets a window of micro-batches (x, y). A step on one batch is a window of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Rows = tuple[torch.Tensor, torch.Tensor]  # x (n, 4) and y (n, 1)
Step = Callable[[nn.Module, list[Rows], torch.optim.Optimizer, torch.amp.GradScaler, float], object]
RATE, LOSS_SCALE = 0.1, 256.0
WINDOW_ROWS = (2, 12, 1, 6, 9, 4, 3)  # unequal, so that a mean of means differs from the mean
NO_CLIPPING = 1e9  # a max_grad_norm that no gradient reaches
TOLERANCE = 0.03  # relative; FP16 products are off by some 0.001


@dataclass(frozen=True)
class Update:
    """What one optimizer step did: the weights before, the gradient used, the rows seen so far."""

    weights: torch.Tensor
    gradient: torch.Tensor
    rows_seen: int


class Toy:
    """A network 4 → 8 → 1 without biases, SGD and a gradient scaler; it notes what they do."""

    def __init__(self, loss_scale: float = LOSS_SCALE) -> None:
        generator = torch.Generator().manual_seed(0)
        first, second = nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False)
        for layer in (first, second):
            nn.init.normal_(layer.weight, std=0.5, generator=generator)
        self.model = nn.Sequential(first, nn.Tanh(), second)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
        self.rows: list[int] = []  # of each forward pass
        self.dtypes: list[torch.dtype] = []
        self.updates: list[Update] = []
        self._before = self.weights()
        first.register_forward_hook(self._note_forward)
        self.optimizer.register_step_post_hook(self._note_update)

    def weights(self) -> torch.Tensor:
        """Return a copy of all weights as one vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def take(self, step: Step, window: list[Rows], max_grad_norm: float = NO_CLIPPING) -> Toy:
        step(self.model, window, self.optimizer, self.scaler, max_grad_norm)
        return self

    def _note_forward(self, _: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.rows.append(len(inputs[0]))
        self.dtypes.append(output.dtype)

    def _note_update(self, *_: object) -> None:
        before, self._before = self._before, self.weights()
        gradient = (before - self._before) / RATE
        self.updates.append(Update(before, gradient, sum(self.rows)))


def make_batches(sizes: Sequence[int]) -> list[Rows]:
    """Return batches of random rows, the same each time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 4, generator=generator)
    y = torch.randn(sum(sizes), 1, generator=generator)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def mean_loss(weights: torch.Tensor, batches: Sequence[Rows]) -> torch.Tensor:
    """Return the float32 mean squared error over all rows, for a toy with these weights."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    first, second = weights.split((32, 8))
    output = torch.tanh(x @ first.view(8, 4).T) @ second.view(8, 1)
    return nn.functional.mse_loss(output, y)


mean_gradient = torch.func.grad(mean_loss)  # by the weights, as one vector


def clipped(vector: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the vector, shortened to `max_norm` if it is longer."""
    return vector * min(1.0, max_norm / vector.norm().item())


def clipped_each_time(weights: torch.Tensor, window: list[Rows], max_norm: float) -> torch.Tensor:
    """Return the window's gradient if it is clipped after every micro-batch."""
    total, n_rows = torch.zeros_like(weights), sum(len(y) for _, y in window)
    for batch in window:
        part = mean_gradient(weights, [batch]) * len(batch[1]) / n_rows
        total = clipped(total + part, max_norm)
    return total


def wrong_sums(
    weights: torch.Tensor, window: list[Rows], grad_accum_steps: int
) -> dict[str, torch.Tensor]:
    """Return {misconception: the gradient it gives}."""
    rows = [len(y) for _, y in window]
    means = [mean_gradient(weights, [batch]) for batch in window]
    sums = [n * mean for n, mean in zip(rows, means, strict=True)]
    return {
        "the micro-batches' means were added: the gradient grows with their number.": sum(means),
        "a mean of means: a row in a small micro-batch weighs more than one in a large "
        f"(rows per micro-batch: {rows}).": sum(means) / len(means),
        "a shorter last window was divided as if it were full.": sum(means) / grad_accum_steps,
        "sums were added and never divided.": sum(sums),
        "only the last micro-batch arrived: what the others left in .grad was shrunk or cleared.": (
            sums[-1] / sum(rows)
        ),
        "only the last micro-batch arrived, with its own mean.": means[-1],
    }


def is_near(gradient: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((gradient - right).norm() < TOLERANCE * right.norm())


def diagnose(
    gradient: torch.Tensor,
    right: torch.Tensor,
    misconceptions: Mapping[str, torch.Tensor],
    otherwise: str,
) -> str | None:
    """Return the misconception that gives this gradient; None if it is right."""
    if is_near(gradient, right):
        return None
    for misconception, vector in misconceptions.items():
        if is_near(gradient, vector):
            return misconception
    return otherwise


# ---- an FP16 step: each probe returns what is wrong


def products(step: Step, window: list[Rows]) -> str | None:
    toy = Toy().take(step, window)
    if not toy.rows:
        return "the function never called the model."
    if max(toy.rows) > max(len(y) for _, y in window):
        return (
            "the window went through the model at once: right, but it would need the memory of "
            "the full batch."
        )
    if toy.dtypes[0] != torch.float16:
        return f"the first layer gave {toy.dtypes[0]}: is autocast on, and for which dtype?"
    return None


def movement(step: Step, window: list[Rows]) -> str | None:
    n_updates = len(Toy().take(step, window).updates)
    return None if n_updates == 1 else f"the optimizer stepped {n_updates} times, and not once."


def gradient_sum(step: Step, window: list[Rows]) -> str | None:
    [update] = Toy().take(step, window).updates
    right = mean_gradient(update.weights, window)
    ratio = (update.gradient.norm() / right.norm()).item()
    if ratio > 0.3 * LOSS_SCALE:
        return (
            "the step is about as many times too long as the loss scale is large: is the scale "
            "ever taken out?"
        )
    if ratio < 10 / LOSS_SCALE:
        return "the step is far too short: was the scale taken out more than once?"
    sums = wrong_sums(update.weights, window, len(window))
    otherwise = "the step is not that of the mean over all rows."
    return diagnose(update.gradient, right, sums, otherwise)


def clipping(step: Step, window: list[Rows]) -> str | None:
    toy = Toy()
    before = toy.weights()
    right = mean_gradient(before, window)
    max_norm = 0.3 * right.norm().item()
    gradient = (before - toy.take(step, window, max_norm).weights()) / RATE
    length = gradient.norm().item()
    if length < 0.1 * max_norm:
        return (
            "with clipping the step is far too short: were scaled gradients compared with "
            "max_grad_norm, and the scale taken out afterwards?"
        )
    if length > 1.1 * max_norm:
        return (
            "the step is longer than max_grad_norm allows: are all gradients clipped, and after "
            "the scale is taken out?"
        )
    otherwise = "clipped, but not the whole gradient to max_grad_norm: were parts of it clipped?"
    return diagnose(gradient, clipped(right, max_norm), {}, otherwise)


def overflow(step: Step, window: list[Rows]) -> str | None:
    (x, y), *others = window
    toy = Toy().take(step, [(x, 1e6 * y), *others])
    if toy.updates:
        return (
            "a batch overflowed, and the weights changed. The whole step must be skipped: the "
            "optimizer must step through the scaler."
        )
    scale = toy.scaler.get_scale()
    if scale != LOSS_SCALE / 2:
        return (
            f"after an overflow the scale went from {LOSS_SCALE:g} to {scale:g}, and not to half "
            "of it: who updates it, and is it updated once?"
        )
    return None


def clearing(step: Step, window: list[Rows]) -> str | None:
    toy = Toy(loss_scale=1.0).take(step, window)  # a larger scale would hide left-over gradients
    right = mean_gradient(toy.weights(), window)
    gradients: list[torch.Tensor] = []
    weight = toy.model[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.flatten().clone()))
    toy.take(step, window)
    if is_near(gradients[-1], right[: weight.numel()]):
        return None
    return "the second step also contains the first one's gradients: they were never cleared."


def first_problem(step: Step, window: list[Rows]) -> str | None:
    """Return what the first probe finds that finds anything."""
    for probe in (products, movement, gradient_sum, clipping, overflow, clearing):
        if problem := probe(step, window):
            return problem
    return None


def failures(step: Callable[..., object]) -> list[str]:
    """Return which of five checks `step(model, x, y, …)` fails: a step on one batch."""
    probes = {
        "products in FP16": products,
        "the weights move": movement,
        "clipping": clipping,
        "an overflow is skipped": overflow,
        "old gradients are cleared": clearing,
    }
    window = make_batches([16])
    return [name for name, probe in probes.items() if probe(on_one_batch(step), window)]


def on_one_batch(step: Callable[..., object]) -> Step:
    """Return a step on one batch, `step(model, x, y, …)`, as a step over a window of one."""
    return lambda model, window, *others: step(model, *window[0], *others)
