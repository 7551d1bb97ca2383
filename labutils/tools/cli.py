"""The command line: run, compare and check experiments, look at this machine, execute the
notebooks.

Exit codes: 0 done; 1 it could not be done, the reason is on stderr; 2 the command itself is wrong;
130 Ctrl-C. Nothing here imports torch before a command needs it: `check` answers in well under a
second.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import packages_distributions
from pathlib import Path

from labutils.config.reader import CONFIGS_DIR, find_config, load_config, parse_overrides
from labutils.config.schema import NAME_PATTERN, ConfigError
from labutils.files import REPO_DIR, require_room, runs_dir, write_atomically
from labutils.memory.ledger import MemoryLedger
from labutils.training.compare import compare, readable
from labutils.training.records import (
    RecordError,
    RunRecord,
    find_runs,
    load_record,
    load_repeats,
    state_files,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, RecordError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m labutils", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    run = add("run", _run, "train one experiment and save its record in runs/")
    run.add_argument(
        "config", help="a YAML file, a short name such as bf16, or an unfinished run's state"
    )
    run.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="pairs",
        help="override a value",
    )
    run.add_argument(
        "--repeat",
        type=_count,
        default=1,
        metavar="N",
        help="run N times; compare uses their spread",
    )
    run.add_argument("--rerun", action="store_true", help="train even if an equal run is recorded")
    run.add_argument(
        "--resume",
        action="store_true",
        help="continue from the state that a run with save_every has left",
    )
    export = add("export", _export, "write an experiment as one script that needs no labutils")
    export.add_argument("config", help="a YAML file, or a short name such as bf16")
    export.add_argument("script", type=Path, metavar="FILE", help="a new file, train.py say")
    export.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="pairs",
        help="override a value",
    )
    export.add_argument(
        "--device", choices=["cpu", "cuda"], help="where the script will run (what is here)"
    )
    predict = add(
        "predict", _predict, "predict the peak memory of an experiment on a GPU, without one"
    )
    predict.add_argument("config", help="a YAML file, or a short name such as bf16")
    predict.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="pairs",
        help="override a value",
    )
    predict.add_argument(
        "--device",
        choices=["t4", "rtx4060", "a100", "h200", "this", "cpu"],
        default="a100",
        help="(a100)",
    )
    predict.add_argument(
        "--gpu-memory-gib", type=_gib, metavar="GIB", help="the card's memory, if not the device's"
    )
    predict.add_argument("--json", action="store_true", help="print JSON")
    advise = add("advise", _advise, "name the changes that would save most memory in a run")
    advise.add_argument("run", help="a config as for predict, or a record's name, id or path")
    advise.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="pairs",
        help="of a config only",
    )
    advise.add_argument(
        "--device",
        choices=["t4", "rtx4060", "a100", "h200", "this", "cpu"],
        help="(a100, or for a record its own kind)",
    )
    add("runs", _runs, "list the recorded runs, oldest first")
    comparing = add("compare", _compare, "compare recorded runs; the first is the baseline")
    comparing.add_argument(
        "run", nargs="+", help="a name (its newest run), an id, or a record's path"
    )
    comparing.add_argument("--csv", action="store_true", help="print CSV")
    figures = add("figures", _figures, "redraw the figures of recorded runs, without training")
    figures.add_argument(
        "run", nargs="+", help="a name (its newest run), an id, or a record's path"
    )
    figures.add_argument(
        "--format", default="png", help="png, svg, pdf, …; several with commas between (png)"
    )
    figures.add_argument(
        "--style", choices=["notebook", "slides"], default="notebook", help="slides: at least 18 pt"
    )
    figures.add_argument("--to", type=Path, metavar="FOLDER", help="(a new folder in runs/)")
    check = add("check", _check, "check config files, without running anything")
    check.add_argument("config", nargs="+")
    new = add("new", _new, "copy a config to configs/my_NAME.yaml, which git ignores, to edit")
    new.add_argument("name")
    new.add_argument("--from", dest="source", default="fp32", help="the config to copy (fp32)")
    add("doctor", _doctor, "say what this machine can train, and what is wrong with its set-up")
    grading = add(
        "grade", _grade, "score the exercises of submitted notebooks, each in a process of its own"
    )
    grading.add_argument("folder", type=Path)
    grading.add_argument("--csv", action="store_true", help="print CSV")
    grading.add_argument("--seconds", type=float, default=180, help="for one notebook (180)")
    grading.add_argument(
        "--memory-gib", type=float, default=6, help="for one notebook, on Linux (6)"
    )
    labs = add("labs", _labs, "execute the notebooks on this machine; results go to runs/")
    labs.add_argument("notebook", nargs="*", help="some of them only")
    labs.add_argument(
        "--in-place",
        action="store_true",
        help="for maintainers: write the outputs back, from a CPU run",
    )
    bench = add(
        "bench",
        _bench,
        "compare the optimized config with what a user would write instead, in turns",
    )
    bench.add_argument(
        "--quick", action="store_true", help="few steps: tests the harness, not the speed"
    )
    bench.add_argument(
        "--ablate",
        nargs="?",
        const=(1, 1),
        type=_share,
        metavar="K/N",
        help="its switches instead, one taken back in each row; K/N: only the K-th of N shares of the rows",
    )
    bench.add_argument(
        "--scale",
        nargs="*",
        metavar="SWEEP",
        help="how cost grows with batch, length, layers, width and vocabulary; or only with those named",
    )
    bench.add_argument(
        "--gpu-suite", type=Path, metavar="OUT", help="everything only a GPU shows, in three parts"
    )
    bench.add_argument(
        "--part", type=int, default=0, choices=[1, 2, 3], help="of the GPU suite, this part only"
    )
    bench.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM", help="beside ours, these arms only"
    )
    bench.add_argument("--blocks", type=int, default=7, help="timed blocks of each arm (7)")
    bench.add_argument("--steps", type=int, default=10, help="steps in a block (10)")
    bench.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="pairs",
        help="override a value",
    )
    return parser


def _count(text: str) -> int:
    """Return a whole number above 0; a ValueError becomes argparse's own message."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _gib(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(
            f"{text} is no amount of memory; expected GiB, for example 8"
        )
    return value


