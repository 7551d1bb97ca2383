"""A run as a JSON file in `runs/`, records side by side, and the long runs that ship.

Taught in 01, section 6.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from labutils.config.schema import did_you_mean
from labutils.files import REFERENCE_DIR, program, runs_dir, write_atomically
from labutils.memory.ledger import MemoryLedger
from labutils.training.train import Series

# They may differ between runs of equal losses.
NO_INFLUENCE = {"note", "commit", "notebook", "torch.compile"}
PLANNED = "killed, or still running"  # the reason in a record until its run ends
DIGITS = {"step_ms": 1, "speedup": 3, "tokens_per_s": 0}  # of a table's numbers
DIGITS |= {"peak_mib": 1, "saving_percent": 1, "loss": 4}
Outcome = Literal[
    "completed", "interrupted", "failed", "non_finite", "out_of_memory", "unsupported"
]


class RecordError(ValueError):
    """A record that does not exist or cannot be read. The message says which and why."""


class Timing(BaseModel):
    """Of the timed steps: the first ones are left out."""

    median_step_ms: float
    tokens_per_s: float
    mfu: float  # model FLOP/s over `mfu_denominator`
    mfu_denominator: str

    def __str__(self) -> str:
        """Tokens per second, and how much of the device's rate that is, if the rate is known."""
        speed = f"{self.tokens_per_s:,.0f} tokens/s"
        share = f", MFU {100 * self.mfu:.1f} % of {self.mfu_denominator}"
        return speed + (share if self.mfu else "")


class RunRecord(BaseModel):
    """What one training run was and what it gave. `save` writes it, `load_record` reads it back."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    # A file of another version is refused: to guess what its keys meant would be worse.
    version: Literal[4] = 4
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
    epochs: float = 0.0
    timing: Timing | None = None
    memory: MemoryLedger | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What can change a run's results: config, device, versions, text and code."""
        facts = self.config | self.environment
        facts |= {"name": self.name, "text": self.corpus, "code": self.code}
        return {key: value for key, value in facts.items() if key not in NO_INFLUENCE}

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return len(self.series.loss) * self.tokens_per_step

    @property
    def ending(self) -> str:
        """How the run ended, and why if it is not completed."""
        words = self.outcome.replace("_", " ")
        return words if self.outcome == "completed" else f"{words}: {self.reason}"

    def __str__(self) -> str:
        """How it ended and on which device, its speed, its peak, and its last losses."""
        device, series = self.environment.get("device", "an unknown device"), self.series
        ending = f"{len(series.loss)} steps" if self.outcome == "completed" else self.ending
        lines = [f"{self.name}-{self.id} on {device}: {ending}"]
        if self.timing:
            lines.append(str(self.timing))
        if self.memory:
            lines.append(f"peak {self.memory.peak_mib:,.1f} MiB, {self.memory.method}")
        if series.loss:
            held_out = f", held out {series.held_out[-1][1]:.4f}" if series.held_out else ""
            lines.append(f"loss {series.loss[-1]:.4f}{held_out}")
        return "\n".join(lines)

    def save(self) -> Path:
        """Write `runs/<name>-<id>.json` and return its path.

        Raises OSError, which names LABUTILS_RUNS, if it cannot.
        """
        path = runs_dir() / f"{self.name}-{self.id}.json"
        try:
            write_atomically(path, self.model_dump_json(indent=1).encode())
        except OSError as error:
            problem = f"nothing can be written to {runs_dir()} ({error.strerror})"
            raise OSError(f"{problem}; LABUTILS_RUNS names the folder of runs") from error
        return path


def load_record(source: str | os.PathLike[str]) -> RunRecord:
    """Return the record meant by a run's id, a name, or a path.

    Of several of a name it is the newest, but one that is not over, or was killed, only if there is
    no other. Raises RecordError if there is none, or the file is damaged or of another version.
    """
    source, names, paths = str(source), [], [Path(source)] if Path(source).is_file() else []
    for record_file in reversed(_record_files()):
        names.append(name := record_file.stem.rsplit("-", 3)[0])  # of <name>-<date>-<time>-<hex>
        if source == name or f"-{record_file.stem}".endswith(f"-{source}"):
            paths.append(record_file)
    if not paths:
        hint = did_you_mean(source, names, cutoff=0.4)
        problem = f"no run {source!r} in {runs_dir()}.{hint} `{program()} runs` lists them"
        raise RecordError(problem)
    newest = _read(paths[0])
    if newest.reason != PLANNED:
        return newest
    return next((r for r in map(_read, paths[1:]) if r.reason != PLANNED), newest)


def _read(path: Path) -> RunRecord:
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = f"{path.name} is no record of a run"
        raise RecordError(f"{problem}: {error.errors()[0]['msg']}") from None


def _record_files(name: str = "*") -> list[Path]:
    """Return the records of a name, or of all, oldest first."""
    paths = runs_dir().glob(f"{name}-*-*-*.json")
    return sorted(paths, key=lambda path: path.stem.rsplit("-", 3)[1:])


