"""One run is one JSON file in `runs/`: written whole, never overwritten, found, compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ValidationError

from labutils.config.schema import did_you_mean
from labutils.files import program, runs_dir, write_atomically
from labutils.memory.ledger import FROZEN, MemoryLedger
from labutils.training.train import Outcome, Series

RECORD_VERSION = 2


class RecordError(ValueError):
    """A record that does not exist or cannot be read. The message says which and why."""


class Timing(BaseModel):
    """Of the timed steps: the first ones are left out."""

    model_config = FROZEN

    median_step_ms: float
    tokens_per_s: float
    mfu: float | None = None  # model FLOP/s over `mfu_denominator`
    mfu_denominator: str = ""


class RunRecord(BaseModel):
    """What one training run was and what it gave.

    Immutable; `save` writes it, `load_record` reads it back.
    """

    model_config = FROZEN

    version: Literal[2] = RECORD_VERSION
    id: str
    created: str
    name: str
    note: str = ""
    config: dict[str, Any] = {}  # as resolved for the device
    environment: dict[str, str] = {}
    corpus: str = ""
    code: str = ""
    outcome: Outcome = "completed"
    reason: str = ""
    steps_planned: int = 0
    tokens_per_step: int = 0
    series: Series = Series()
    held_out: list[tuple[int, float]] = []  # (optimizer steps done, mean loss on held-out text)
    epochs: float = 0.0
    timing: Timing | None = None
    memory: MemoryLedger | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What can change a run's results: config, device, versions, text and code."""
        config = {k: v for k, v in self.config.items() if k not in ("note", "save_every")}
        versions = {
            k: v
            for k, v in self.environment.items()
            if k not in ("commit", "notebook", "torch.compile", "resumed")
        }
        rest = {
            "name": self.name,
            "text": self.corpus,
            "code": self.code,
            "steps planned": self.steps_planned,
        }
        return config | versions | rest

    @property
    def experiment(self) -> str:
        """Equal for runs of the same experiment: a hash of its `identity`."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return len(self.series.loss) * self.tokens_per_step

    def save(self) -> Path:
        """Write `runs/<name>-<id>.json` and return its path.

        Raises OSError if it exists or cannot be written.
        """
        path = runs_dir() / f"{self.name}-{self.id}.json"
        if path.exists():
            raise FileExistsError(f"{path} exists already; nothing is overwritten")
        write_atomically(path, self.model_dump_json(indent=1).encode())
        return path


def load_record(source: str | os.PathLike[str]) -> RunRecord:
    """Return the record meant by a run's id, a name (then the newest run of that name), or a path.

    Raises RecordError if there is none, or the file is damaged or of another version.
    """
    fits = [p for p in _record_files() if p.stem == str(source) or p.stem.endswith(f"-{source}")]
    fits = fits or [p for p in _record_files() if _name(p) == str(source)]
    path = fits[-1] if fits else Path(source)
    if not path.is_file():
        raise RecordError(
            f"no run {str(source)!r} in {runs_dir()}.{_nearest_run(str(source))} "
            f"`{program()} runs` lists them"
        )
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(
            f"{path.name} is not a version {RECORD_VERSION} record: {where} {first['msg']}"
        ) from None


def _nearest_run(name: str) -> str:
    """Return a hint at the run that is meant: one that adds overrides, or a like name."""
    names = list(dict.fromkeys(_name(path) for path in reversed(_record_files())))
    with_overrides = [other for other in names if other.startswith(f"{name}+")]
    return did_you_mean(name, with_overrides, 0) or did_you_mean(name, names)


def _name(path: Path) -> str:
    return path.stem.rsplit("-", 3)[0]  # <name>-<date>-<time>-<hex>


def _record_files() -> list[Path]:
    return sorted(runs_dir().glob("*-*-*-*.json"), key=lambda p: p.stem.rsplit("-", 3)[1:])


def find_runs() -> tuple[list[RunRecord], list[str]]:
    """Return all readable records, oldest first, and a line for each file that is not."""
    records, damaged = [], []
    for path in _record_files():
        try:
            records.append(load_record(path))
        except RecordError as error:
            damaged.append(str(error))
    return records, damaged


def find_equal(record: RunRecord) -> RunRecord | None:
    """Return the newest completed run of the same experiment, if there is one.

    Only files of the record's name are read, the newest first.
    """
    for path in reversed([path for path in _record_files() if _name(path) == record.name]):
        try:
            other = load_record(path)
        except RecordError:
            continue  # `find_runs` names it
        if other.experiment == record.experiment and other.outcome == "completed":
            return other
    return None


# ---- Side by side


def compare(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return a table, a row for each record; the first one is the baseline.

    Columns: the config keys that differ, then `step_ms` (median), `speedup` (× the baseline's),
    `tokens_per_s`, `peak_mib`, `saving_percent` (of the baseline's peak), `loss` (at the tokens
    that all runs saw), `outcome`. `table.attrs["notes"]` says what makes the rows unequal. There is
    no verdict on times: single runs are no pairs (see `noise.paired_ratio`).
    """
    trained = [record for record in records if record.series.loss]
    tokens = min((record.tokens for record in trained), default=0)
    differing = _differing_keys(trained)
    base = records[0]
    rows = []
    for label, record in zip(labels(records), records, strict=True):
        row: dict[str, Any] = {"run": label}
        row |= {key: record.config.get(key) for key in differing}
        if "steps" in row:
            row["steps"] = len(record.series.loss) or None  # run, not planned
        row |= dict.fromkeys(("step_ms", "speedup", "tokens_per_s", "peak_mib", "saving_percent"))
        if record.timing:
            row["step_ms"] = record.timing.median_step_ms
            row["tokens_per_s"] = record.timing.tokens_per_s
        if record.timing and base.timing:
            row["speedup"] = base.timing.median_step_ms / record.timing.median_step_ms
        if record.memory:
            row["peak_mib"] = record.memory.peak_mib
        if record.memory and base.memory:
            row["saving_percent"] = 100 * (1 - record.memory.peak_mib / base.memory.peak_mib)
        row["loss"] = _loss_at(record, tokens)
        row["outcome"] = record.outcome.replace("_", " ")
        if record.outcome != "completed":
            row["outcome"] += f": {record.reason}"
        rows.append(row)
    table = pd.DataFrame(rows).set_index("run")
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
    for column in digits.keys() & set(table):
        form = f"{{:,.{digits[column]}f}}".format
        text[column] = table[column].map(form, na_action="ignore")
    return text.where(table.notna(), "–")


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Return what tells records apart: the name, with the id where several have that name."""
    n_named = Counter(record.name for record in records)
    names = []
    for record in records:
        is_alone = n_named[record.name] == 1
        names.append(record.name if is_alone else f"{record.name}-{record.id}")
    return names


def _loss_at(record: RunRecord, tokens: int) -> float | None:
    step = tokens // record.tokens_per_step if record.tokens_per_step else 0
    return record.series.loss[step - 1] if 0 < step <= len(record.series.loss) else None


def _differing_keys(records: Sequence[RunRecord]) -> list[str]:
    """Return the keys of which not all configs have one value; `steps` is what was run."""
    keys = dict.fromkeys(key for record in records for key in record.config)
    differing = []
    for key in keys:
        values = {json.dumps(record.config.get(key)) for record in records}
        if key == "steps":
            values = {len(record.series.loss) for record in records}
        if len(values) > 1 and key not in ("name", "note"):
            differing.append(key)
    return differing


def _notes(records: Sequence[RunRecord], tokens: int) -> list[str]:
    """Return what a reader must know before comparing these rows."""
    notes = []
    facts_of = {
        "device": lambda record: record.environment.get("device", ""),
        "torch version": lambda record: record.environment.get("torch", ""),
        "transformers version": lambda record: record.environment.get("transformers", ""),
        "code version": lambda record: record.code,
        "corpus": lambda record: record.corpus,
        "tokens per step": lambda record: str(record.tokens_per_step),
    }
    for what, fact_of in facts_of.items():
        values = {fact_of(record) for record in records}
        if len(values) > 1:
            values = ", ".join(sorted(values))
            notes.append(f"Unequal {what}: {values}. Compare these rows with care.")
    times = [datetime.fromisoformat(record.created) for record in records]
    if times and max(times) - min(times) > timedelta(minutes=30):
        notes.append(
            "Recorded more than half an hour apart: a machine's other load changes, so compare "
            "times with care."
        )
    if len({record.tokens for record in records}) > 1:
        shorter = dict.fromkeys(record.name for record in records if record.tokens == tokens)
        notes.append(
            f"`loss` is after {tokens} tokens, where the shortest runs ({', '.join(shorter)}) "
            "ended."
        )
    return notes