def _run(options: argparse.Namespace) -> int:
    repeats, resume = range(options.repeat), options.resume
    if options.config.endswith(".state"):
        from labutils.training.saved_state import read_header

        if options.pairs or options.repeat > 1 or options.rerun:
            print(
                "a state continues its own run: it takes no --set, --repeat or --rerun",
                file=sys.stderr,
            )
            return 2
        path = runs_dir() / Path(options.config).name
        if not path.is_file():
            raise RecordError(
                f"no state {path.name} in {runs_dir()}; `python -m labutils runs` lists what is unfinished"
            )
        header = read_header(path)
        config, repeats, resume = header.config, [header.planned.repeat], True
    else:
        config = load_config(options.config, **parse_overrides(options.pairs))
    from labutils.config.cards import PrecisionUnsupported
    from labutils.session import setup
    from labutils.training.experiment import NOT_SAVED, run_experiment
    from labutils.workload.data import DataError
    from labutils.workload.gpt2 import WeightsUnavailable

    if int(
        os.environ.get("RANK", 0)
    ):  # of the processes that torchrun starts, the first one speaks
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (until the process ends)
    try:
        device = setup()
        for repeat in repeats:
            record = run_experiment(
                config, device=device, repeat=repeat, rerun=options.rerun, resume=resume
            )
            if record.outcome != "completed":
                break
    except (DataError, PrecisionUnsupported, WeightsUnavailable) as error:
        print(error, file=sys.stderr)
        return 1
    if record.series.loss:
        print(_summary([record]).to_string())
    if record.reason.startswith(NOT_SAVED):
        return 1
    return {"completed": 0, "interrupted": 130}.get(record.outcome, 1)


