"""Recorded runs side by side: one table, and what makes its rows unequal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from labutils.memory.ledger import MIB
from labutils.training.records import RecordError, RunRecord

if TYPE_CHECKING:
    import pandas as pd


def compare(records: Sequence[RunRecord], baseline: str = "fp32") -> pd.DataFrame:
    """Return a table, one row per experiment, against the runs named `baseline`.

    Columns: the config keys that differ, then `step_ms` (median), `speedup` (×), `tokens_per_s`,
    `peak_mib`, `saving_percent`, `loss` (at the tokens that all runs saw), `verdict`. A time
    difference within the baseline's own spread is called "no measurable difference".
    `table.attrs["notes"]` says what makes the rows unequal. Repeated runs of an experiment share a
    row: medians of their medians. Raises RecordError if there is no baseline.
    """
    import pandas as pd

    groups = group_by_experiment(records)
    if baseline not in groups:
        raise RecordError(f"no run is named {baseline!r}; there are: {', '.join(groups) or 'none'}")
    trained = [r for r in records if r.series.loss]
    tokens = min((r.tokens for r in trained), default=0)
    differing = _differing_keys(trained)
    if len({len(r.series.loss) for r in trained}) > 1 and "steps" not in differing:
        differing.append("steps")
    base_ms, base_spread = _time(groups[baseline])
    base_peak = _peak(groups[baseline])
    rows = []
    for name, runs in groups.items():
        ms, spread = _time(runs)
        peak = _peak(runs)
        speedup = base_ms / ms if base_ms and ms else None
        rows.append(
            {
                "run": name,
                **{key: runs[0].config.get(key) for key in differing},
                "step_ms": ms,
                "speedup": speedup,
                "tokens_per_s": runs[0].tokens_per_step / ms * 1000 if ms else None,
                "peak_mib": peak / MIB if peak else None,
                "saving_percent": 100 * (1 - peak / base_peak) if base_peak and peak else None,
                "loss": _loss_at(runs[0], tokens),
                "verdict": _verdict(runs[0], name == baseline, speedup, max(base_spread, spread)),
            }
        )
    table = pd.DataFrame(rows).set_index("run")
    if "steps" in table:
        # run, not planned
        table["steps"] = [len(runs[0].series.loss) or None for runs in groups.values()]
    table.attrs["notes"] = _notes(trained, tokens)
    return table


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `compare` as rounded texts, and – where a run has no such value."""
    digits = {
        "steps": 0,
        "step_ms": 1,
        "speedup": 3,
        "tokens_per_s": 0,
        "peak_mib": 1,
        "saving_percent": 1,
        "loss": 4,
    }
    text = table.astype(object)
    for column, n in {c: n for c, n in digits.items() if c in table}.items():
        text[column] = [f"{v:,.{n}f}" if v == v and v is not None else "–" for v in table[column]]
    return text.where(table.notna(), "–")


def group_by_experiment(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return {label: runs of one experiment}. Experiments of one name have the id in the label."""
    experiments: dict[str, list[RunRecord]] = {}
    for record in records:
        experiments.setdefault(record.experiment, []).append(record)
    labels: dict[str, list[RunRecord]] = {}
    for runs in experiments.values():
        name = runs[0].name
        labels[f"{name}-{runs[0].id}" if name in labels else name] = runs
    return labels


def _time(runs: list[RunRecord]) -> tuple[float | None, float]:
    """Return (median step in ms, relative spread): repeats' range or median's notch, if larger."""
    timings = [r.timing for r in runs if r.timing]
    if not timings:
        return None, 0.0
    medians = [t.median_step_ms for t in timings]
    return statistics.median(medians), max(
        max(medians) / min(medians) - 1, *(t.spread for t in timings)
    )


def _peak(runs: list[RunRecord]) -> int | None:
    return max((r.memory.peak_bytes for r in runs if r.memory), default=None)


def _loss_at(record: RunRecord, tokens: int) -> float | None:
    step = tokens // record.tokens_per_step if record.tokens_per_step else 0
    return record.series.loss[step - 1] if 0 < step <= len(record.series.loss) else None


def _verdict(record: RunRecord, is_baseline: bool, speedup: float | None, spread: float) -> str:
    if record.outcome == "unsupported":
        return f"not on this device: {record.reason}"
    if record.outcome != "completed":
        return f"{record.outcome.replace('_', ' ')}: {record.reason}"
    if is_baseline:
        return f"baseline, times repeat within {100 * spread:.1f} %"
    if speedup is None:
        return "not timed"
    if 1 / (1 + spread) <= speedup <= 1 + spread:
        return "time: no measurable difference"
    return (
        f"{speedup:.2f} times as fast" if speedup > 1 else f"takes {1 / speedup:.3g} times as long"
    )


def _differing_keys(records: Sequence[RunRecord]) -> list[str]:
    keys = dict.fromkeys(
        key for r in records for key in r.config if key not in ("name", "note", "when_cpu")
    )
    return [key for key in keys if len({json.dumps(r.config.get(key)) for r in records}) > 1]


def _notes(records: Sequence[RunRecord], tokens: int) -> list[str]:
    """Return what a reader must know before comparing these rows."""
    notes = []
    for what, values in (
        ("device", {r.environment.get("device", "") for r in records}),
        ("torch version", {r.environment.get("torch", "") for r in records}),
        ("transformers version", {r.environment.get("transformers", "") for r in records}),
        ("code version", {r.code for r in records}),
        ("corpus", {r.corpus for r in records}),
        ("tokens per step", {str(r.tokens_per_step) for r in records}),
    ):
        if len(values) > 1:
            notes.append(
                f"Unequal {what}: {', '.join(sorted(values))}. Compare these rows with care."
            )
    times = [datetime.fromisoformat(r.created) for r in records]
    if times and max(times) - min(times) > timedelta(minutes=30):
        notes.append(
            "Recorded more than half an hour apart: a machine's other load changes, so compare "
            "times with care."
        )
    if len({r.tokens for r in records}) > 1:
        shorter = dict.fromkeys(r.name for r in records if r.tokens == tokens)
        notes.append(
            f"`loss` is after {tokens} tokens, where the shortest runs ({', '.join(shorter)}) "
            "ended."
        )
    return notes
