# PYTHON_ARGCOMPLETE_OK
"""The command line, `labutils`: which commands there are and what each of them takes.

Exit codes: 0 done; 1 it could not be done, the reason is on stderr; 2 the command itself is wrong;
130 Ctrl-C. The commands import what they need when they run, so `check` answers without torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from labutils.config.cards import CARDS
from labutils.config.schema import ConfigError
from labutils.files import program
from labutils.tools import commands, commands_predict, commands_runs
from labutils.tools.arguments import (
    Add,
    add_bench,
    add_config,
    add_overrides,
    count,
    gib,
    positive,
    run_names,
)

try:
    import argcomplete  # optional: the shell's Tab key
except ImportError:
    argcomplete = None

DESCRIPTION = "Run, compare, predict and check experiments; look at this machine; run the notebooks"
CONFIG = "a YAML file, or a short name such as bf16"
RUN = "a name (its newest run), an id, or a record's path"
ENGINES = ("plain", "trainer", "accelerate", "fabric")
DEVICES = (*CARDS, "this", "cpu")


def start() -> int:
    """Run the command that a shell has given."""
    if "RANK" not in os.environ:  # torchrun's processes must end at once
        # A cluster's stop signal then ends a run as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    if argcomplete:
        argcomplete.autocomplete(parser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = "; --set KEY=VALUE changes a key" if any("=" in word for word in unknown) else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if "command" not in options:
        parser.print_help()
        return 0
    try:
        return options.command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` for example, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, OSError, _record_error()) as error:
        print(error, file=sys.stderr)
        return 1


def _record_error() -> type[Exception]:
    """Return RecordError. Python asks for it only when an error has come as far as `main`."""
    from labutils.training.records import RecordError

    return RecordError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(program(), description=DESCRIPTION)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, command: Callable, text: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    _add_runs(add)
    _add_predictions(add)
    _add_config_files(add)
    _add_course(add)
    add_bench(add)
    return parser


def _add_runs(add: Add) -> None:
    run = add("run", commands_runs.run, "train one experiment and save its record in runs/")
    add_config(run, f"{CONFIG}, or an unfinished run's state")
    add_overrides(run)
    run.add_argument(
        "--repeat",
        type=count,
        default=1,
        metavar="N",
        help="run N times; compare uses their spread",
    )
    run.add_argument("--rerun", action="store_true", help="train even if an equal run is recorded")
    run.add_argument(
        "--resume", action="store_true", help="continue from the state that save_every has left"
    )
    what = "what takes the steps: labutils.train (plain), or a framework"
    run.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help=what)
    runs = add("runs", commands_runs.runs, "list the recorded runs, the newest last")
    runs.add_argument("name", nargs="?", default="", help="only those with this in their name")
    runs.add_argument(
        "--limit", type=int, default=20, metavar="N", help="the newest N; 0: all of them (20)"
    )

    compare = add(
        "compare", commands_runs.compare, "compare recorded runs; the first is the baseline"
    )
    compare.add_argument("run", nargs="+", help=RUN).completer = run_names
    compare.add_argument("--csv", action="store_true", help="print CSV")

    figures = add(
        "figures", commands_runs.figures, "redraw the figures of recorded runs, without training"
    )
    figures.add_argument("run", nargs="+", help=RUN).completer = run_names
    figures.add_argument(
        "--format", default="png", help="png, svg, pdf, …; several with commas between (png)"
    )
    figures.add_argument(
        "--style", choices=["notebook", "slides"], default="notebook", help="slides: at least 18 pt"
    )
    figures.add_argument("--to", type=Path, metavar="FOLDER", help="(a new folder in runs/)")


def _add_predictions(add: Add) -> None:
    predict = add(
        "predict",
        commands_predict.predict,
        "predict the memory and the time of an experiment on a GPU, without one",
    )
    add_config(predict, CONFIG)
    add_overrides(predict)
    where = predict.add_mutually_exclusive_group()
    where.add_argument(
        "--device",
        choices=DEVICES,
        default="a100",
        metavar="CARD",
        help=f"one of {', '.join(DEVICES)} (a100)",
    )
    where.add_argument(
        "--card", type=Path, metavar="FILE", help="a card of your own, a YAML file of its datasheet"
    )
    predict.add_argument(
        "--gpu-memory-gib", type=gib, metavar="GIB", help="the card's memory, if not the device's"
    )
    predict.add_argument("--json", action="store_true", help="print JSON")

    advise = add(
        "advise", commands_predict.advise, "name the changes that would save most memory in a run"
    )
    advise.add_argument("run", help="a config as for predict, or a record's name, id or path")
    add_overrides(advise, "override a value of a config, not of a record")
    advise.add_argument(
        "--device", choices=DEVICES, help="(a100; for a record its own kind of device)"
    )


def _add_config_files(add: Add) -> None:
    check = add("check", commands.check, "check config files, without running anything")
    add_config(check, CONFIG, nargs="+")

    new = add("new", commands.new, "copy a config to configs/my_NAME.yaml, which git ignores")
    new.add_argument("name")
    new.add_argument("--from", dest="source", default="fp32", help="the config to copy (fp32)")


def _add_course(add: Add) -> None:
    doctor = "say what this machine can train, and what is wrong with its set-up"
    look = add("doctor", commands.doctor, doctor)
    look.add_argument(
        "--calibrate",
        action="store_true",
        help="measure single operations here, in under a minute: what times are predicted from",
    )

    labs = add("labs", commands.labs, "execute the notebooks on this machine; results go to runs/")
    labs.add_argument(
        "notebook",
        nargs="*",
        help='any of the course, such as "02" or "scaler", or a path (the four)',
    )
    labs.add_argument(
        "--in-place",
        action="store_true",
        help="for maintainers: write the outputs back, from a CPU run",
    )
    labs.add_argument(
        "--student",
        type=Path,
        metavar="FOLDER",
        help="execute nothing: write copies without outputs, for a class",
    )

    grade = add("grade", commands.grade, "run a class's notebooks; write scores and misconceptions")
    grade.add_argument("folder", type=Path)
    grade.add_argument("--out", type=Path, help="where the tables go (runs/grades)")
    grade.add_argument("--timeout", type=positive, default=120, help="seconds of one cell (120)")
    grade.add_argument("--jobs", type=count, default=1, help="notebooks that run at once (1)")
