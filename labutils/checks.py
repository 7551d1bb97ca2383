"""Check an exercise: "right", or which misconception the answer shows. Hints come in steps; no
answer is ever printed.

An exercise left at None says that it is open and passes, so that Run All goes through.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    "amp_window": (
        "Sort the calls in two groups: for every micro-batch, and once, when all micro-batches have passed.",
        "A sum of squared errors can be divided by any number you like. Which number gives the mean over all rows?",
        "unscale_ divides all that is in .grad. What is there after the second micro-batch, if the first was unscaled?",
    ),
    "accumulation_epoch": (
        "Write down after which micro-batches the optimizer steps, for 7 micro-batches and windows of 3.",
        "Each row of a window must get the same weight. How many rows are there, and when do you know it?",
        "Collect a window first, whatever its length, then go through it. The loss to report is that of the window.",
    ),
    "floor_gib": (
        "Accumulation shrinks what grows with the batch. List what does not.",
        "Section 3 shows the categories at the peak. Which of them are alive between two micro-batches?",
        "Bytes per parameter, times parameters, and a GiB is 2³⁰ bytes.",
    ),
    "beta2": (
        "What is remembered of a squared gradient after k steps is the decay rate to the power of k.",
        "After how many steps is half of it left? How many tokens are that before, and how many after the change?",
        "One step with the larger batch must forget as much as the steps it replaces did together.",
    ),
    "block_runs": (
        "Count the forward pass first. Then ask of each block: are the results inside it there when backward arrives?",
        "A unit keeps its input only. What must run before backward can go through the unit's first block?",
        "Does the unit in which backward begins differ from the others, or is it treated as they are?",
    ),
    "best_segments": (
        "Two things are alive together: all the segments' inputs, and the layers of one segment.",
        "Count in inputs: n segments keep n of them. What does one segment of 1/n of the layers keep, in inputs?",
        "Write the sum as a function of n, and try n smaller and larger until it no longer falls.",
    ),
    "placement": (
        "No placement brings the largest segment below the largest layer. Can you reach that bound?",
        "A segment smaller than the largest one is free to grow; each further segment costs one input.",
        "Which layers should share a segment with the huge one?",
    ),
    "nvidia_smi": (
        "Which of the numbers does the driver know of? It has never heard of tensors.",
        "The driver has handed out segments, and the process itself took something before its first tensor.",
        "1 GiB is 1024 MiB.",
    ),
    "leak": (
        "Whose results grow in number from step to step? Two lines' do.",
        "`augment` has the highest peak, but what of it is alive at the end?",
        "Backward frees what a graph keeps. Which function builds a graph through which nothing ever goes backward?",
    ),
    "largest_batch": (
        "Draw both points. Does the line through them go through zero?",
        "How much does one more sequence cost, and what is left at zero sequences?",
        "A batch is a whole number, and it must not exceed the budget.",
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
    """Check the bytes per parameter that training with SGD and momentum under autocast keeps,
    however small the batch.

    Weights, gradients and optimizer state count; the 16-bit copies that live during a step do not.
    """
    _report(answer, lambda: _bytes_problem(answer))


def _bytes_problem(answer: float) -> str | None:
    right = sum(torch.finfo(dtype).bits // 8 for dtype in _static_dtypes())
    misconceptions = {
        right + 4: "that is AdamW. How many numbers does momentum remember?",
        right
        // 2: "that is everything halved, as the saying goes. Section 4 shows the dtypes under autocast.",
        right
        - 4: "one float32 number per parameter is missing: weight, gradient, or what momentum remembers?",
        right
        - 2: "one tensor per parameter is counted in 16 bits. Which one did you expect to shrink?",
        right + 2: "the 16-bit copies exist, but only during a step; count what stays.",
    }
    if answer == right:
        return None
    return misconceptions.get(
        answer, "give one number: for each thing that exists per parameter, its bytes, summed."
    )


def _static_dtypes() -> list[torch.dtype]:
    """Return the dtypes of weight, gradient and momentum of one parameter after a real step under
    autocast.
    """
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return [
        t.dtype
        for t in (layer.weight, layer.weight.grad, optimizer.state[layer.weight]["momentum_buffer"])
    ]


AmpStep = Callable[
    [nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer, torch.amp.GradScaler, float],
    object,
]


def amp_step(step: AmpStep | None) -> None:
    """Check `step(model, x, y, optimizer, scaler, max_grad_norm)`: one FP16 training step with mean
    squared error.

    It is run on a small network on the CPU: on ordinary data, on data that overflows, and
    repeatedly.
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
        return "the step is longer than max_grad_norm allows: are the gradients clipped, and after the scale is taken out?"
    model, x, y, optimizer, scaler = _toy(rate, start_scale)
    before = _flat(model)
    step(model, x, y * 1e6, optimizer, scaler, max_grad_norm)
    if not torch.equal(_flat(model), before):
        return "on an overflow the weights changed. The optimizer must step through the scaler, which skips such a step."
    if scaler.get_scale() >= start_scale:
        return "after an overflow the loss scale is as high as before, so the next step overflows too: who updates it?"
    model, x, y, optimizer, scaler = _toy(
        rate, 1.0
    )  # a larger scale would hide left-over, unscaled gradients
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


