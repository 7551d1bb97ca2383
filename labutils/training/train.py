"""The one training loop: any module, any loss, every precision."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import nn
from tqdm import tqdm

from labutils import machine
from labutils.config.choices import PRECISIONS
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.memory.ledger import FROZEN
from labutils.techniques.loss import LossFn, count_targets
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.techniques.precision import autocast, grad_scaler, tf32
from labutils.techniques.step import take_step
from labutils.training import accelerated
from labutils.training.resume import Saver, orderly_stop

NON_FINITE_LIMIT = 5  # losses in a row that are inf or NaN before a run is stopped
Outcome = Literal["completed", "interrupted", "non_finite", "out_of_memory", "unsupported"]


class Series(BaseModel):
    """One value per optimizer step, in order.

    `grad_norm` is before clipping, NaN where clipping is off.
    """

    model_config = FROZEN

    loss: list[float] = []  # mean over the step's target tokens
    grad_norm: list[float] = []
    learning_rate: list[float] = []
    loss_scale: list[float] = []  # before the step; 1 where nothing is scaled
    skipped: list[bool] = []  # the scaler saw inf or NaN and left the weights alone
    step_ms: list[float] = []


@dataclass(frozen=True)
class Training:
    """What a training gave: one value per optimizer step, and how it ended.

    `held_out` has (optimizer steps done, mean loss on held-out text). `tokens_per_step` counts the
    first step's targets.
    """

    series: Series
    held_out: list[tuple[int, float]]
    outcome: Outcome
    reason: str
    tokens_per_step: int


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
    saver: Saver | None = None,
    name: str = "run",
    progress: bool = True,
) -> Training:
    """Train `model` for `steps` optimizer steps on its own device; return what came of it.

    `batches` yields micro-batches (tensors, or dicts of them), which are moved to the device here.
    `loss_fn(model, micro_batch)` returns a loss summed over `count_targets(micro_batch)` targets.
    The sum over a step's micro-batches is divided once by their total (see `take_step`).
    Under `accelerate launch` each process gets its own micro-batches; the gradient is that of all
    of them.
    `learning_rate_at(step)` sets the rate of every parameter group; without it the optimizer's
    own rates stay.
    A `saver` keeps the run's state on disk, and skips the steps that it has found done.

    Three events end the run early: Ctrl-C, several non-finite losses in a row, and running out of
    memory after the first step. The series then has the steps so far, and `outcome` says why.
    Other exceptions are not caught. Raises PrecisionUnsupported before any work. Raises ValueError
    if an `OptimizerInBackward` meets what needs all gradients at once.
    """
    device = next(model.parameters()).device
    machine.card(device).require(precision)
    scaler = scaler or grad_scaler(precision, device)
    if isinstance(optimizer, OptimizerInBackward):
        _require_independent_gradients(grad_accum_steps, max_grad_norm, scaler)
    replicas = accelerated.Replicas(model, loss_fn, optimizer)
    optimizer = replicas.optimizer

    def loss_on_device(_: nn.Module, micro_batch: Any) -> torch.Tensor:
        return replicas.loss(to_device(micro_batch, device))

    log = StepLog(device)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "log": log}
    saver = saver or Saver(name, every=0)
    done = saver.restore(parts)
    stream = itertools.islice(batches, done * grad_accum_steps, None)
    outcome, reason, targets_per_step = "completed", "", 0
    one = torch.ones((), device=device)
    model.train()
    with (
        tf32(PRECISIONS[precision].tf32),
        _progress_bar(name, done, steps, progress) as bar,
        orderly_stop(active=replicas.size == 1) as stop,
    ):
        try:
            for step in bar:
                log.start()
                if learning_rate_at:
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate_at(step)
                window = list(itertools.islice(stream, grad_accum_steps))
                if not window:
                    reason = f"the batches ended after {step} of {steps} steps"
                    break
                n_targets = replicas.mean(sum(map(count_targets, window)))
                targets_per_step = targets_per_step or round(float(n_targets * replicas.size))
                scale = scaler.scale(one)
                mean_loss = torch.zeros((), device=device)
                grad_norm = take_step(
                    model,
                    replicas.in_turn(window),
                    loss_on_device,
                    optimizer,
                    n_targets=n_targets,
                    autocast=partial(autocast, precision, device),
                    scaler=scaler,
                    max_grad_norm=max_grad_norm,
                    mean_loss=mean_loss,
                )
                rate = optimizer.param_groups[0]["lr"]
                log.stop(replicas.mean(mean_loss), grad_norm, scale, rate)
                is_last = step + 1 == steps
                saves = saver.due(step + 1, stop.asked)
                # Several processes must read, and so stop, at the same step.
                reads = log.due() if replicas.size == 1 else step % 10 == 9
                if saves or reads or is_last:
                    bar.set_postfix_str(f"loss {log.read():.3f}", refresh=False)
                    if log.non_finite_in_a_row >= NON_FINITE_LIMIT:
                        outcome, reason = "non_finite", _why_non_finite(log, scaler)
                        break
                if held_out and (is_last or (eval_every and (step + 1) % eval_every == 0)):
                    loss = evaluate(model, held_out, loss_fn, count_targets, precision)
                    log.held_out.append((step + 1, loss))
                if saves and not log.non_finite_in_a_row:
                    saver.save(parts, step + 1)
                if stop.asked and not is_last:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            outcome = "interrupted"
            reason = f"stopped (Ctrl-C or SIGTERM) after {log.n_complete} of {steps} steps"
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not log.n_complete or replicas.size > 1:
                raise  # nothing to keep, or other processes would wait for this one
            outcome = "out_of_memory"
            reason = f"after {log.n_complete} of {steps} steps: {short_message(error)}"
        optimizer.zero_grad(set_to_none=True)  # of a step that was not finished
        log.read()
    return Training(
        series=log.series(final_scale=float(scaler.get_scale())),
        held_out=log.held_out,
        outcome=outcome,
        reason=reason,
        tokens_per_step=targets_per_step,
    )


def _require_independent_gradients(
    grad_accum_steps: int, max_grad_norm: float, scaler: torch.amp.GradScaler
) -> None:
    """Raise ValueError where a step would need all gradients at once."""
    clips_or_scales = max_grad_norm > 0 or scaler.is_enabled()
    if grad_accum_steps > 1 or clips_or_scales or accelerated.world_size() > 1:
        raise ValueError(
            "a step inside backward allows no accumulation, clipping, loss scale or second process"
        )


def _progress_bar(name: str, done: int, steps: int, shown: bool) -> tqdm:
    return tqdm(
        range(done, steps),
        desc=name,
        initial=done,
        total=steps,
        file=sys.stdout,  # notebooks show stderr in red
        mininterval=1,
        disable=not shown,
        unit="step",
        dynamic_ncols=False,
    )


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

    Leaves the model in training mode.
    """
    device = next(model.parameters()).device
    model.eval()
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    total = torch.zeros((), device=device, dtype=dtype)
    n_targets = 0
    try:
        for batch in batches:
            with autocast(precision, device):
                total += loss_fn(model, to_device(batch, device))
            n_targets += count_targets(batch)
    finally:
        model.train()
    return float(total) / max(n_targets, 1)