def _export(options: argparse.Namespace) -> int:
    config = load_config(options.config, **parse_overrides(options.pairs))
    from labutils.config.cards import PrecisionUnsupported
    from labutils.machine.gpu import choose_device
    from labutils.tools.export import script

    try:
        text = script(config, options.device or choose_device().type)
        if options.script.exists():
            print(
                f"{options.script} exists already; choose another name, or delete it first",
                file=sys.stderr,
            )
            return 1
        name = options.script.stem
        taken = (
            sys.stdlib_module_names | packages_distributions().keys() | {"cuda", "triton"}
        )  # torch tries the last
        if options.script.suffix != ".py" or name in taken:
            problem = (
                "hides the library of that name from Python"
                if name in taken
                else "is no name for a script"
            )
            print(f"{options.script} {problem}; choose another, train.py say", file=sys.stderr)
            return 1
        if not options.script.parent.is_dir():
            raise FileNotFoundError(f"no such folder: {options.script.parent}")
        write_atomically(options.script, text.encode())
    except PrecisionUnsupported as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {options.script}: {len(text.splitlines())} lines. Run: python {options.script}")
    if config.save_every:
        print("The script saves no states: save_every is not in it")
    return 0


def _predict(options: argparse.Namespace) -> int:
    config = load_config(options.config, **parse_overrides(options.pairs))
    import json

    import pandas as pd

    from labutils.config.cards import CONTEXT_GIB, PrecisionUnsupported
    from labutils.machine.here import card_of
    from labutils.prediction.fit import fit
    from labutils.prediction.memory import needed_gib, predict_memory

    try:
        ledger = predict_memory(config, options.device)
        budget = options.gpu_memory_gib
        if budget is None and options.device != "cpu":
            limit = config.memory_limit_gib
            budget = limit + CONTEXT_GIB if limit else card_of(options.device).memory_gib
        needed = needed_gib(ledger, options.device)
        fits = budget is None or needed <= budget
        found = None if fits else fit(config, budget, options.device)
    except (PrecisionUnsupported, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        answer = {
            "peak_bytes": ledger.peak_bytes,
            "peak_phase": ledger.peak_phase,
            "categories": ledger.categories,
        }
        answer |= {
            "phases": ledger.phases,
            "method": ledger.method,
            "device": options.device,
            "fits": fits,
        }
        answer |= {"needed_gib": needed, "budget_gib": budget}
        allocator = (
            "reserved_bytes",
            "reserved_expandable_bytes",
            "needed_bytes",
            "needed_expandable_bytes",
        )
        answer |= {key: getattr(ledger, key) for key in allocator}
        if found:
            answer["fit"] = {
                "fits": found.fits(budget),
                "changes": found.changes,
                "costs": found.costs,
            }
            answer["fit"] |= {"time_cost": found.time_cost, "needed_gib": found.needed_gib}
        print(json.dumps(answer, indent=1))
        return 0
    table = pd.DataFrame(ledger.phases) / 2**20
    table.loc["together"] = table.sum()
    print(
        f"{config.name}: MiB allocated at each phase's peak, {ledger.method}\n{table.round(1).to_string()}"
    )
    print(f"\npeak {ledger.peak_bytes / 2**30:.2f} GiB allocated, in the {ledger.peak_phase} phase")
    if ledger.needed_bytes is not None:
        print(_allocator_lines(ledger, CONTEXT_GIB, config.expandable_segments))
    if budget is None:
        return 0
    if ledger.needed_bytes is None:
        context = "" if options.device == "cpu" else f" and {CONTEXT_GIB} GiB for the CUDA context"
        asked = f"it asks for {needed:.2f} GiB with a tenth for what no tensor can use{context}"
    else:
        asked = f"the smallest card has {needed:.2f} GiB"
    print(f"{'fits' if fits else 'does NOT fit'} {budget:g} GiB: {asked}")
    if found:
        asks = f"{found.needed_gib:.2f} GiB"
        if found.fits(budget):
            more = f"about {100 * found.time_cost:.0f} % more time a step (predicted)"
            print(f"fits with {asks} and {more} if you change:")
        else:
            print(f"no change known so far makes it fit; the smallest asks for {asks}:")
        print("\n".join(f"  {cost}" for cost in found.costs))
    return 0


def _allocator_lines(ledger: MemoryLedger, context_gib: float, expandable: bool) -> str:
    """Return a table of what torch's allocator takes from the card for a predicted ledger."""
    import pandas as pd

    rows = {
        "default": (ledger.reserved_bytes, math.nan if expandable else ledger.needed_bytes),
        "expandable_segments": (ledger.reserved_expandable_bytes, ledger.needed_expandable_bytes),
    }
    table = pd.DataFrame(rows, index=["reserved in three steps", "smallest card"]).T / 2**30
    return (
        "GiB that torch's allocator takes from the card, predicted by its rules; in the last column is "
        f"a context of {context_gib} GiB, which is assumed\n{table.round(2).to_string(na_rep='not asked')}"
    )


def _advise(options: argparse.Namespace) -> int:
    from labutils.config.cards import PrecisionUnsupported
    from labutils.prediction.advise import advise

    try:
        if find_config(options.run).suffix in (".yaml", ".yml"):
            print(
                advise(
                    load_config(options.run, **parse_overrides(options.pairs)),
                    options.device or "a100",
                )
            )
            return 0
        record = load_record(options.run)
        on_cpu = record.memory is not None and record.memory.method.startswith("CPU")
        print(advise(record, options.device or ("cpu" if on_cpu else "a100")))
        if record.memory:
            print(
                f"measured in that run: {record.memory.peak_bytes / 2**20:,.0f} MiB, {record.memory.method}"
            )
    except (PrecisionUnsupported, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _summary(records: Sequence[RunRecord]):
    import pandas as pd

    def row(r: RunRecord) -> dict:
        return {
            "run": f"{r.name}-{r.id}",
            "note": r.note[:40],
            "device": r.environment.get("device", "")[:30],
            "outcome": r.outcome,
            "steps": len(r.series.loss),
            "tokens/s": f"{r.timing.tokens_per_s:.0f}" if r.timing else "–",
            "peak MiB": f"{r.memory.peak_bytes / 2**20:.1f}" if r.memory else "–",
            "loss": f"{r.series.loss[-1]:.4f}" if r.series.loss else "–",
            "held-out": f"{r.held_out[-1][1]:.4f}" if r.held_out else "–",
        }

    return pd.DataFrame([row(r) for r in records]).set_index("run")


def _runs(_: argparse.Namespace) -> int:
    if runs_dir().exists() and not runs_dir().is_dir():
        raise NotADirectoryError(
            f"{runs_dir()} is no folder; LABUTILS_RUNS names the folder of runs"
        )
    records, damaged = find_runs()
    print(_summary(records).to_string() if records else f"no runs yet in {runs_dir()}")
    states = state_files()
    if states:
        from labutils.training.saved_state import read_header  # and torch
    for path in states:
        try:
            header, stat = read_header(path), path.stat()
        except FileNotFoundError:  # the run has completed meanwhile
            continue
        except (RecordError, OSError) as error:
            damaged.append(str(error))
            continue
        saved = f"{datetime.fromtimestamp(stat.st_mtime):%Y-%m-%d %H:%M}, {stat.st_size / 2**20:,.0f} MiB"
        print(
            f"unfinished, or still running: {header.step} of {header.steps} steps, saved {saved}; continue with:"
        )
        print(f"  python -m labutils run {shlex.quote(path.name)}")
    for line in damaged:
        print(line, file=sys.stderr)
    return 1 if damaged else 0


def _compare(options: argparse.Namespace) -> int:
    chosen = [load_repeats(run) for run in options.run]
    if len({runs[0].experiment for runs in chosen}) < len(
        chosen
    ):  # runs of one experiment: their ids tell them apart
        found = [load_record(run) for run in options.run]
        chosen = [[r.model_copy(update={"name": f"{r.name}-{r.id}"})] for r in found]
    records = [record for runs in chosen for record in runs]
    table = compare(records, baseline=records[0].name)
    if options.csv:
        print(table.to_csv(), end="")
    else:
        print(readable(table).to_string())
    for note in table.attrs["notes"]:
        print(note, file=sys.stderr)
    return 0


def _figures(options: argparse.Namespace) -> int:
    records = [load_record(run) for run in options.run]
    from labutils.tools.figures import save_figures

    try:
        paths = save_figures(records, options.format.split(","), options.style, options.to)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        "\n".join(map(str, paths))
        if paths
        else "these runs have nothing to draw: not one step was timed"
    )
    return 0 if paths else 1


def _check(options: argparse.Namespace) -> int:
    failed = 0
    for path in options.config:
        try:
            load_config(path)
        except ConfigError as error:
            print(error, file=sys.stderr)
            failed = 1
        else:
            print(f"{path}: ok")
    return failed


def _new(options: argparse.Namespace) -> int:
    name = options.name.removeprefix("my_").removesuffix(".yaml")
    if not re.match(NAME_PATTERN, name):
        print(
            f"{name!r} is no name for a run: letters, digits and . + - _ =, at most 60",
            file=sys.stderr,
        )
        return 2
    target = CONFIGS_DIR / f"my_{name}.yaml"
    source = find_config(options.source)
    config = load_config(source)
    lines = source.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("name:")), None)
    if start is None or not lines[start + 1].startswith("note:"):
        print(
            f"{source.name} is not laid out like the files in configs/: name, then note, a line each",
            file=sys.stderr,
        )
        return 1
    lines[start : start + 2] = [
        f"name: {name}",
        f'note: "copied from {config.name}; say here what you changed"',
    ]
    header = [
        f"# my_{name}.yaml — a copy of {source.name} to edit; git ignores it.",
        f"# Run: python -m labutils run configs/my_{name}.yaml",
    ]
    editor = [line for line in lines[:start] if "yaml-language-server" in line]
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write("\n".join([*header, *editor, *lines[start:]]) + "\n")
    except FileExistsError:
        print(
            f"{target.name} exists already; choose another name, or delete it first",
            file=sys.stderr,
        )
        return 1
    print(
        f"wrote configs/{target.name}. Edit it, then: python -m labutils run configs/{target.name}"
    )
    return 0