def _fresh_step(
    weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, rate: float
) -> torch.Tensor:
    model = _toy(1.0, 1.0)[0]
    nn.utils.vector_to_parameters(weights, model.parameters())
    return -rate * _gradient(model, x, y)


Rows = tuple[torch.Tensor, torch.Tensor]
AmpWindow = Callable[
    [nn.Module, list[Rows], torch.optim.Optimizer, torch.amp.GradScaler, float], object
]
Epoch = Callable[[nn.Module, list[Rows], torch.optim.Optimizer, int, float], object]
NOT_ACCUMULATED = "the window went through the model at once: right, but it would need the memory of the full batch."
WINDOW_ROWS = (2, 12, 1, 6, 9, 4, 3)  # unequal, so that a mean of means differs from the mean


def _rows(sizes: Sequence[int]) -> list[Rows]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator))
        for n in sizes
    ]


def _wrong_gradients(
    weights: torch.Tensor, window: list[Rows], grad_accum_steps: int
) -> dict[str, torch.Tensor]:
    """Return {"": the gradient of the mean over all rows of a window, misconception:

    The gradient it gives}.
    """
    model = _toy(1.0, 1.0)[0]
    nn.utils.vector_to_parameters(weights, model.parameters())
    sums = [_gradient(model, x, y) * len(y) for x, y in window]
    rows = [len(y) for _, y in window]
    means = [g / n for g, n in zip(sums, rows, strict=True)]
    share = f"(rows per micro-batch: {rows})"
    return {
        "": sum(sums) / sum(rows),
        "the micro-batches' means were added: the gradient grows with their number.": sum(means),
        f"a mean of means: a row in a small micro-batch weighs more than one in a large {share}.": sum(
            means
        )
        / len(means),
        "a shorter last window was divided as if it were full.": sum(means) / grad_accum_steps,
        "sums were added and never divided.": sum(sums),
        "only the last micro-batch arrived: what the others left in .grad was shrunk or cleared.": sums[
            -1
        ]
        / sum(rows),
        "only the last micro-batch arrived, with its own mean.": means[-1],
    }


def _nearest(
    moved: torch.Tensor, candidates: dict[str, torch.Tensor], tolerance: float
) -> str | None:
    """Return the key of the candidate that `moved` equals up to a relative tolerance; None if there
    is none.
    """
    apart = {
        text: ((moved - vector).norm() / vector.norm()).item()
        for text, vector in candidates.items()
    }
    text = min(apart, key=apart.get)
    return text if apart[text] < tolerance else None


def _clipped(gradient: torch.Tensor, max_norm: float) -> torch.Tensor:
    return gradient * min(1.0, max_norm / gradient.norm().item())


def _clipped_each_time(weights: torch.Tensor, window: list[Rows], max_norm: float) -> torch.Tensor:
    model = _toy(1.0, 1.0)[0]
    nn.utils.vector_to_parameters(weights, model.parameters())
    total, n_rows = torch.zeros_like(weights), sum(len(y) for _, y in window)
    for x, y in window:
        total = _clipped(total + _gradient(model, x, y) * len(y) / n_rows, max_norm)
    return total


