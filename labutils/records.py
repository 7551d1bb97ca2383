"""One run = one JSON file in `runs/`: written whole or not at all, never overwritten, found again, compared."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    import pandas as pd

REPO_DIR = Path(__file__).resolve().parent.parent
REFERENCE_DIR = Path(__file__).resolve().parent / "reference"
RECORD_VERSION = 1
MIB = 2**20
# A change in these modules may change a loss, a time or a peak, so an older record is not reused.
_CODE = (
    "checkpointing.py",
    "compiling.py",
    "data.py",
    "experiment.py",
    "memory.py",
    "models.py",
    "optimizers.py",
    "precision.py",
    "training.py",
)


class RecordError(ValueError):
    """A record that does not exist or cannot be read. The message says which and why."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Series(_Part):
    """One value per optimizer step, in order. `grad_norm` is before clipping, NaN where clipping is off."""

    loss: list[float] = []  # mean over the step's target tokens
    grad_norm: list[float] = []
    learning_rate: list[float] = []
    loss_scale: list[float] = []  # before the step; 1 where nothing is scaled
    skipped: list[bool] = []  # the scaler saw inf or NaN and left the weights alone
    step_ms: list[float] = []


class Timing(_Part):
    """Medians over the timed steps, the first ones left out. `spread` is relative: the notch of the median."""

    median_step_ms: float
    spread: float
    tokens_per_s: float
    mfu: float | None = None  # model FLOP/s over `mfu_denominator`
    mfu_denominator: str = ""


class MemoryLedger(_Part):
    """Bytes of one optimizer step, measured or predicted: for each phase, by category at the instant of its peak."""

    phases: dict[str, dict[str, int]]
    method: str
    reserved_bytes: int | None = None  # CUDA: what the caching allocator holds, more than is allocated
    reserved_expandable_bytes: int | None = None  # the same with expandable segments, predicted
    needed_bytes: int | None = None  # of the smallest card on which it completes, context included, predicted
    needed_expandable_bytes: int | None = None  # the same with expandable segments
    timeline: list[tuple[str, list[list[int]]]] = []  # (phase, [[position, bytes by category, …], …]) in order

    @property
    def peak_phase(self) -> str:
        """The phase in which the step's peak falls."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated at the peak."""
        return sum(self.categories.values())


class RunRecord(_Part):
    """What one training run was and what it gave. Immutable; `save` writes it, `load_record` reads it back."""

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
    outcome: Literal["completed", "interrupted", "non_finite", "out_of_memory", "unsupported"] = "completed"
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
        """What can change a run's results: of its config, the device and the versions; its text and code, hashed."""
        config = {k: v for k, v in self.config.items() if k not in ("note", "save_every")}
        versions = {k: v for k, v in self.environment.items() if k not in ("commit", "torch.compile", "resumed")}
        rest = {"name": self.name, "text": self.corpus, "code": self.code, "steps planned": self.steps_planned}
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
        """Write `runs/<name>-<id>.json` and return its path. Raises OSError if it exists or cannot be written."""
        path = runs_dir() / f"{self.name}-{self.id}.json"
        if path.exists():
            raise FileExistsError(f"{path} exists already; nothing is overwritten")
        write_atomically(path, self.model_dump_json(indent=1).encode())
        return path


def runs_dir() -> Path:
    """Return the folder of generated files: `runs/` beside the notebooks, or what LABUTILS_RUNS names."""
    return Path(os.environ.get("LABUTILS_RUNS") or REPO_DIR / "runs").expanduser().resolve()


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader sees all of it or none, creating its folder. Raises OSError.

    `content` may be a function that writes into the file it is given. A process killed meanwhile leaves a hidden file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}-")
    try:
        with os.fdopen(handle, "w+b") as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # in a shared folder others may read it; mkstemp lets nobody
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def require_room(n_bytes: int = 2**18) -> None:
    """Raise OSError if so many bytes, more than most records have, cannot be written into runs/; leaves nothing."""
    try:
        runs_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs_dir()) as file:
            file.write(bytes(n_bytes))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        named = "LABUTILS_RUNS names it" if os.environ.get("LABUTILS_RUNS") else "LABUTILS_RUNS can name another folder"
        raise OSError(f"nothing can be written to {runs_dir()} ({error.strerror}); {named}") from error


