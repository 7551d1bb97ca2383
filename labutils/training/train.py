"""The one training loop: any module, any loss, every precision.

Taught in 01, section 5.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from tqdm import tqdm

from labutils import machine
from labutils.config.choices import PRECISIONS
from labutils.techniques.loss import LossFn, count_targets
from labutils.techniques.precision import autocast, grad_scaler, tf32
from labutils.techniques.step import take_step

NON_FINITE_LIMIT = 5  # losses in a row that are inf or NaN before a run is stopped
NO_TARGET = (
    "no target in {}, so a mean loss would be 0/0. With `lm_loss_sum` that means: every label is "
    "-100, or the first of its sequence. Leave such batches out"
)


class Series(BaseModel):
    """One value per optimizer step, in order; and the losses on held-out text."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    loss: list[float] = []  # mean over the step's target tokens
    grad_norm: list[float] = []  # before clipping; NaN where clipping is off
    learning_rate: list[float] = []
    loss_scale: list[float] = []  # before the step; 1 where nothing is scaled
    skipped: list[bool] = []  # the scaler saw inf or NaN and left the weights alone
    step_ms: list[float] = []
    held_out: list[tuple[int, float]] = []  # (optimizer steps done, mean loss on held-out text)


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    grad_accum_steps: int = 1,
    count_targets: Callable[[Any], int] = count_targets,
    precision: str = "fp32",
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float = 0.0,
    learning_rate_at: Callable[[int], float] | None = None,
    held_out: Sequence[Any] = (),
    eval_every: int = 0,
    series: Series | None = None,
    progress: bool = True,
    name: str = "run",
) -> Series:
    """Train `model` for `steps` optimizer steps on its own device; return what each step gave.

    `batches` yields micro-batches (tensors, or dicts of them), which are moved to the device here.
    The training ends early if they do.
    `loss_fn(model, micro_batch)` returns a loss summed over `count_targets(micro_batch)` targets.
    The sum over a step's micro-batches is divided once by their total (see `take_step`).
    `learning_rate_at(step)` sets the rate of every parameter group; without it the optimizer's
    own rates stay.
    `name` stands before the progress bar.
    `held_out` is evaluated after the last step, and after every `eval_every` steps (0: never).

    Raises FloatingPointError after several non-finite losses in a row, which says so if the step's
    data were not finite; ValueError before a step without targets. Whatever is raised, Ctrl-C's
    KeyboardInterrupt too, a `series` that the caller gives has the steps that were finished.
    A `scaler` of the caller's may then be in the middle of its step: go on with a new one.
    Raises PrecisionUnsupported before any work.
    """
    device = next(model.parameters()).device
    machine.card(device).require(precision)
    scaler = scaler or grad_scaler(precision, device)

    def loss_on_device(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        return loss_fn(model, to_device(micro_batch, device))

    series = series or Series()
    log = StepLog(series, device, scaler)
    stream = iter(batches)
    bar = tqdm(
        range(1, steps + 1),
        desc=name,
        unit="step",
        disable=not progress,
        file=sys.stdout,  # notebooks show stderr in red
        mininterval=1,
    )
    model.train()
    bad_data = ""
    try:
        with tf32(PRECISIONS[precision].tf32), bar:
            for step in bar:
                log.begin()  # before the batches are fetched: to wait for them belongs to a step
                if learning_rate_at:
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate_at(step - 1)  # schedules count from 0
                window = list(itertools.islice(stream, grad_accum_steps))
                if not window:
                    break
                n_targets = sum(map(count_targets, window))
                if not n_targets:
                    raise ValueError(NO_TARGET.format(f"the batches of step {step}"))
                # on the device: `.item()` in each step would wait for it each time
                mean_loss = torch.zeros((), device=device)
                grad_norm = take_step(
                    model,
                    window,
                    loss_on_device,
                    optimizer,
                    n_targets=n_targets,
                    autocast=partial(autocast, precision, device),
                    scaler=scaler,
                    max_grad_norm=max_grad_norm,
                    mean_loss=mean_loss,
                )
                log.end(mean_loss, grad_norm, optimizer.param_groups[0]["lr"])
                if log.due() or step == steps:
                    bar.set_postfix_str(f"loss {log.read():.3f}", refresh=False)
                    is_bad = not math.isfinite(series.loss[-1])
                    # looked for only now: on a GPU this waits
                    bad_data = is_bad and (bad_data or _not_finite(window, step))
                    _require_finite(series.loss, bad_data)
                if held_out and (step == steps or (eval_every and step % eval_every == 0)):
                    loss = evaluate(model, held_out, loss_fn, count_targets, precision)
                    series.held_out.append((step, loss))
    finally:
        optimizer.zero_grad(set_to_none=True)  # of a step that was not finished
        log.read()
    return series


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors (itself, or a dict's values) on a device."""
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if not isinstance(batch, torch.Tensor):
        return batch
    if device.type == "cuda" and not batch.is_cuda:
        batch = batch.pin_memory()  # from pageable memory a copy cannot run beside the host
    return batch.to(device, non_blocking=True)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    count_targets: Callable[[Any], int] = count_targets,
    precision: str = "fp32",
) -> float:
    """Return the mean loss per target over some batches, without dropout.

    Leaves the model in training mode. Raises ValueError if the batches have no target.
    """
    device = next(model.parameters()).device
    total, n_targets = 0.0, 0
    model.eval()
    for batch in batches:
        with autocast(precision, device):
            total += loss_fn(model, to_device(batch, device)).item()
        n_targets += count_targets(batch)
    model.train()
    if not n_targets:
        raise ValueError(NO_TARGET.format("the batches to evaluate on"))
    return total / n_targets


def _not_finite(window: list[Any], step: int) -> str:
    """Return which tensor of a step's micro-batches has NaN or inf; "" if none has."""
    for batch in window:
        tensors = batch if isinstance(batch, dict) else {"a batch": batch}
        for name, tensor in tensors.items():
            is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            # Not by isfinite: masks hold -inf. NaN is not below inf either.
            if is_float and not (tensor < math.inf).all():
                return f"`{name}` has NaN or inf in the data of step {step}"
    return ""


def _require_finite(losses: list[float], bad_data: str) -> None:
    """Raise FloatingPointError if the last NON_FINITE_LIMIT losses, or more, are inf or NaN.

    `bad_data` says what is wrong with the data, if anything is.
    """
    last = list(itertools.takewhile(lambda loss: not math.isfinite(loss), reversed(losses)))
    if len(last) >= NON_FINITE_LIMIT:
        reason = (
            "the forward pass overflows (in fp16 no loss scale can mend that, bf16 or fp32 may) or "
            "the weights are damaged. Try a lower learning_rate, max_grad_norm: 1.0, or more "
            "lr_warmup_steps"
        )
        if bad_data:
            reason = f"{bad_data}. Mend the data, or leave them out; the learning rate is no cause"
        first = len(losses) - len(last) + 1
        raise FloatingPointError(f"the loss has been inf or NaN since step {first}: {reason}")


class StepLog:
    """Fills a series. On CUDA nothing is read back from the device more than once a second."""

    def __init__(self, series: Series, device: torch.device, scaler: torch.amp.GradScaler) -> None:
        self.series, self.scaler, self.cuda = series, scaler, device.type == "cuda"
        self.one, self.nan = torch.tensor([1.0, math.nan], device=device)
        # of steps that are not read yet: where each begins and ends, and its numbers
        self.pending: list[tuple[Any, Any, torch.Tensor, float]] = []
        self.last_read = time.monotonic()

    def _mark(self) -> Any:
        """Return a time: the clock's, or an event that a CUDA device will pass."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Note that a step begins."""
        # A scaled 1 is the scale, and stays on the device; `get_scale()` would wait for it.
        self.scale, self.start = self.scaler.scale(self.one), self._mark()

    def end(self, loss: torch.Tensor, grad_norm: torch.Tensor | None, rate: float) -> None:
        """Note that the step ends, with its loss and gradient norm, `()` each, and its rate.

        The loss scale after it is noted beside the one before it.
        """
        end = self._mark()
        norm = self.nan if grad_norm is None else grad_norm
        numbers = loss, norm, self.scale, self.scaler.scale(self.one)
        row = torch.stack([number.float() for number in numbers])
        self.pending.append((self.start, end, row, rate))

    def due(self) -> bool:
        return not self.cuda or time.monotonic() - self.last_read > 1

    def read(self) -> float:
        """Fetch what is pending (this waits for the device) and return the last loss."""
        series = self.series
        pending, self.pending = self.pending, []  # an interrupt must not read a row twice
        for begin, end, row, rate in pending:
            # waits until the row is there: the events of its step have passed by then, too
            loss, grad_norm, scale, next_scale = row.tolist()
            series.loss.append(loss)
            series.grad_norm.append(grad_norm)
            series.learning_rate.append(rate)
            series.loss_scale.append(scale)
            series.skipped.append(next_scale < scale)  # its only public sign of that
            ms = begin.elapsed_time(end) if self.cuda else 1000 * (end - begin)
            series.step_ms.append(ms)
        self.last_read = time.monotonic()
        return series.loss[-1] if series.loss else math.nan
