"""From a config to a saved record: one run is one JSON file in `runs/`. Records side by side."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from labutils import machine
from labutils.config.card import CARDS
from labutils.config.choices import COMPILE_MODES, PRECISIONS
from labutils.config.reader import load_config
from labutils.config.schema import Config, ConfigError, Run, did_you_mean, resolve
from labutils.files import (
    code_version,
    commit,
    new_id,
    program,
    require_room,
    runs_dir,
    write_atomically,
)
from labutils.machine import in_notebook
from labutils.memory.device_memory import (
    expandable_segments,
    free_memory,
    memory_limit,
    without_expandable_segments,
)
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.memory.ledger import MemoryLedger
from labutils.memory.measure import measure_step
from labutils.techniques.precision import tf32
from labutils.techniques.schedule import learning_rate_at
from labutils.training import accelerated
from labutils.training.resume import Saver
from labutils.training.train import Series, to_device, train
from labutils.workload.build import Data, build_data, build_workload

RECORD_VERSION = 3
UNTIMED_STEPS = 2  # the first steps allocate optimizer state and choose kernels
NO_INFLUENCE = {"note", "save_every", "commit", "notebook", "torch.compile", "resumed"}
DIGITS = {"step_ms": 1, "speedup": 3, "tokens_per_s": 0}  # of a table's numbers
DIGITS |= {"peak_mib": 1, "saving_percent": 1, "loss": 4}
Outcome = Literal["completed", "interrupted", "non_finite", "out_of_memory", "unsupported"]


# ---- The record


class RecordError(ValueError):
    """A record that does not exist or cannot be read. The message says which and why."""


class Timing(BaseModel):
    """Of the timed steps: the first ones are left out."""

    median_step_ms: float
    tokens_per_s: float
    mfu: float  # model FLOP/s over `mfu_denominator`
    mfu_denominator: str


class RunRecord(BaseModel):
    """What one training run was and what it gave. `save` writes it, `load_record` reads it back."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    version: Literal[3] = RECORD_VERSION
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

    def save(self) -> Path:
        """Write `runs/<name>-<id>.json` and return its path. Raises OSError if it cannot."""
        path = runs_dir() / f"{self.name}-{self.id}.json"
        write_atomically(path, self.model_dump_json(indent=1).encode())
        return path


def load_record(source: str | os.PathLike[str]) -> RunRecord:
    """Return the record meant by a run's id, a name (then the newest run of that name), or a path.

    Raises RecordError if there is none, or the file is damaged or of another version.
    """
    source, path, names = str(source), Path(source), []
    for record_file in _record_files():
        name = record_file.stem.rsplit("-", 3)[0]  # of <name>-<date>-<time>-<hex>
        names.insert(0, name)
        if source == name or f"-{record_file.stem}".endswith(f"-{source}"):
            path = record_file
    if not path.is_file():
        hint = did_you_mean(source, names, cutoff=0.4)
        problem = f"no run {source!r} in {runs_dir()}.{hint} `{program()} runs` lists them"
        raise RecordError(problem)
    return _read(path)


def _read(path: Path) -> RunRecord:
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = f"{path.name} is not a version {RECORD_VERSION} record"
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
        with suppress(RecordError):  # `find_runs` names it
            other = _read(path)
            is_whole = other.outcome == "completed" and other.steps_planned == planned.steps_planned
            if is_whole and other.identity == planned.identity:
                return other
    return None


# ---- The run


def run_config(
    config: Config | str,
    device: torch.device,
    *,
    rerun: bool,
    resume: bool,
    progress: bool,
    require_memory: Callable[[Config], None],
    ways_out: Callable[[Config, torch.device], str],
) -> RunRecord:
    """Train a config (or a YAML file's), measure one more step, save and return the record.

    See `lab.run_experiment`. `require_memory` raises torch.OutOfMemoryError if a config, resolved
    for a CPU, has no room there. `ways_out` returns what to change in a config that has run out of
    memory.
    """
    device = accelerated.own_device(device)
    progress = progress and accelerated.rank() == 0
    config = config if isinstance(config, Config) else load_config(config)
    run = resolve(config, machine.card(device), to_train=True)
    run = replace(run, steps=accelerated.from_first(run.steps))  # by a noisy probe
    require_equal_shares(run.config, resume)
    data = build_data(run.config)
    record = planned_record(run, device, data)
    saver = Saver(record.name, run.config.save_every)
    saver.plan(record.identity, resume)
    is_new = rerun or saver.done
    known = None if is_new else accelerated.from_first(find_equal(record))
    if known:
        if progress:
            print(
                f"{known.name}: reusing run {known.id} "
                "(equal config, code, corpus and device; rerun=True forces)"
            )
        return known
    if not accelerated.rank():
        require_room()  # better now than after hours
    if saver.done:
        record.environment["resumed"] = f"after step {saver.done}"
    if progress:
        announce(run, device, saver)
    try:
        with (
            expandable_segments(run.config.expandable_segments, device),
            memory_limit(run.config.memory_limit_gib, device),
        ):
            if device.type == "cpu":
                require_memory(run.config)
            _train_and_measure(run, device, data, saver, record, progress)
    except (KeyboardInterrupt, FloatingPointError, RuntimeError, MemoryError) as error:
        record.outcome, reason = _outcome_of(error)
        n_done = len(record.series.loss)
        record.reason = f"after {n_done} of {run.steps} steps: {reason}" if n_done else reason
    free_memory()
    if record.outcome == "out_of_memory":
        # here: in the handler the traceback still keeps tensors alive
        with suppress(KeyboardInterrupt):  # while they are looked for: the record must be saved
            record.reason += f". {ways_out(config, device)}"
    micro_batches = len(record.series.loss) * run.config.grad_accum_steps
    record.epochs = micro_batches / data.micro_batches_per_epoch
    if accelerated.rank():
        return record
    _save(record, saver, progress)
    if record.outcome == "interrupted" and in_notebook():
        raise KeyboardInterrupt(record.reason)  # it stops this cell, and Run All
    return record