class _Watch:
    """Notes the weights before and after each optimizer step, and how many rows the model had seen
    by then.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self.dtypes: list[torch.dtype] = []
        self.rows = self.most_rows = 0
        model[0].register_forward_hook(self._forward)
        optimizer.register_step_pre_hook(
            lambda *_: self.steps.append((_flat(model), _flat(model), self.rows))
        )
        optimizer.register_step_post_hook(
            lambda *_: self.steps.append((self.steps.pop()[0], _flat(model), self.rows))
        )

    def _forward(self, _module: nn.Module, inputs: tuple, out: torch.Tensor) -> None:
        self.rows += len(inputs[0])
        self.most_rows = max(self.most_rows, len(inputs[0]))
        self.dtypes.append(out.dtype)


def amp_window(step: AmpWindow | None) -> None:
    """Check `step(model, micro_batches, optimizer, scaler, max_grad_norm)`: one FP16 optimizer step
    over a window.

    `micro_batches` is a list of (x, y) with unequal numbers of rows; the loss is the mean squared error over all rows.
    It is run on a small network on the CPU: without clipping, with it, with an overflow, and
    repeatedly.
    """
    _report(step, lambda: _amp_window_problem(step))


def _amp_window_problem(step: AmpWindow) -> str | None:
    rate, scale, tolerance, window = (
        1.0,
        256.0,
        0.03,
        _rows(WINDOW_ROWS[:4]),
    )  # FP16 products: some 0.001 off
    model, _, _, optimizer, scaler = _toy(rate, scale)
    watch, before = _Watch(model, optimizer), _flat(model)
    step(model, window, optimizer, scaler, 1e9)
    if not watch.rows:
        return "the function never called the model."
    if watch.most_rows > max(WINDOW_ROWS):
        return NOT_ACCUMULATED
    if watch.dtypes[0] != torch.float16:
        return f"the first layer gave {watch.dtypes[0]}: is autocast on, and for which dtype?"
    if len(watch.steps) != 1:
        return f"the optimizer stepped {len(watch.steps)} times for one window."
    moved = before - _flat(model)
    wrong = _wrong_gradients(before, window, len(window))
    if moved.norm() > 0.3 * scale * wrong[""].norm():
        return "the step is about as many times too long as the loss scale is large: is the scale ever taken out?"
    if moved.norm() < 10 / scale * wrong[""].norm():
        return "the step is far too short: was the scale taken out more than once?"
    verdict = _nearest(moved, wrong, tolerance)
    if verdict != "":
        return verdict or "the step is not that of the mean over all rows of the window."
    limit = 0.3 * wrong[""].norm().item()
    model, _, _, optimizer, scaler = _toy(rate, scale)
    step(model, window, optimizer, scaler, limit)
    moved = before - _flat(model)
    if moved.norm() < 0.1 * limit:
        return "with clipping the step is far too short: were scaled gradients compared with max_grad_norm?"
    if moved.norm() > 1.1 * limit:
        return "the step is longer than max_grad_norm allows: are the gradients of the whole window clipped?"
    if _nearest(moved, {"": _clipped(wrong[""], limit)}, tolerance) is None:
        return "clipped, but in another direction than the window's gradient: were parts of it clipped?"
    model, _, _, optimizer, scaler = _toy(rate, scale)
    huge = [(x, y * 1e6) if i == 1 else (x, y) for i, (x, y) in enumerate(window)]
    step(model, huge, optimizer, scaler, 1e9)
    if not torch.equal(_flat(model), before):
        return "one micro-batch overflowed, and the weights changed. The whole window must be skipped, by the scaler."
    if scaler.get_scale() != scale / 2:
        return f"after an overflow in one window the scale went from {scale:g} to {scaler.get_scale():g}: updated once?"
    model, _, _, optimizer, scaler = _toy(rate, 1.0)
    step(model, window, optimizer, scaler, 1e9)
    middle = _flat(model)
    step(model, window, optimizer, scaler, 1e9)
    if _nearest(middle - _flat(model), {"": _wrong_gradients(middle, window, 4)[""]}, 0.1) is None:
        return "the second window also contains the first one's gradients: they were never cleared."
    return None


def accumulation_epoch(epoch: Epoch | None) -> None:
    """Check `epoch(model, batches, optimizer, grad_accum_steps, max_grad_norm)`, which returns one
    loss per step.

    `batches` is a list of (x, y) with unequal numbers of rows; each optimizer step is that of the mean squared error
    over all rows of its window, and so is the loss. It is run on 7 micro-batches in windows of 3,
    also with clipping.
    """
    _report(epoch, lambda: _epoch_problem(epoch))


def _epoch_problem(epoch: Epoch) -> str | None:
    rate, accumulate, batches = 0.1, 3, _rows(WINDOW_ROWS)
    windows = [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
    model, _, _, optimizer, _ = _toy(rate, 1.0)
    watch = _Watch(model, optimizer)
    losses = epoch(model, batches, optimizer, accumulate, 1e9)
    rows_at = [sum(WINDOW_ROWS[:n]) for n in (3, 6, 7)]
    seen = [rows for _, _, rows in watch.steps]
    if problem := _windows_problem(seen, rows_at, accumulate):
        return problem
    for i, ((before, after, _), window) in enumerate(zip(watch.steps, windows, strict=True)):
        verdict = _nearest(
            (before - after) / rate, _wrong_gradients(before, window, accumulate), 1e-3
        )
        if verdict != "":
            if i:
                verdict = (
                    verdict or "it also contains gradients of an earlier window: were they cleared?"
                )
            return f"optimizer step {i + 1}: {verdict or 'not the gradient of the mean over all rows.'}"
    if problem := _losses_problem(losses, watch.steps, windows):
        return problem
    if watch.most_rows > max(WINDOW_ROWS):
        return NOT_ACCUMULATED
    limit = 0.3 * _wrong_gradients(watch.steps[0][0], windows[0], accumulate)[""].norm().item()
    model, _, _, optimizer, _ = _toy(rate, 1.0)
    watch = _Watch(model, optimizer)
    for _ in range(2):
        epoch(model, batches, optimizer, accumulate, limit)
    for i, ((before, after, _), window) in enumerate(
        zip(watch.steps, [*windows, *windows], strict=True)
    ):
        true = _wrong_gradients(before, window, accumulate)[""]
        ways = {
            "": _clipped(true, limit),
            "the gradients are not clipped.": true,
            "clipped after every micro-batch: parts of the window are cut before they are added.": _clipped_each_time(
                before, window, limit
            ),
        }
        verdict = _nearest((before - after) / rate, ways, 1e-3)
        if verdict != "":
            where = f"optimizer step {i % len(windows) + 1} of epoch {i // len(windows) + 1}, with clipping"
            leaks = "not the clipped window. Were the gradients of the last window cleared?"
            return f"{where}: {verdict or (leaks if i == len(windows) else 'not that of the clipped window.')}"
    return None


def _windows_problem(seen: list[int], expected: list[int], accumulate: int) -> str | None:
    """Compare the rows seen at each optimizer step with those at the windows' ends."""
    if seen == expected:
        return None
    if not seen:
        return "the optimizer never stepped."
    if len(seen) > len(expected):
        return f"the optimizer stepped {len(seen)} times; {len(expected)} windows are there."
    if seen[0] == WINDOW_ROWS[0]:
        return f"the first step came after one micro-batch, not after {accumulate}: counting starts at 0."
    if seen == expected[:-1]:
        return "the last, shorter window never reached the weights. Its gradients would leak into the next epoch."
    return "the optimizer steps at the wrong micro-batches."


