"""Rows of changed configs: each is run, and its times are compared with another row's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from labutils.config.choices import COMPILE_MODES
from labutils.config.schema import Config
from labutils.machine import here
from labutils.memory.ledger import MemoryLedger
from labutils.training.experiment import run_experiment
from labutils.training.records import RunRecord
from labutils.training.speed import UNTIMED_STEPS

SLOW_STEPS = 2  # of a precision that this device emulates: its bytes are asked for, not its speed


@dataclass
class Row:
    """One row: its config, and what is known of it. None, or an empty list, is not measured.

    `above` names the row that this one changes. `is_here` says whether the device can run it.
    `note` says why not, or why the rows below go on without this change. `step_ms` are the
    milliseconds of each step, without the first UNTIMED_STEPS.
    """

    config: Config
    above: str | None = None
    is_here: bool = True
    note: str = ""
    ledger: MemoryLedger | None = None
    measured_mib: float | None = None
    step_ms: list[float] = field(default_factory=list)
    held_out: float | None = None

    @property
    def predicted_mib(self) -> float | None:
        """The predicted peak in MiB."""
        return self.ledger.peak_mib if self.ledger else None


def possible(change: Mapping[str, Any], device: torch.device | None) -> tuple[bool, bool, str]:
    """Return (can the device run a change, does it emulate the precision, why)."""
    if device is None:
        return True, False, ""
    is_compiled = COMPILE_MODES[change.get("compile", "off")].is_on
    if is_compiled and device.type == "cpu":
        return False, False, "compiling takes longer than all other rows together"
    if "precision" not in change:
        return True, False, ""
    answer = here.support(change["precision"], device)
    note = "" if answer.ok and not answer.slow else answer.reason
    return answer.ok, answer.ok and answer.slow, note


def run(rows: Mapping[str, Row]) -> tuple[list[float], list[float]] | tuple[()]:
    """Train each row that is there and has no measurement yet, and fill it in.

    The first of them is run twice, one run right after the other. Returned are the milliseconds of
    its steps in both, to tell noise by; nothing if it was not timed. Records are saved, but none is
    reused: times of another hour cannot be compared with these. A run that does not complete leaves
    its reason in the row's note.
    """
    twice: list[list[float]] = []
    for row in rows.values():
        if row.is_here and not row.step_ms:
            _fill(row, run_experiment(row.config, rerun=True, progress=False))
        if row.step_ms and not twice:  # at once: a machine's other load changes
            again = run_experiment(row.config, repeat=1, rerun=True, progress=False)
            twice = [row.step_ms, again.series.step_ms[UNTIMED_STEPS:]]
    if not twice or len(twice[0]) != len(twice[1]):
        return ()
    return twice[0], twice[1]


def _fill(row: Row, record: RunRecord) -> None:
    if record.outcome != "completed":
        row.note = f"{record.outcome.replace('_', ' ')}: {record.reason}"
        return
    row.step_ms = record.series.step_ms[UNTIMED_STEPS:]
    if record.held_out:
        row.held_out = record.held_out[-1][1]
    if record.memory and not COMPILE_MODES[row.config.compile].is_on:
        row.measured_mib = record.memory.peak_mib
