"""The ladder: changes of one config, one on top of the other; each is predicted, run, compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from labutils.config.choices import COMPILE_MODES, MODELS
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.machine import here
from labutils.memory.ledger import MemoryLedger
from labutils.prediction.memory import predict_memory
from labutils.training.experiment import run_experiment
from labutils.training.records import RunRecord
from labutils.training.speed import UNTIMED_STEPS

SLOW_STEPS = 2  # of a precision that this device emulates: its bytes are asked for, not its speed
NOTHING = 0.005  # of the peak: less is called nothing


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


def plan(
    base: str,
    start: Mapping[str, Any],
    changes: Mapping[str, Mapping[str, Any]],
    device: torch.device | None = None,
) -> dict[str, Row]:
    """Return {name: Row}: each has its own change and all those above it.

    A row that `device` cannot run is no part of the rows below. Neither is a precision that it
    emulates slowly: that row keeps its bytes, in few steps. Without a device every row is there.
    Raises ConfigError for a change that no config can have.
    """
    rows: dict[str, Row] = {}
    kept: dict[str, Any] = {}
    above = None
    for position, (name, change) in enumerate(changes.items()):
        is_here, is_slow, note = possible(change, device)
        together = {**start, **kept, **change, "name": f"ladder_{position}"}
        if is_slow:
            together |= {"steps": SLOW_STEPS, "lr_warmup_steps": 1}
        rows[name] = Row(load_config(base, **together), above, is_here, note)
        if is_here and not is_slow:
            kept |= change
            above = name
    return rows


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


def predict(rows: Mapping[str, Row], device: Any, *, keep_outputs: str = "") -> None:
    """Predict the ledger of each row that is there; `keep_outputs` names a row that keeps them.

    A compiled row gets the ledger of the same row without compiling. `device` as for
    `predict_memory`, whose errors are raised.
    """
    known: dict[tuple[str, bool], MemoryLedger] = {}
    for name, row in rows.items():
        if not row.is_here:
            continue
        eager = row.config.model_copy(update={"compile": "off", "name": "row"})
        key = eager.model_dump_json(), name == keep_outputs
        if key not in known:
            known[key] = predict_memory(eager, device, keep_outputs=name == keep_outputs)
        row.ledger = known[key]


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


def stopwatch(batches: Iterable[Any], step_ms: list[float]) -> Iterator[Any]:
    """Yield the batches; append to `step_ms` the milliseconds from each batch to the next.

    A step is what a loop does between two batches, on a GPU until its work is done.
    """
    for batch in batches:
        begin = time.perf_counter()
        yield batch
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        step_ms.append(1000 * (time.perf_counter() - begin))


def saved_mib(rows: Mapping[str, Row], name: str) -> float | None:
    """Return what a row saves of the peak of the row above, in MiB; None if not known."""
    row = rows[name]
    if row.above is None:
        return None
    pair = [rows[row.above], row]
    peaks = [one.measured_mib for one in pair]
    return None if None in peaks else peaks[0] - peaks[1]


def without_effect(rows: Mapping[str, Row]) -> list[str]:
    """Return the names of the rows that save less than NOTHING of the peak above."""
    names = []
    for name, row in rows.items():
        saved = saved_mib(rows, name)
        if saved is None:
            continue
        if abs(saved) < NOTHING * rows[row.above].measured_mib:
            names.append(name)
    return names


def comparable(rows: Mapping[str, Row], device_type: str) -> list[list[str]]:
    """Return groups of rows that should reach the same held-out loss.

    Dropout changes what is learnt. A padded vocabulary takes other first weights from the seed.
    Rows of fewer steps stand apart.
    """
    groups: dict[tuple, list[str]] = {}
    for name, row in rows.items():
        if row.held_out is None:
            continue
        one = row.config.on(device_type)
        vocabulary = MODELS[one.model].vocabulary
        rounded = -(-vocabulary // 64) * 64 if one.pad_vocab else vocabulary
        groups.setdefault((one.dropout > 0, rounded, one.steps), []).append(name)
    return list(groups.values())


def table(rows: Mapping[str, Row], on_card: Mapping[str, Row]) -> pd.DataFrame:
    """Return a table of texts, a row each: peaks in MiB, ms of a step, loss, and the card's peak.

    Times of rows that ran one after the other are not compared.
    """
    lines = []
    for name, row in rows.items():
        middle = statistics.median(row.step_ms) if row.step_ms else None
        lines.append(
            {
                "row": name,
                "predicted": _text(row.predicted_mib, ",.1f"),
                "measured": _text(row.measured_mib, ",.1f"),
                "saves": _text(saved_mib(rows, name), "+.1f"),
                "ms": _text(middle, ",.0f"),
                "held-out": _text(row.held_out, ".4f"),
                "A100": _text(on_card[name].predicted_mib, ",.0f"),
            }
        )
    return pd.DataFrame(lines).set_index("row")


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