def _losses_problem(losses: object, steps: list[tuple], windows: list[list[Rows]]) -> str | None:
    """Compare the reported losses with each window's mean over rows, at the weights before its
    step.
    """
    if not isinstance(losses, (list, tuple, torch.Tensor)) or len(losses) != len(windows):
        return f"return a list with one loss per optimizer step: {len(windows)} of them."
    model, right, last = _toy(1.0, 1.0)[0], [], []
    for (before, _, _), window in zip(steps, windows, strict=True):
        nn.utils.vector_to_parameters(before, model.parameters())
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        right.append(nn.functional.mse_loss(model(x), y).item())
        last.append(nn.functional.mse_loss(model(window[-1][0]), window[-1][1]).item())
    given = torch.tensor([float(loss) for loss in losses])
    if torch.allclose(given, torch.tensor(right), rtol=1e-3):
        return None
    if torch.allclose(given, torch.tensor(last), rtol=1e-3):
        return "the steps are right; the losses are those of each window's last micro-batch only."
    return "the steps are right; the losses are not the means over all rows of each window."


def floor_gib(n_params: float, answer: float | None) -> None:
    """Check the GiB that float32 training of `n_params` parameters with AdamW needs, however small
    the micro-batch.
    """
    _report(answer, lambda: _floor_problem(n_params, answer))


