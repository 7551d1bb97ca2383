"""The series of a run: one value per optimizer step."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from labutils.training.records import Series


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