def _why_non_finite(log: StepLog, scaler: torch.amp.GradScaler) -> str:
    first = len(log.rows) - log.non_finite_in_a_row + 1
    text = f"the loss has been inf or NaN since step {first}: the forward pass overflows or the "
    text += "weights are damaged. "
    if scaler.is_enabled():
        text += "No loss scale can mend that. Try precision: bf16 or fp32; if those fail too, a "
        text += "lower "
    else:
        text += "Try a lower "
    return text + "learning_rate, max_grad_norm: 1.0, or more lr_warmup_steps"


class StepLog:
    """Collects a run's series.

    On CUDA nothing is read back from the device more than once a second.
    """

    KEPT = ("rows", "learning_rates", "held_out", "non_finite_in_a_row")  # in a saved state

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.pending: list[torch.Tensor] = []
        self.rows: list[list[float]] = []  # loss, grad_norm, loss_scale
        self.learning_rates: list[float] = []
        self.held_out: list[tuple[int, float]] = []
        self.earlier_ms: list[float] = []  # of steps taken before this process continued the run
        self.marks: list[tuple[Any, Any]] = []
        self.non_finite_in_a_row = 0
        self.last_read = time.monotonic()

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self.begun = self._mark()

    def stop(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor | None,  # None where clipping is off
        scale: torch.Tensor,
        learning_rate: float,
    ) -> None:
        self.marks.append((self.begun, self._mark()))
        if grad_norm is None:
            grad_norm = torch.full_like(loss, math.nan)
        self.pending.append(torch.stack([loss.float(), grad_norm.float(), scale.float()]))
        self.learning_rates.append(learning_rate)

    @property
    def n_complete(self) -> int:
        return len(self.learning_rates)

    def due(self) -> bool:
        return not self.cuda or time.monotonic() - self.last_read > 1

    def read(self) -> float:
        """Fetch what is pending (this waits for the device) and return the last loss."""
        if self.pending:
            for row in torch.stack(self.pending).tolist():
                self.rows.append(row)
                self.non_finite_in_a_row += 1
                if math.isfinite(row[0]):
                    self.non_finite_in_a_row = 0
            self.pending = []
        self.last_read = time.monotonic()
        return self.rows[-1][0] if self.rows else math.nan

    def step_ms(self) -> list[float]:
        if self.cuda:
            torch.cuda.synchronize()
        found = list(self.earlier_ms)
        for start, end in self.marks:
            found.append(start.elapsed_time(end) if self.cuda else 1000 * (end - start))
        return found

    def state_dict(self) -> dict[str, Any]:
        self.read()
        return {key: getattr(self, key) for key in self.KEPT} | {"earlier_ms": self.step_ms()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in (*self.KEPT, "earlier_ms"):
            setattr(self, key, state[key])

    def series(self, final_scale: float) -> Series:
        loss, grad_norm, scale = [], [], []
        for row in self.rows:
            loss.append(row[0])
            grad_norm.append(row[1])
            scale.append(row[2])
        # A scale that fell means that inf or NaN was found, and the step skipped.
        after = [*scale[1:], final_scale]
        return Series(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=self.learning_rates,
            loss_scale=scale,
            skipped=[new < old for old, new in zip(scale, after, strict=False)],
            step_ms=self.step_ms(),
        )