def _floor_problem(n_params: float, answer: float) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or not 0 < answer < 1e6:
        return "the answer is a number of GiB, greater than 0."
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    kept = [layer.weight, layer.weight.grad, state["exp_avg"], state["exp_avg_sq"]]
    each = [t.element_size() * n_params / 2**30 for t in kept]

    def near(gib: float) -> bool:
        return abs(answer / gib - 1) < 0.02

    if near(sum(each)):
        return None
    if near(sum(each) * 2**30 / 1e9):
        return "right in GB (10⁹ bytes); a GiB is 2³⁰ bytes."
    if near(sum(each) - each[1]):
        return "the gradients are missing. They are what accumulates, so they stay alive between micro-batches."
    if near(each[0]) or near(2 * each[0]):
        return "weights, or weights and gradients, are not all: what does AdamW remember?"
    if answer < sum(each):
        return (
            "too low. Which of weights, gradients and moments would a smaller micro-batch shrink?"
        )
    return (
        "too high: with a micro-batch small enough, what grows with the batch is next to nothing."
    )


def beta2(now: float, factor: float, answer: float | None) -> None:
    """Check the decay rate of Adam's second moment that keeps its half-life in tokens for a batch
    `factor` as large.
    """
    _report(answer, lambda: _beta2_problem(now, factor, answer))


def _beta2_problem(now: float, factor: float, answer: float) -> str | None:
    def near(value: float) -> bool:
        return abs(answer - value) < 1e-3

    if near(now**factor):
        return None
    if near(now):
        return "unchanged, it forgets per step as before; but a step has more tokens now."
    if near(now ** (1 / factor)) or near(1 - (1 - now) / factor):
        return "that is the other direction: right for a batch that many times smaller."
    if near(1 - (1 - now) * factor):
        return "close: that is the first-order approximation. Several steps in a row multiply their decay rates."
    if near(now / factor):
        return "a decay rate is not a length: dividing it does not divide the half-life."
    return "compare half-lives: steps until half is forgotten, times tokens per step, before and after."


def block_runs(n_layer: int, unit: int, answer: int | None) -> None:
    """Check how often a block's forward runs in one step of `n_layer` blocks, checkpointed in units
    of `unit`.
    """
    _report(answer, lambda: _block_runs_problem(n_layer, unit, answer))


class _CountsRuns(nn.Linear):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(x).tanh()


def _block_runs_problem(n_layer: int, unit: int, answer: int) -> str | None:
    blocks = nn.Sequential(*(_CountsRuns(2, 2) for _ in range(n_layer)))
    x = torch.ones(1, 2)
    for start in range(0, n_layer, unit):
        x = checkpoint(blocks[start : start + unit], x, use_reentrant=False)
    x.sum().backward()
    right = sum(block.runs for block in blocks)
    misconceptions = {
        n_layer: "that is the step without checkpointing. What does backward find inside a unit?",
        n_layer
        + n_layer
        // unit: "each unit is computed again, not one block of each: only the unit's input is kept.",
        right
        - unit: "saving the last unit is possible, but a checkpointed unit is computed again wherever it stands.",
        2: "that is one block's count; there are more blocks.",
        right
        - n_layer
        // unit: "a unit's first block is computed again too: kept is what goes in, not what comes out.",
        3 * n_layer: "backward costs as much as two forward passes, but it is not one.",
    }
    return (
        None
        if answer == right
        else misconceptions.get(answer, "count block by block: how often does each run?")
    )


