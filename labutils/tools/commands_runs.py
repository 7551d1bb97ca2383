"""Commands on runs: run, runs, compare, figures.

Each takes the parsed options and returns an exit code. What needs torch is imported late.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from labutils.config.edits import edits_without_effect
from labutils.config.reader import load_config, parse_overrides
from labutils.files import program, runs_dir

if TYPE_CHECKING:
    import pandas as pd

    from labutils.training.records import RunRecord
    from labutils.training.saved_state import Header

SPARE = "note", "device", "held-out", "steps", "outcome"  # left out first on a narrow screen
EXIT_CODES = {"completed": 0, "interrupted": 130}


def run(options: argparse.Namespace) -> int:
    """Train an experiment, or continue one from its state."""
    repeats, resume = range(options.repeat), options.resume
    if options.config.endswith(".state"):
        if options.pairs or options.repeat > 1 or options.rerun:
            problem = "a state continues its own run: it takes no --set, --repeat or --rerun"
            print(problem, file=sys.stderr)
            return 2
        if options.engine != "plain":
            print("only --engine plain continues a state", file=sys.stderr)
            return 2
        header = _header_of(options.config)
        config, repeats, resume = header.config, [header.planned.repeat], True
    else:
        config = load_config(options.config, **parse_overrides(options.pairs))
    if resume and options.engine != "plain":
        print("only --engine plain resumes a run", file=sys.stderr)
        return 2
    from labutils.config.card import PrecisionUnsupported
    from labutils.session import setup
    from labutils.training.engines.parts import FrameworkMissing
    from labutils.training.engines.run import run_engine
    from labutils.training.experiment import NOT_SAVED, run_experiment
    from labutils.workload.data import DataError
    from labutils.workload.gpt2 import WeightsUnavailable

    if int(os.environ.get("RANK", 0)):  # of torchrun's processes only the first one prints
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (until the process ends)
    try:
        device = setup()
        if device.type == "cpu" and not options.config.endswith(".state"):
            for line in edits_without_effect(options.config):
                print(line)
        for repeat in repeats:
            asked = {"device": device, "repeat": repeat, "rerun": options.rerun}
            if options.engine == "plain":
                record = run_experiment(config, resume=resume, **asked)
            else:
                record = run_engine(config, options.engine, **asked)
            if record.outcome != "completed":
                break
    except (DataError, FrameworkMissing, PrecisionUnsupported, WeightsUnavailable) as error:
        print(error, file=sys.stderr)
        return 1
    if record.series.loss:
        print(_fitted([record]))
    if record.reason.startswith(NOT_SAVED):
        return 1
    return EXIT_CODES.get(record.outcome, 1)


def _header_of(name: str) -> Header:
    from labutils.training.records import RecordError
    from labutils.training.saved_state import read_header

    path = runs_dir() / Path(name).name
    if not path.is_file():
        raise RecordError(
            f"no state {path.name} in {runs_dir()}; `{program()} runs` lists the unfinished runs"
        )
    return read_header(path)


def runs(options: argparse.Namespace) -> int:
    """List the newest records, and the states with the command that continues each."""
    from labutils.training.records import find_runs, state_files

    if runs_dir().exists() and not runs_dir().is_dir():
        raise NotADirectoryError(
            f"{runs_dir()} is not a folder; LABUTILS_RUNS names the folder of runs"
        )
    records, damaged = find_runs()
    print(_listed(records, options.name, options.limit))
    for path in state_files():
        if problem := _print_unfinished(path):
            damaged.append(problem)
    for line in damaged:
        print(line, file=sys.stderr)
    return 1 if damaged else 0


def _listed(records: Sequence[RunRecord], name: str, limit: int) -> str:
    """Return the newest records with `name` in their names, and what was left out."""
    if not records:
        return f"no runs yet in {runs_dir()}"
    named = [record for record in records if name in record.name]
    if not named:
        names = dict.fromkeys(record.name for record in records)
        return f"no run has {name!r} in its name. There are: {', '.join(names)}"
    shown = named[-limit:] if limit > 0 else named
    text = _fitted(shown)
    if len(shown) < len(named):
        text = f"{len(named) - len(shown)} older runs: --limit 0 lists them\n{text}"
    return text


def _fitted(records: Sequence[RunRecord]) -> str:
    """Return a table that fits the terminal; what all rows have in common stands above it."""
    from labutils.tools.tables import fitted, terminal_width

    table, above = _table(records), ""
    if len(table) > 1 and table["device"].nunique() == 1:
        above = f"device: {table['device'].iloc[0]}\n"
        table = table.drop(columns="device")
    return above + fitted(table, terminal_width(), SPARE)


def _print_unfinished(path: Path) -> str:
    """Say how far a run has come and how to continue it; return what is wrong with its state."""
    from labutils.training.records import RecordError
    from labutils.training.saved_state import read_header

    try:
        header, stat = read_header(path), path.stat()
    except FileNotFoundError:  # the run has completed meanwhile
        return ""
    except (RecordError, OSError) as error:
        return str(error)
    time = datetime.fromtimestamp(stat.st_mtime)
    done = f"{header.step} of {header.steps} steps"
    saved = f"saved {time:%Y-%m-%d %H:%M}, {stat.st_size / 2**20:,.0f} MiB"
    print(f"unfinished, or still running: {done}, {saved}; continue with:")
    print(f"  {program()} run {shlex.quote(path.name)}")
    return ""


def _table(records: Sequence[RunRecord]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([_row(record) for record in records]).set_index("run")


def _row(record: RunRecord) -> dict[str, str | int]:
    row = {
        "run": f"{record.name}-{record.id}",
        "device": record.environment.get("device", ""),
        "outcome": record.outcome,
        "steps": len(record.series.loss),
    }
    row |= dict.fromkeys(("tokens/s", "peak MiB", "loss", "held-out"), "–")
    if record.timing:
        row["tokens/s"] = f"{record.timing.tokens_per_s:.0f}"
    if record.memory:
        row["peak MiB"] = f"{record.memory.peak_bytes / 2**20:.1f}"
    if record.series.loss:
        row["loss"] = f"{record.series.loss[-1]:.4f}"
    if record.held_out:
        row["held-out"] = f"{record.held_out[-1][1]:.4f}"
    row["note"] = textwrap.shorten(record.note, 40, placeholder=" …")
    return row


def compare(options: argparse.Namespace) -> int:
    """Print a table of runs against the first."""
    from labutils.tools.tables import fitted, terminal_width
    from labutils.training.compare import compare as compare_records
    from labutils.training.compare import readable

    records = _chosen(options.run)
    table = compare_records(records, baseline=records[0].name)
    if options.csv:
        print(table.to_csv(), end="")
    else:
        print(fitted(readable(table), terminal_width(), ["tokens_per_s"]))
    for note in table.attrs["notes"]:
        print(note, file=sys.stderr)
    return 0


def _chosen(names: Sequence[str]) -> list[RunRecord]:
    """Return the named runs with all their repeats; runs of one experiment under their ids."""
    from labutils.training.records import load_record, load_repeats

    chosen = [load_repeats(name) for name in names]
    if len({repeats[0].experiment for repeats in chosen}) == len(chosen):
        return [record for repeats in chosen for record in repeats]
    found = []
    for name in names:
        record = load_record(name)
        found.append(record.model_copy(update={"name": f"{record.name}-{record.id}"}))
    return found


def figures(options: argparse.Namespace) -> int:
    """Draw the figures of runs into files and print their paths."""
    from labutils.training.records import load_record

    records = [load_record(name) for name in options.run]
    from labutils.tools.figures import save_figures

    try:
        paths = save_figures(records, options.format.split(","), options.style, options.to)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if not paths:
        print("nothing to draw: no step of these runs was timed")
        return 1
    print("\n".join(map(str, paths)))
    return 0
