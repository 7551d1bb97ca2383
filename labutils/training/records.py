"""One run is one JSON file in `runs/`: written whole, never overwritten, found again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from labutils.config.yaml_source import did_you_mean
from labutils.files import program, runs_dir, write_atomically
from labutils.memory.ledger import FROZEN, MemoryLedger

RECORD_VERSION = 1
Outcome = Literal["completed", "interrupted", "non_finite", "out_of_memory", "unsupported"]


class RecordError(ValueError):
    """A record that does not exist or cannot be read. The message says which and why."""


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


class Timing(BaseModel):
    """Medians over the timed steps, the first ones left out.

    `spread` is relative: the notch of the median.
    """

    model_config = FROZEN

    median_step_ms: float
    spread: float
    tokens_per_s: float
    mfu: float | None = None  # model FLOP/s over `mfu_denominator`
    mfu_denominator: str = ""


class RunRecord(BaseModel):
    """What one training run was and what it gave.

    Immutable; `save` writes it, `load_record` reads it back.
    """

    model_config = FROZEN

    version: Literal[1] = RECORD_VERSION
    id: str
    created: str
    name: str
    note: str = ""
    config: dict[str, Any] = {}  # as resolved for the device
    environment: dict[str, str] = {}
    corpus: str = ""
    code: str = ""
    repeat: int = 0
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


def load_repeats(source: str | os.PathLike[str]) -> list[RunRecord]:
    """Return the record that `load_record` returns, with all completed repeats of its experiment,
    oldest first.
    """
    record = load_record(source)
    repeats = [
        r for r in find_runs()[0] if r.experiment == record.experiment and r.outcome == "completed"
    ]
    return repeats if any(r.id == record.id for r in repeats) else [record]


def _name(path: Path) -> str:
    return path.stem.rsplit("-", 3)[0]  # <name>-<date>-<time>-<hex>


def _record_files() -> list[Path]:
    return sorted(runs_dir().glob("*-*-*-*.json"), key=lambda p: p.stem.rsplit("-", 3)[1:])


def state_path(name: str, repeat: int) -> Path:
    """Return where an unfinished run keeps its state: see `resume.Saver`."""
    return runs_dir() / f"{name}-{repeat}.state"


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
    """Return the newest completed run of the same experiment and repeat, if there is one.

    Only files of the record's name are read, the newest first.
    """
    for path in reversed([path for path in _record_files() if _name(path) == record.name]):
        try:
            other = load_record(path)
        except RecordError:
            continue  # `find_runs` names it
        is_equal = other.experiment == record.experiment and other.repeat == record.repeat
        if is_equal and other.outcome == "completed":
            return other
    return None