def best_segments(n_layer: int, ratio: float, answer: float | None) -> None:
    """Check the number of equal segments with the smallest peak, if each layer keeps `ratio` times
    its input.
    """
    _report(answer, lambda: _segments_problem(n_layer, ratio, answer))


def _segments_problem(n_layer: int, ratio: float, answer: float) -> str | None:
    if not isinstance(answer, (int, float)) or answer != int(answer) or not 1 <= answer <= n_layer:
        return (
            f"the answer is a whole number: {n_layer} layers have between 1 and {n_layer} segments."
        )

    def peak(n: float) -> float:
        return n + ratio * math.ceil(n_layer / n)

    if peak(answer) == min(map(peak, range(1, n_layer + 1))):
        return None
    if abs(answer - n_layer**0.5) < 0.5:
        return "that is best if a layer keeps as much as its input. Here it keeps more, so segments should be shorter."
    if answer == n_layer:
        return "one checkpoint per layer: all the inputs together are the largest part then."
    if answer == 1:
        return "one segment keeps nothing in between, and all layers at once when it is computed again."
    if abs(answer - (n_layer / ratio) ** 0.5) < 0.5:
        return "the ratio acts the other way: layers that keep much ask for shorter segments, so for more of them."
    return f"{peak(answer):g} inputs at the peak; there is a smaller sum. Are there too {_many(peak, answer)} segments?"


def _many(peak: Callable[[float], float], n: float) -> str:
    return "few" if min(map(peak, range(int(n) + 1, 2 * int(n) + 2))) < peak(n) else "many"


def placement(kept: Sequence[float], input_size: float, answer: Sequence[int] | None) -> None:
    """Check the first layers of segments that make their inputs plus the largest segment smallest."""
    _report(answer, lambda: _placement_problem(list(kept), input_size, answer))


def _placement_problem(kept: list[float], input_size: float, answer: Sequence[int]) -> str | None:
    n = len(kept)
    if not isinstance(answer, (list, tuple, set)) or not set(answer) <= set(range(n)):
        return f"the answer is a list of layer numbers, from 0 to {n - 1}."
    starts = sorted(int(start) for start in set(answer))
    if not starts or starts[0] != 0:
        return "the first segment starts at layer 0; without it the first layers belong to none."

    def segments(starts: Sequence[int]) -> list[float]:
        return [sum(kept[a:b]) for a, b in zip(starts, [*starts[1:], n], strict=True)]

    def peak(starts: Sequence[int]) -> float:
        return input_size * len(starts) + max(segments(starts))

    every = (
        [0, *chosen] for size in range(n) for chosen in itertools.combinations(range(1, n), size)
    )
    if peak(starts) == min(map(peak, every)):
        return None
    given = f"{peak(starts):g} at the peak, {max(segments(starts)):g} of it the largest segment; less is possible."
    if len(starts) == 1:
        return f"{given} One segment is no checkpointing at the moment that counts."
    if len(starts) == n:
        return f"{given} A checkpoint at each layer: most of these inputs buy nothing."
    if max(segments(starts)) > max(kept):
        return f"{given} What is in that largest segment, and need segments be equally long?"
    return f"{given} The huge layer stands alone; do the others need so many segments?"


def nvidia_smi(
    allocated_gib: float, reserved_gib: float, context_gib: float, answer: float | None
) -> None:
    """Check what nvidia-smi shows for a process, in MiB."""
    _report(answer, lambda: _smi_problem(allocated_gib, reserved_gib, context_gib, answer))