def find_runs() -> tuple[list[RunRecord], list[str]]:
    """Return all readable records, oldest first, and a line for each file that is not."""
    records, damaged = [], []
    for path in _record_files():
        try:
            records.append(_read(path))
        except RecordError as error:
            damaged.append(str(error))
    return records, damaged


def find_equal(planned: RunRecord) -> RunRecord | None:
    """Return the newest completed run of the same experiment, if there is one.

    Only files of the record's name are read, the newest first.
    """
    for path in reversed(_record_files(planned.name)):
        # A damaged file must not stop a run that does not need it.
        with suppress(RecordError):  # `find_runs` names it
            other = _read(path)
            is_whole = other.outcome == "completed" and other.steps_planned == planned.steps_planned
            if is_whole and other.identity == planned.identity:
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
    # Runs of unequal batches or lengths are only comparable after equally many tokens.
    tokens = min((record.tokens for record in trained), default=0)
    differing = _differing([_config_as_run(record) for record in trained])
    rows = []
    for record in records:
        row = _config_as_run(record) | {"outcome": record.ending}
        if record.timing:
            row["step_ms"] = record.timing.median_step_ms
            row["tokens_per_s"] = record.timing.tokens_per_s
        if record.memory:
            row["peak_mib"] = record.memory.peak_mib
        if record.series.loss and tokens >= record.tokens_per_step:
            row["loss"] = record.series.loss[tokens // record.tokens_per_step - 1]
        rows.append(row)
    index = pd.Index(labels(records), name="run")
    table = pd.DataFrame(rows, index, [*differing, *DIGITS, "outcome"])
    # No verdict on times: a single run has no noise to hold a difference against.
    table["speedup"] = table.step_ms.iloc[0] / table.step_ms
    table["saving_percent"] = 100 * (1 - table.peak_mib / table.peak_mib.iloc[0])
    table.attrs["notes"] = _notes(trained, tokens)
    return table


def _config_as_run(record: RunRecord) -> dict[str, Any]:
    return record.config | {"steps": len(record.series.loss) or None}  # run, not planned


def summary(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return a row of texts for each record, and – for what it has not: how it ended, and what it
    gave at its end.
    """
    rows = []
    for record in records:
        series = record.series
        row = {"device": record.environment.get("device", ""), "outcome": record.outcome}
        row |= {"steps": str(len(series.loss)), "tokens/s": "–", "peak MiB": "–"}
        row |= {"loss": "–", "held-out": "–", "note": shorten(record.note, 40, placeholder=" …")}
        if record.timing:
            row["tokens/s"] = f"{record.timing.tokens_per_s:.0f}"
        if record.memory:
            row["peak MiB"] = f"{record.memory.peak_mib:.1f}"
        if series.loss:
            row["loss"] = f"{series.loss[-1]:.4f}"
        if series.held_out:
            row["held-out"] = f"{series.held_out[-1][1]:.4f}"
        rows.append(row)
    index = [f"{record.name}-{record.id}" for record in records]
    return pd.DataFrame(rows, pd.Index(index, name="run"))


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `compare` as rounded texts, and – where a run has no such value."""
    text = table.astype(object)
    for column in table.columns.intersection([*DIGITS, "steps"]):
        form = f"{{:,.{DIGITS.get(column, 0)}f}}".format
        text[column] = table[column].map(form, na_action="ignore")
    return text.where(table.notna(), "–")


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Return what tells records apart: the name, with the id where several have that name."""
    names, unique = [record.name for record in records], []
    for record in records:
        is_alone = names.count(record.name) == 1
        unique.append(record.name if is_alone else f"{record.name}-{record.id}")
    return unique


def _differing(facts: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return facts of several runs as a table, without the columns in which all are equal."""
    table = pd.DataFrame(facts).drop(columns=[*NO_INFLUENCE, "name"], errors="ignore").astype(str)
    return table.loc[:, table.nunique() > 1]


def _notes(records: Sequence[RunRecord], tokens: int) -> list[str]:
    """Return what a reader must know before comparing these rows."""
    facts = []
    for record in records:
        fact = {"corpus": record.corpus, "code version": record.code}
        facts.append(record.environment | fact | {"tokens per step": record.tokens_per_step})
    notes = []
    for name, values in _differing(facts).items():
        different = ", ".join(sorted(values.unique()))
        notes.append(f"Unequal {name}: {different}. Compare these rows with care.")
    shortest = dict.fromkeys(record.name for record in records if record.tokens == tokens)
    if any(record.tokens > tokens for record in records):
        ended = f"where the shortest runs ({', '.join(shortest)}) ended."
        notes.append(f"`loss` is after {tokens} tokens, {ended}")
    return notes


# ---- Long runs that ship


def read_record(name: str, folder: Path = REFERENCE_DIR) -> pd.DataFrame:
    """Return recorded long runs, a row for each arm, seed and point; `attrs` has their facts.

    These records ship: "convergence", "convergence_rates" and "stability". Their first lines are
    facts, `# key: value`: the machine, the versions, the rules.
    """
    path = folder / f"{name}.csv"
    table = pd.read_csv(path, comment="#")
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = [line[2:].split(": ", 1) for line in lines if line.startswith("# ")]
    table.attrs.update(facts)
    return table