def _doctor(_: argparse.Namespace) -> int:
    import torch

    from labutils.config.choices import PRECISIONS
    from labutils.machine.gpu import choose_device, diagnose, gpu_facts
    from labutils.machine.here import environment, support

    problem = diagnose(gpu_facts())
    device = choose_device()
    for key, value in environment(device).items():
        print(f"{key:15s} {value}")
    for name in PRECISIONS:
        answer = support(name, device)
        print(
            f"{name:15s} {'slow' if answer.slow else 'yes' if answer.ok else 'no':5s} {answer.reason}"
        )
    print(f"{'runs':15s} {runs_dir()}")
    if problem:
        print(f"\nA GPU is not used: {problem}", file=sys.stderr)
    elif device.type == "cpu":
        print(
            f"\nNo NVIDIA GPU found. Everything runs on the CPU, with smaller sizes. torch: {torch.__version__}"
        )
    require_room()
    return 1 if problem else 0


def _labs(options: argparse.Namespace) -> int:
    from labutils.tools.labs import execute

    chosen = [Path(n) for n in options.notebook] or sorted(REPO_DIR.glob("0*.ipynb"))
    results = [execute(path, in_place=options.in_place) for path in chosen]
    return 0 if all(results) else 1


def _share(text: str) -> tuple[int, int]:
    """Return (2, 4) for `2/4`; a ValueError becomes argparse's own message."""
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError(text)
    return k, n


def _grade(options: argparse.Namespace) -> int:
    from labutils.tools.grade import grade_folder

    try:
        table = grade_folder(options.folder, options.seconds, options.memory_gib)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        table.to_csv(index=False) if options.csv else table.to_string(index=False),
        end="" if options.csv else "\n",
    )
    return 0


def _bench(options: argparse.Namespace) -> int:
    overrides = parse_overrides(options.pairs)
    from labutils.tools.bench.main import main as bench

    return bench(options, overrides)