def _smi_problem(allocated: float, reserved: float, context: float, answer: float) -> str | None:
    misconceptions = {
        allocated: "those are the tensors alone; the driver does not see tensors.",
        reserved: "the context is missing: it is the process's as well.",
        allocated + context: "cached segments belong to the process until it returns them.",
        allocated + reserved + context: "allocated bytes lie within the reserved ones.",
        allocated
        + reserved: "allocated bytes lie within the reserved ones, and the context is missing.",
    }
    if abs(answer - (reserved + context) * 1024) < 1:
        return None
    for gib, problem in misconceptions.items():
        if abs(answer - gib * 1024) < 1:
            return problem
    if abs(answer - (reserved + context) * 1000) < 1 or abs(answer - (reserved + context)) < 0.01:
        return "the right bytes, in another unit: 1 GiB is 1024 MiB."
    if abs(answer - (reserved + context) * 2**30 / 1e6) < 1:
        return "those are MB of a million bytes; nvidia-smi counts in MiB."
    return "which of the three numbers does the driver know of?"


def leak(answer: str | None) -> None:
    """Check which function of notebook 04's little program keeps a graph alive."""
    _report(answer, lambda: _leak_problem(answer))


def _leak_problem(answer: str) -> str | None:
    return {
        "running_mean": None,
        "forward": "its results are alive, true; but training alone would let go of them. Who still needs them?",
        "augment": "it has the highest peak, and nothing of it is alive at the end: a peak is no leak.",
    }.get(str(answer).strip("() "), "the answer is the name of one of the three functions.")


def largest_batch(peaks: dict[int, float], budget: float, answer: int | None) -> None:
    """Check the largest batch under a budget, on the line through two measured peaks."""
    _report(answer, lambda: _batch_problem(peaks, budget, answer))


def _batch_problem(peaks: dict[int, float], budget: float, answer: int) -> str | None:
    (a, peak_a), (b, peak_b) = sorted(peaks.items())
    slope = (peak_b - peak_a) / (b - a)
    intercept = peak_a - a * slope
    right = (budget - intercept) // slope
    if answer == right:
        return None
    if answer in (budget // (peak_a / a), budget // (peak_b / b)):
        return "that divides the budget by the cost per sequence of one point: as if the line went through zero."
    if answer == budget // slope:
        return "the slope is right; but part of the budget is gone before the first sequence."
    if answer != int(answer):
        return "half a sequence cannot be trained: the answer is a whole number."
    needed = intercept + answer * slope
    return f"{answer} sequences need {needed:g}: " + (
        "that is over the budget." if needed > budget else "one more fits."
    )


STATEMENTS = (
    (
        "A technique that saves activations always lowers the peak.",
        False,
        "only if activations are alive at the peak",
    ),
    (
        "empty_cache() can make room for a tensor of this process.",
        False,
        "PyTorch empties the cache itself first",
    ),
    (
        "nvidia-smi shows at least what PyTorch has reserved.",
        True,
        "reserved segments, and the context",
    ),
    (
        "A snapshot made without _record_memory_history first has no history.",
        True,
        "only the present state",
    ),
    (
        "Twice the batch needs at least twice the memory.",
        False,
        "weights and moments do not grow with it",
    ),
    (
        "More accumulation steps at the same micro-batch lower the peak.",
        False,
        "the micro-batch must shrink",
    ),
    (
        "After a failed cell, tensors of its functions can still be alive.",
        True,
        "the traceback keeps their frames",
    ),
    (
        "In a small model with a large vocabulary the logits can outweigh a block.",
        True,
        "section 4",
    ),
    (
        "A BF16 weight rounded to nearest follows every small update.",
        False,
        "below half a step it does not move",
    ),
    (
        "Freeing gradients in backward still allows clipping by the global norm.",
        False,
        "that needs all gradients",
    ),
)


def self_test(answers: Sequence[bool | None]) -> None:
    """Print ten statements, and for each answer that is not None whether it is right, and why."""
    if len(answers) != len(STATEMENTS):
        print(f"There are {len(STATEMENTS)} statements; the list has {len(answers)} entries.")
        return
    for i, ((text, truth, reason), answer) in enumerate(
        zip(STATEMENTS, answers, strict=True), start=1
    ):
        verdict = "open " if answer is None else "right" if answer is truth else "wrong"
        print(f"{i:2d}. {verdict}  {text}" + (f" ({reason})" if answer is not None else ""))