def _outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """Return how a run has ended, and why; raise what is no end that leaves a record."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "stopped (Ctrl-C or SIGTERM)"
    if isinstance(error, FloatingPointError):
        return "non_finite", str(error)
    # of several processes one that goes on alone would be waited for
    if is_out_of_memory(error) and accelerated.world_size() == 1:
        return "out_of_memory", short_message(error)
    raise error


def require_equal_shares(config: Config, resume: bool) -> None:
    """Raise ConfigError if the processes of a launch cannot share a step, or save its state."""
    n = accelerated.world_size()
    if config.grad_accum_steps % n:
        raise ConfigError(
            f"{config.name}: `tokens_per_step`: {config.tokens_per_step} tokens are "
            f"{config.grad_accum_steps} micro-batches, which {n} processes cannot share equally"
        )
    if n > 1 and (resume or config.save_every):
        raise ConfigError(
            f"{config.name}: `save_every`: states are saved in a single process only; set it to 0"
        )


def planned_record(run: Run, device: torch.device, data: Data) -> RunRecord:
    """Return the record that a run will fill."""
    run_id, created = new_id()
    environment = machine.environment(device) | {"commit": commit()}
    if accelerated.world_size() > 1:
        environment["processes"] = str(accelerated.world_size())
    return RunRecord(
        id=run_id,
        created=created,
        name=run.config.name,
        note=run.config.note,
        config=run.config.model_dump(exclude={"when_cpu", "overrides"}),
        environment=environment,
        corpus=data.corpus.digest,
        code=code_version(),
        steps_planned=run.steps,
        tokens_per_step=run.config.tokens_per_step,
    )


def announce(run: Run, device: torch.device, saver: Saver) -> None:
    """Print each value that is not of the main part of the file, and where a run begins."""
    config, lines = run.config, list(run.changes)
    missing = without_expandable_segments()
    if config.expandable_segments and missing and device.type == "cuda":
        lines.append(
            f"expandable_segments: {missing}, so torch's default allocator runs: "
            "it needs more memory"
        )
    if run.steps != config.steps:
        lines.append(f"steps = {run.steps} (not {config.steps}: {run.reason})")
    if COMPILE_MODES[config.compile].is_on:
        mode = f"compile: {config.compile}"
        lines.append(f"the first step compiles the model ({mode}); that takes a while")
    if saver.done:
        lines.append(f"continues after step {saver.done}")
    elif saver.path.exists():
        lines.append("begins at step 0: --resume would continue an unfinished run")
    for line in lines:
        print(f"{config.name}: {line}")


def rate_of(config: Config) -> Callable[[int], float]:
    """Return the learning rate of each step, counted from 0."""
    return partial(
        learning_rate_at,
        highest=config.learning_rate,
        schedule=config.lr_schedule,
        warmup_steps=config.lr_warmup_steps,
        steps=config.steps,
    )


def _train_and_measure(
    run: Run, device: torch.device, data: Data, saver: Saver, record: RunRecord, progress: bool
) -> None:
    """Train, then measure one more step; fill the record as soon as something is there.

    Everything allocated dies with this frame.
    """
    config, n_processes = run.config, accelerated.world_size()
    work = build_workload(config, device, data, n_processes)
    if n_processes > 1:
        data.batches = itertools.islice(data.batches, accelerated.rank(), None, n_processes)
        # masks of their own; the weights are made already
        torch.manual_seed(config.seed + accelerated.rank())
    options = {"precision": config.precision, "scaler": work.scaler}
    options["max_grad_norm"] = config.max_grad_norm
    n_micro_batches = config.grad_accum_steps // n_processes
    try:
        train(
            work.model,
            data.batches,
            work.loss_fn,
            work.optimizer,
            steps=run.steps,
            grad_accum_steps=n_micro_batches,
            learning_rate_at=rate_of(config),
            held_out=data.held_out,
            eval_every=config.eval_every,
            saver=saver,
            series=record.series,
            progress=progress,
            **options,
        )
    finally:
        record.timing = timing_of(record.series.step_ms, work.model, config, device)
    loss_fn, compiled = work.loss_fn, ""
    if COMPILE_MODES[config.compile].is_on:
        record.environment["torch.compile"] = loss_fn.report
        # compiled code has no hooks to tell phases by
        loss_fn, compiled = loss_fn.eager, ", not compiled"
    window = [to_device(next(data.batches), device) for _ in range(n_micro_batches)]
    try:
        ledger = measure_step(work.model, window, loss_fn, work.optimizer, **options)
    except OSError as error:  # what the profiler writes
        record.reason = f"memory could not be measured: {error}"
        return
    record.memory = ledger.model_copy(update={"method": ledger.method + compiled})


def _save(record: RunRecord, saver: Saver, progress: bool) -> None:
    """Save a record, and say how its run ended."""
    path = record.save()
    if record.outcome == "completed":
        saver.path.unlink(missing_ok=True)
    else:
        print(f"{record.name}: {record.ending}")
        if saver.done and record.outcome != "non_finite":  # which would come again
            state = f"the state after step {saver.done} is saved"
            print(f"{record.name}: {state}; the same command with --resume continues it")
    if progress:
        print(f"{record.name}: saved {path.name}")


# ---- Speed

# A card as torch names it, without the maker: its row among the cards, which has the datasheet's
# dense peaks. A slice of a card or a variant (MIG, NVL, Laptop) has another name, so no datasheet.
CARD_OF_PRODUCT = {
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-SXM2-32GB": "v100",
    "A100-SXM4-40GB": "a100",
    "A100-SXM4-80GB": "a100",
    "A100-PCIE-40GB": "a100",
    "A100 80GB PCIe": "a100",
    "H100 80GB HBM3": "h100",
    "H100 PCIe": "h100-pcie",
    "H200": "h200",
}


def datasheet_tflops(product: str) -> dict[str, float]:
    """Return {kind of product: dense TFLOP/s} of a card by its full name; {} if it is unknown."""
    row = CARD_OF_PRODUCT.get(product.removeprefix("NVIDIA "))
    return CARDS[row].speed.tflops if row else {}


@lru_cache(maxsize=8)
def peak_rate(precision: str, device: torch.device) -> tuple[float, str]:
    """Return (FLOP/s, where it is from): the denominator of an MFU, which says nothing without it.

    A datasheet's dense peak if the card is known, else a product measured here. On a CPU the
    float32 product's, or that of the precision's own dtype where it is faster: a 16-bit product
    without hardware is nobody's peak.
    """
    row, n, how = PRECISIONS[precision], 4096, ""
    kind = row.products
    if device.type == "cuda":
        tflops = datasheet_tflops(torch.cuda.get_device_name(device)).get(row.kind)
        if tflops:
            return tflops * 1e12, f"{tflops:g} TFLOP/s, datasheet, dense"
    else:
        n, how = 512, f", one thread's rate × {torch.get_num_threads()}"
        if machine.cpu_slowdown(kind) > 1:
            kind = "float32"
    with tf32(row.tf32):
        rate = machine.matmul_rate(getattr(torch, kind), device, n)
    return rate, f"{rate / 1e12:.2g} TFLOP/s, a {kind} {n}² product measured here{how}"


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return the model FLOPs of one training step (forward and backward) per token: 6·N + 12·L·d·T.

    N counts parameters without position embeddings. Kaplan et al. 2020 (2001.08361), PaLM appendix
    B (2204.02311). Recomputation is not counted, nor is what the optimizer does.
    """
    config = model.config
    n_params = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    return 6.0 * n_params + 12.0 * config.n_layer * config.n_embd * seq_len


def timing_of(
    step_ms: list[float], model: nn.Module, config: Config, device: torch.device
) -> Timing | None:
    """Return median and rates of the steps after the first UNTIMED_STEPS (or of what there is)."""
    timed = step_ms[UNTIMED_STEPS:] or step_ms[-1:]
    if not timed:
        return None
    median = statistics.median(timed)
    tokens_per_s = config.tokens_per_step / median * 1000
    flops_per_s = flops_per_token(model, config.seq_len) * tokens_per_s
    rate, source = peak_rate(config.precision, device)
    return Timing(
        median_step_ms=median,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_s / rate / accelerated.world_size(),
        mfu_denominator=source,
    )


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
    table["speedup"] = table.step_ms.iloc[0] / table.step_ms
    table["saving_percent"] = 100 * (1 - table.peak_mib / table.peak_mib.iloc[0])
    table.attrs["notes"] = _notes(trained, tokens)
    return table


def _config_as_run(record: RunRecord) -> dict[str, Any]:
    return record.config | {"steps": len(record.series.loss) or None}  # run, not planned


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
