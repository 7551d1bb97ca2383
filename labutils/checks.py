"""Check an exercise: "right", or which misconception the answer shows. Hints come in steps; no answer is ever printed.

An exercise left at None says that it is open and passes, so that Run All goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

HINTS = {
    "fp16_survivors": (
        "Two thresholds matter at the small end: where full precision ends, and where everything ends.",
        "min_normal is not the smallest number. Look at min_subnormal, and at what rounding does to half of it.",
        "Round to nearest: what lies below half of the smallest number becomes 0, what lies above does not.",
    ),
    "bytes_per_parameter": (
        "List what a step needs beside activations: weights, gradients, what the optimizer remembers. In which dtype?",
        "Section 4 prints the dtype of each of them under autocast. How many bytes has one number of that dtype?",
        "AdamW remembers two numbers per parameter: a mean and a mean of squares. Momentum is a mean only.",
    ),
    "amp_step": (
        "Four calls belong to the scaler: scale, unscale_, step, update. Which are there, and in which order?",
        "The norm that clipping compares with max_grad_norm must be that of the true gradients.",
        "What must happen to gradients before the next backward pass adds to them?",
    ),
}


def hint(exercise: str, number: int = 1) -> None:
    """Print hint `number` (from 1) of an exercise; they grow more explicit."""
    if exercise not in HINTS:
        print(f"There is no exercise {exercise!r}; there are: {', '.join(HINTS)}")
        return
    hints = HINTS[exercise]
    number = max(1, min(int(number), len(hints)))
    print(f"Hint {number} of {len(hints)}: {hints[number - 1]}")


def _report(answer: object, problem_of: Callable[[], str | None]) -> None:
    if answer is None:
        print("Open: replace None by your answer and run the cell again.")
        return
    try:
        problem = problem_of()
    except Exception as error:  # whatever the reader's answer raises is the verdict
        problem = f"it raised {type(error).__name__}: {error}"
    print("Right." if problem is None else f"Not yet: {problem}")


def fp16_survivors(values: Sequence[float], answer: Sequence[float] | None) -> None:
    """Check which of `values` are neither 0 nor inf once stored in FP16, and print the verdict."""
    _report(answer, lambda: _survivors_problem(values, answer))


def _survivors_problem(values: Sequence[float], answer: Sequence[float]) -> str | None:
    if not isinstance(answer, (list, tuple, set)) or not set(answer) <= set(values):
        return "the answer is a list of some of the given values."
    stored = torch.tensor(values, dtype=torch.float64).to(torch.float16)
    right = {v for v, s in zip(values, stored, strict=True) if s != 0 and s.isfinite()}
    missing, extra = right - set(answer), set(answer) - right
    if missing and min(missing) < torch.finfo(torch.float16).smallest_normal:
        return "a small value is given up too early. What ends at 6.1e-05 is full precision, not the numbers."
    if missing:
        return "a value that is well inside the range is missing."
    if extra and max(extra) > 1:
        return "a value is beyond the largest FP16 number. BF16 would hold it: same size, other split of bits."
    if extra:
        return "a small value is closer to 0 than to the smallest FP16 number, so rounding takes it to 0."
    return None


def bytes_per_parameter(answer: float | None) -> None:
    """Check the bytes per parameter that training with SGD and momentum under autocast keeps, however small the batch.

    Weights, gradients and optimizer state count; the 16-bit copies that live during a step do not.
    """
    _report(answer, lambda: _bytes_problem(answer))


def _bytes_problem(answer: float) -> str | None:
    right = sum(torch.finfo(dtype).bits // 8 for dtype in _static_dtypes())
    misconceptions = {
        right + 4: "that is AdamW. How many numbers does momentum remember?",
        right // 2: "that is everything halved, as the saying goes. Section 4 shows the dtypes under autocast.",
        right - 4: "one float32 number per parameter is missing: weight, gradient, or what momentum remembers?",
        right - 2: "one tensor per parameter is counted in 16 bits. Which one did you expect to shrink?",
        right + 2: "the 16-bit copies exist, but only during a step; count what stays.",
    }
    if answer == right:
        return None
    return misconceptions.get(answer, "give one number: for each thing that exists per parameter, its bytes, summed.")


def _static_dtypes() -> list[torch.dtype]:
    """Return the dtypes of weight, gradient and momentum of one parameter after a real step under autocast."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return [t.dtype for t in (layer.weight, layer.weight.grad, optimizer.state[layer.weight]["momentum_buffer"])]


AmpStep = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer, torch.amp.GradScaler, float], object]


def amp_step(step: AmpStep | None) -> None:
    """Check `step(model, x, y, optimizer, scaler, max_grad_norm)`: one FP16 training step with mean squared error.

    It is run on a small network on the CPU: on ordinary data, on data that overflows, and repeatedly.
    """
    _report(step, lambda: _amp_problem(step))


def _amp_problem(step: AmpStep) -> str | None:
    max_grad_norm, rate, start_scale = 0.05, 1.0, 1024.0
    model, x, y, optimizer, scaler = _toy(rate, start_scale)
    dtypes = []
    model[0].register_forward_hook(lambda _m, _i, out: dtypes.append(out.dtype))
    before = _flat(model)
    step(model, x, y, optimizer, scaler, max_grad_norm)
    moved = _flat(model) - before
    if not dtypes:
        return "the function never called the model."
    if dtypes[0] != torch.float16:
        return f"the first layer gave {dtypes[0]}: is autocast on, and for which dtype?"
    if moved.norm() == 0:
        return "an ordinary step did not change the weights."
    expected = _flat_gradient(x, y)
    expected = -rate * expected * min(1.0, max_grad_norm / expected.norm())
    ratio = (moved.norm() / expected.norm()).item()
    if ratio < 0.01:
        return (
            "the step is about as many times too short as the loss scale is large. The scaled gradients were clipped, "
            "and the scale was taken out of them afterwards."
        )
    if ratio > 1.5:
        return (
            "the step is longer than max_grad_norm allows: are the gradients clipped, and after the scale is taken out?"
        )
    model, x, y, optimizer, scaler = _toy(rate, start_scale)
    before = _flat(model)
    step(model, x, y * 1e6, optimizer, scaler, max_grad_norm)
    if not torch.equal(_flat(model), before):
        return (
            "on an overflow the weights changed. The optimizer must step through the scaler, which skips such a step."
        )
    if scaler.get_scale() >= start_scale:
        return "after an overflow the loss scale is as high as before, so the next step overflows too: who updates it?"
    model, x, y, optimizer, scaler = _toy(rate, 1.0)  # a larger scale would hide left-over, unscaled gradients
    step(model, x, y, optimizer, scaler, 1e9)
    twice = _flat(model)
    left_over = [p.grad for p in model.parameters() if p.grad is not None]
    step(model, x, y, optimizer, scaler, 1e9)
    reference = _fresh_step(twice, x, y, rate)
    if left_over and (_flat(model) - twice - reference).norm() > 0.3 * reference.norm():
        return "the second step also contains the first one's gradients: they were never cleared."
    return None


def _toy(rate: float, scale: float):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    x, y = torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    return model, x, y, torch.optim.SGD(model.parameters(), lr=rate), scaler


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def _gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _flat_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _gradient(_toy(1.0, 1.0)[0], x, y)


def _fresh_step(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, rate: float) -> torch.Tensor:
    model = _toy(1.0, 1.0)[0]
    nn.utils.vector_to_parameters(weights, model.parameters())
    return -rate * _gradient(model, x, y)