def new_id() -> tuple[str, str]:
    """Return (id, time of creation): sorted ids are in order of time, and no two are equal."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S%f}-{secrets.token_hex(2)}", now.isoformat(timespec="seconds")


def code_version() -> str:
    """Return a hash of the modules that decide a run's numbers."""
    digest = hashlib.sha256()
    for name in _CODE:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the git commit of the course, with + if files have changed since; "unknown" outside a git checkout."""
    command = ["git", "-C", str(REPO_DIR), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() or "unknown"


def load_record(source: str | os.PathLike[str]) -> RunRecord:
    """Return the record meant by a run's id, a name (then the newest run of that name), or a path.

    Raises RecordError if there is none, or the file is damaged or of another version.
    """
    fits = [p for p in _record_files() if p.stem == str(source) or p.stem.endswith(f"-{source}")]
    fits = fits or [p for p in _record_files() if _name(p) == str(source)]
    path = fits[-1] if fits else Path(source)
    if not path.is_file():
        raise RecordError(f"no run {str(source)!r} in {runs_dir()}; `python -m labutils runs` lists them")
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{path.name} is not a version {RECORD_VERSION} record: {where} {first['msg']}") from None


def load_repeats(source: str | os.PathLike[str]) -> list[RunRecord]:
    """Return the record that `load_record` returns, with all completed repeats of its experiment, oldest first."""
    record = load_record(source)
    repeats = [r for r in find_runs()[0] if r.experiment == record.experiment and r.outcome == "completed"]
    return repeats if any(r.id == record.id for r in repeats) else [record]


def _name(path: Path) -> str:
    return path.stem.rsplit("-", 3)[0]  # <name>-<date>-<time>-<hex>


def _record_files() -> list[Path]:
    return sorted(runs_dir().glob("*-*-*-*.json"), key=lambda p: p.stem.rsplit("-", 3)[1:])


def state_files(name: str | None = None) -> list[Path]:
    """Return the states in runs/ that unfinished runs (of a name) have left, sorted: see `resume.Saver`."""
    files = (p for p in runs_dir().glob("*.state") if p.is_file())
    return sorted(p for p in files if name in (None, p.stem.rsplit("-", 5)[0]))


def find_runs() -> tuple[list[RunRecord], list[str]]:
    """Return all readable records, oldest first, and one line for each file that is not readable."""
    records, damaged = [], []
    for path in _record_files():
        try:
            records.append(load_record(path))
        except RecordError as error:
            damaged.append(str(error))
    return records, damaged


def find_equal(record: RunRecord) -> RunRecord | None:
    """Return the newest completed run of the same experiment and repeat, if there is one."""
    fits = [r for r in find_runs()[0] if r.outcome == "completed" and r.experiment == record.experiment]
    fits = [r for r in fits if r.repeat == record.repeat]
    return fits[-1] if fits else None


def reference_runs(name: str) -> list[RunRecord]:
    """Return the recorded runs of the named experiment on named hardware; an empty list if none is recorded yet."""
    records = [load_record(path) for path in sorted(REFERENCE_DIR.glob("*.json")) if "snapshot" not in path.name]
    return [record for record in records if record.name == name]


def compare(records: Sequence[RunRecord], baseline: str = "fp32") -> pd.DataFrame:
    """Return a table, one row per experiment, against the runs named `baseline`.

    Columns: the config keys that differ, then `step_ms` (median), `speedup` (×), `tokens_per_s`, `peak_mib`,
    `saving_percent`, `loss` (at the tokens that all runs saw), `verdict`. A time difference within the baseline's own
    spread is called "no measurable difference". `table.attrs["notes"]` says what makes the rows unequal.
    Repeated runs of an experiment share a row: medians of their medians. Raises RecordError if there is no baseline.
    """
    import pandas as pd

    groups = grouped(records)
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
        table["steps"] = [len(runs[0].series.loss) or None for runs in groups.values()]  # run, not planned
    table.attrs["notes"] = _notes(trained, tokens)
    return table


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `compare` as short texts: rounded, and – where a run has no such value."""
    digits = {"steps": 0, "step_ms": 1, "speedup": 3, "tokens_per_s": 0, "peak_mib": 1, "saving_percent": 1, "loss": 4}
    text = table.astype(object)
    for column, n in {c: n for c, n in digits.items() if c in table}.items():
        text[column] = [f"{v:,.{n}f}" if v == v and v is not None else "–" for v in table[column]]
    return text.where(table.notna(), "–")


def grouped(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return {label: runs of one experiment}: the label is the name, with the id where two experiments share it."""
    experiments: dict[str, list[RunRecord]] = {}
    for record in records:
        experiments.setdefault(record.experiment, []).append(record)
    labels: dict[str, list[RunRecord]] = {}
    for runs in experiments.values():
        name = runs[0].name
        labels[f"{name}-{runs[0].id}" if name in labels else name] = runs
    return labels


def _time(runs: list[RunRecord]) -> tuple[float | None, float]:
    """Return (median step in ms, relative spread): the larger of the repeats' range and of a median's notch."""
    timings = [r.timing for r in runs if r.timing]
    if not timings:
        return None, 0.0
    medians = [t.median_step_ms for t in timings]
    return statistics.median(medians), max(max(medians) / min(medians) - 1, *(t.spread for t in timings))


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
    return f"{speedup:.2f} times as fast" if speedup > 1 else f"takes {1 / speedup:.2g} times as long"


def _differing_keys(records: Sequence[RunRecord]) -> list[str]:
    keys = dict.fromkeys(key for r in records for key in r.config if key not in ("name", "note", "when_cpu"))
    return [key for key in keys if len({json.dumps(r.config.get(key)) for r in records}) > 1]


def _notes(records: Sequence[RunRecord], tokens: int) -> list[str]:
    """Return what a reader must know before comparing these rows."""
    notes = []
    for what, values in (
        ("device", {r.environment.get("device", "") for r in records}),
        ("torch version", {r.environment.get("torch", "") for r in records}),
        ("transformers version", {r.environment.get("transformers", "") for r in records}),
        ("malloc", {r.environment.get("malloc", "keeps freed blocks: faster steps") for r in records}),
        ("code version", {r.code for r in records}),
        ("corpus", {r.corpus for r in records}),
        ("tokens per step", {str(r.tokens_per_step) for r in records}),
    ):
        if len(values) > 1:
            notes.append(f"Unequal {what}: {', '.join(sorted(values))}. Compare these rows with care.")
    times = [datetime.fromisoformat(r.created) for r in records]
    if times and max(times) - min(times) > timedelta(minutes=30):
        notes.append(
            "Recorded more than half an hour apart: a machine's other load changes, so compare times with care."
        )
    if len({r.tokens for r in records}) > 1:
        shorter = dict.fromkeys(r.name for r in records if r.tokens == tokens)
        notes.append(f"`loss` is after {tokens} tokens, where the shortest runs ({', '.join(shorter)}) ended.")
    return notes
