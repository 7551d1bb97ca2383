"""The command line, `labutils`: each function below is a command, its parameters are its options.

Exit codes: 0 done; 1 it could not be done, the reason is on stderr; 2 the command itself is wrong;
130 Ctrl-C. Commands import what they need when they run: help and `check` answer without torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labutils.config.card import CARDS
from labutils.files import REFERENCE_DIR, make_folder, runs_dir

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from labutils.config.card import Card
    from labutils.config.schema import Config
    from labutils.prediction.search import Forecast

EXIT_CODES = {"completed": 0, "interrupted": 130}  # of a run's outcome; 1 for any other
SPARE = "note", "device", "held-out", "steps", "outcome", "tokens_per_s"  # see _print_table


CONFIG = "a YAML file, or a short name such as bf16"
RUN = "a name (its newest run), an id, or a record's path"
COURSE = 'names of the course\'s such as "02" or "scaler", or paths (the four)'
HERE = "this", "cpu"
AS_EAGER = (
    "Memory is counted as if nothing were compiled, which mostly takes more: torch's compiler does "
    "not plan this step"
)
MEASURED_HERE = "The time of a step on a CPU is not predicted: `labutils run` measures it"
PLACES = f"a card (--cards lists them), {' or '.join(HERE)} (a100)"
SHEET = "a card of your own, a YAML file of its datasheet"


def _list_cards(is_wanted: bool) -> None:
    if is_wanted:
        cards = sorted(CARDS.values(), key=lambda card: card.memory_gib)
        print(*(f"{card.name:16}{card.memory_gib:6.1f} GiB" for card in cards), sep="\n")
        raise typer.Exit


ConfigName = Annotated[str, typer.Argument(help=CONFIG)]
ConfigNames = Annotated[list[str], typer.Argument(help=CONFIG)]
RunNames = Annotated[list[str], typer.Argument(help=RUN)]
Notebooks = Annotated[list[str], typer.Argument(help=COURSE)]
Pairs = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override a value")]
Rerun = Annotated[bool, typer.Option("--rerun", help="train even if an equal run is recorded")]
Csv = Annotated[bool, typer.Option("--csv", help="print CSV")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Device = Annotated[str | None, typer.Option(metavar="CARD", help=PLACES)]
# Eager: the list is printed before anybody misses the config, which the command asks for.
LISTING = typer.Option("--cards", is_eager=True, callback=_list_cards, help="list the cards")
Cards = Annotated[bool, LISTING]
Sheet = Annotated[Path | None, typer.Option("--card", metavar="FILE", help=SHEET)]
MEMORY = typer.Option(min=0.001, max=1e6, help="to fit into, instead of the card's own")
Gib = Annotated[float | None, MEMORY]
InPlace = Annotated[bool, typer.Option("--in-place", help="for maintainers: write outputs back")]
KeepGoing = Annotated[bool, typer.Option("--keep-going", help="past a cell that fails")]
Student = Annotated[Path | None, typer.Option(help="a folder for copies without outputs")]
Out = Annotated[Path | None, typer.Option(help="a folder for the tables (runs/grades/FOLDER)")]
Timeout = Annotated[float, typer.Option(min=1, help="seconds for one cell")]

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


# Alone, `labutils` is a question and ends with 0; typer's own ways out of it end with 2.
@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    """Run, compare, predict and check experiments; look at this machine; run the notebooks."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def start() -> int:
    """Run the command that a shell has given, and return its exit code."""
    # A cluster's stop signal then ends a run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return main()


# Typer takes one value for each `--set`. People write, and we print, `--set a=1 b=2`.
def one_each(arguments: Sequence[str]) -> list[str]:
    """Return arguments with `--set` before each of the pairs that follow it."""
    each: list[str] = []
    for word in arguments:
        is_next = len(each) > 1 and each[-2] == "--set" and "=" in word
        each += ["--set", word] if is_next and not word.startswith("-") else [word]
    return each


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        # always ends in SystemExit, or in an error
        app(one_each(sys.argv[1:] if arguments is None else arguments))
    except SystemExit as end:
        return end.code or 0
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith("labutils."):
            print(error, file=sys.stderr)  # the course's own errors say what to do
            return 1
        raise


@app.command()
def run(
    config: ConfigName,
    pairs: Pairs = (),
    rerun: Rerun = False,
) -> None:
    """Train an experiment; save its record in runs/."""
    # Under torchrun each process would train the whole step and write a record of its own.
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        script = "torchrun further/train_gpt2.py"
        print(f"labutils trains in one process; {script} shares a step", file=sys.stderr)
        raise typer.Exit(2)
    from labutils.config.reader import load_config, parse_overrides

    # A mistake is told before torch is imported, which takes seconds.
    experiment = load_config(config, **parse_overrides(pairs))
    from labutils.course.session import run_experiment, setup

    device = setup()
    record = run_experiment(experiment, device=device, rerun=rerun)
    if record.outcome == "completed":  # any other has been told
        print(record)
    raise typer.Exit(EXIT_CODES.get(record.outcome, 1))


@app.command()
def runs(name: Annotated[str, typer.Argument()] = "", limit: int = 20) -> None:
    """List recorded runs with NAME in theirs (--limit 0: all of them)."""
    from labutils.training.record import find_runs, summary

    if runs_dir().exists() and not runs_dir().is_dir():
        problem = f"{runs_dir()} is not a folder; LABUTILS_RUNS names the folder of runs"
        raise NotADirectoryError(problem)
    records, problems = find_runs()
    named = [record for record in records if name in record.name]
    newest = named[-limit:] if limit > 0 else named
    if not records:
        print(f"no runs yet in {runs_dir()}")
    elif not named:
        names = ", ".join(dict.fromkeys(record.name for record in records))
        print(f"no run has {name!r} in its name. There are: {names}")
    elif len(newest) < len(named):
        print(f"{len(named) - len(newest)} older runs: --limit 0 lists them")
    if newest:
        table = summary(newest)
        if len(newest) > 1 and table.device.nunique() == 1:
            print(f"device: {table.pop('device').iloc[0]}")
        _print_table(table)
    for problem in problems:
        print(problem, file=sys.stderr)
    raise typer.Exit(1 if problems else 0)


def _print_table(table: pd.DataFrame) -> None:
    """Print a table with its index, as wide as the terminal.

    First the columns in SPARE are left out, in this order, and the last line says so. Then long
    texts are broken into several lines.
    """
    from rich.console import Console
    from rich.table import Table

    # rich alone would fold a run's id into four lines in a terminal of 80 columns: nobody could
    # copy it.
    width = shutil.get_terminal_size((1000, 24)).columns  # 1000 where there is no terminal
    table, left_out = table.reset_index().astype(str), []
    for name in filter(table.columns.__contains__, SPARE):
        widths = [max(len(column), *table[column].map(len)) for column in table]
        if sum(widths) + 2 * len(widths) - 2 > width:  # two blanks between columns
            table = table.drop(columns=name)
            left_out.append(name)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in table:
        numbers = all(re.fullmatch(r"[\d.,+–-]*", text) for text in table[name])
        side = "right" if numbers else "left"
        grid.add_column(name.replace("_", " "), justify=side, overflow="fold")
    for row in table.itertuples(index=False):
        grid.add_row(*row)
    Console(width=width, markup=False, emoji=False, highlight=False).print(grid)
    if left_out:
        print(f"not shown in {width} columns: {', '.join(left_out)}")


@app.command()
def compare(runs: RunNames, csv: Csv = False) -> None:
    """Compare recorded runs; the first is the baseline."""
    from labutils.training.record import compare as compare_records
    from labutils.training.record import load_record, readable

    records = [load_record(name) for name in runs]
    table = compare_records(records)
    if csv:
        print(table.to_csv(), end="")
    else:
        _print_table(readable(table))
        for record in records:
            if record.timing and record.timing.mfu:
                print(f"{record.name}: {record.timing}")
    for note in table.attrs["notes"]:
        print(note, file=sys.stderr)  # so that what --csv writes to a file is a table alone


@app.command()
def predict(
    config: ConfigName,
    pairs: Pairs = (),
    device: Device = None,
    card: Sheet = None,
    gpu_memory_gib: Gib = None,
    cards: Cards = False,
    as_json: Json = False,
) -> None:
    """Predict an experiment's memory and time on a GPU, without one."""
    from labutils.config.reader import load_config, parse_overrides

    experiment = load_config(config, **parse_overrides(pairs))
    place = _card(experiment, device, card, "a100")
    from labutils.memory.ledger import at_least, readable_size
    from labutils.prediction.memory import needed_gib
    from labutils.prediction.search import Forecast

    asked = Forecast(experiment, place)
    ledger = asked.prediction.ledger
    budget, whose = _budget(experiment, place, gpu_memory_gib)
    needed = needed_gib(ledger, place)
    fits = _fits(ledger.method, needed, budget)
    if not as_json:
        print(f"{experiment.name}: {ledger}")
        if budget is not None:
            verdict = {True: "fits", False: "does NOT fit", None: "may fit"}[fits]
            detail = f": it needs {readable_size(needed * 2**30, digits=1)}"
            if place.gpu:
                spare = _spare(needed, budget)
                detail = f", with {spare}" if spare else ""
            # flushed: what follows may take a minute, and through a pipe nothing would be seen
            print(f"{verdict} {whose}{detail}", flush=True)
    time = asked.time if place.gpu else None
    if time and not as_json:
        print("", time, sep="\n", flush=True)
    if fits is False:
        print("looking for changes that fit, up to a minute …", file=sys.stderr)
    plan = asked.way_out(budget) if fits is False and budget is not None else None
    last = plan or asked
    notes = [_as_eager(ledger.method), _sixteen_bits(last, budget) if time else MEASURED_HERE]
    note = ". ".join(filter(None, notes))
    if as_json:
        facts = ledger.model_dump(exclude={"timeline"}) | {"categories": ledger.categories}
        facts |= {"peak_bytes": ledger.peak_bytes, "peak_phase": ledger.peak_phase}
        facts |= {"fits": fits, "needed_gib": needed, "budget_gib": budget}
        # without the time's `method`, which would take the place of the ledger's
        facts |= time.model_dump(exclude={"method", "why_band"}) if time else {}
        facts |= {"device": place.name, "note": note}
        if plan:
            keys = "changes", "costs", "needed_gib"
            facts["fit"] = {key: getattr(plan, key) for key in keys} | {"fits": plan.fits(budget)}
        if plan and time:
            times = plan.step_ms / time.step_ms
            facts["fit"] |= {"step_ms": plan.step_ms, "time_cost": times - 1}
        print(json.dumps(facts, indent=1))
    elif plan:
        least = at_least(plan.needed_gib * 2**30)
        first = f"No change makes it fit; with all of them it needs {least} GiB:"
        if plan.fits(budget):
            details = [_spare(plan.needed_gib, budget)]
            if time:
                as_long = f"{plan.step_ms / time.step_ms:.2f} times as long"
                details.append(f"a step then takes {plan.step_ms:.0f} ms, {as_long}, as predicted")
            why = "; ".join(filter(None, details))
            first = f"It fits in {least} GiB{why and f' ({why})'} if you change:"
        costs = [f"{key}={plan.changes[key]}: {cost}" for key, cost in plan.costs.items()]
        costs += (
            [f"that is: --set {plan.name}"] if costs else ["none of our changes saves anything"]
        )
        print(f"\n{first}", *costs, sep="\n  ")
    if note and not as_json:
        print(f"\n{note}" if plan else note)


@app.command()
def advise(
    config: ConfigName,
    pairs: Pairs = (),
    device: Device = None,
    card: Sheet = None,
    gpu_memory_gib: Gib = None,
    cards: Cards = False,
    as_json: Json = False,
) -> None:
    """Predict what single changes would save, and cost, in an experiment."""
    from labutils.config.reader import load_config, parse_overrides

    experiment = load_config(config, **parse_overrides(pairs))
    place = _card(experiment, device, card, "a100")
    from labutils.memory.ledger import at_least
    from labutils.prediction.search import advise as advise_on

    table = advise_on(experiment, place)
    (budget, _), facts = _budget(experiment, place, gpu_memory_gib), table.attrs
    if budget is not None:
        answers = [_fits(facts["method"], needed, budget) for needed in table["needs GiB"]]
        table.insert(len(table.columns) - 1, "fits", answers)
    if as_json:
        # pandas writes 10 digits by itself, which rounds bytes and milliseconds; 15 is its most
        rows = json.loads(table.reset_index().to_json(orient="records", double_precision=15))
        facts |= {"name": experiment.name, "budget_gib": budget, "changes": rows}
        print(json.dumps(facts, indent=1))
        return
    step = f"{facts['step_ms']:.1f} ms a step, " if place.gpu else ""
    print(
        f"{experiment.name} on {place.name}: a peak of {facts['peak_bytes'] / 2**20:,.0f} MiB, "
        f"{step}needs {at_least(facts['needed_gib'] * 2**30)} GiB, predicted"
    )
    if budget is not None:
        answers = table.pop("fits").map({True: "yes", False: "no", None: "maybe"})
        table[f"fits {budget:g} GiB"] = answers.where(table["needs GiB"].notna())
    table = table.round({"saves MiB": 1, "adds ms": 1})
    table["needs GiB"] = table["needs GiB"].map(lambda n: at_least(n * 2**30), na_action="ignore")
    _print_table(table.astype(object).fillna("–"))  # a column of floats takes no text
    if note := _as_eager(facts["method"]):
        print(note)


def _card(experiment: Config, device: str | None, sheet: Path | None, usual: str) -> Card:
    """Return the card that is meant, and say on stderr what begins now."""
    if device is not None and sheet:
        raise typer.BadParameter("--device and --card exclude each other")
    name = usual if device is None else device
    from labutils.config.reader import card_named, load_card

    place = load_card(sheet) if sheet else None
    if not place and name not in HERE:
        try:
            place = card_named(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    # Said before torch is imported, which takes seconds in which nothing else is seen.
    on = experiment.on("cpu" if name == "cpu" and not sheet else "cuda")
    shape = f"{on.model}, {on.micro_batch_size} × {on.seq_len} tokens, {on.precision}"
    where = place.name if place else name
    wait = ", compiled, which takes half a minute" * (on.compile != "off")
    print(f"tracing a training step for {where}: {shape}{wait} …", file=sys.stderr)
    from labutils.machine import card_of

    try:
        place = place or card_of(name)
    except RuntimeError as error:  # "this" without a GPU
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    return place


def _budget(config: Config, card: Card, gib: float | None) -> tuple[float | None, str]:
    """Return the GiB that a step may take, and in words whose they are.

    They are the user's, the card's, or the config's. A config's limit leaves the context out, so it
    is added here. For a CPU it is None, unless the user names a size.
    """
    from labutils.config.card import CONTEXT_GIB

    # A CPU has no memory of its own to fit into; what is free on this machine now says little
    # about the one that will train.
    if not card.gpu:
        return gib, f"{gib} GiB, a tenth counted in for what no tensor can use"
    if gib is not None:
        return gib, f"{gib} GiB"
    limit = config.memory_limit_gib + CONTEXT_GIB
    if config.memory_limit_gib and limit < card.memory_gib:
        return limit, f"the config's memory_limit_gib, {limit:.4g} GiB with what CUDA takes"
    return card.memory_gib, f"{card.name}, {card.memory_gib:.4g} GiB"


def _fits(method: str, needed_gib: float, budget_gib: float | None) -> bool | None:
    """Return whether a step fits a budget, which it does if there is none.

    None: it may fit, since it is compiled, and is counted as if it were not.
    """
    if budget_gib is None or needed_gib <= budget_gib:
        return True
    return None if _as_eager(method) else False


def _as_eager(method: str) -> str:
    """Return a sentence on the memory of a compiled step that could not be planned, or ""."""
    from labutils.memory.ledger import NOT_COMPILED

    _, is_as_eager, reason = method.partition(NOT_COMPILED)
    return AS_EAGER + reason if is_as_eager else ""


def _spare(needed_gib: float, budget_gib: float | None) -> str:
    """Return in words what is left of a budget where that is little."""
    from labutils.prediction.search import ROOM

    if budget_gib is None or not ROOM * budget_gib < needed_gib <= budget_gib:
        return ""
    spare = budget_gib - needed_gib
    return f"{spare:.1f} GiB to spare" + (": a desktop may take more" if spare < 1 else "")


def _sixteen_bits(plan: Forecast, budget_gib: float | None) -> str:
    """Return in words what 16 bits would do that are faster on the card, or that these are slow."""
    from labutils.config.card import PrecisionUnsupported
    from labutils.config.choices import PRECISIONS, WITH_BF16, WITHOUT_BF16
    from labutils.config.schema import ConfigError
    from labutils.memory.ledger import at_least

    precision, card = PRECISIONS[plan.run.config.precision], plan.card
    support, other = card.support(precision.name), WITH_BF16 if card.has_bf16 else WITHOUT_BF16
    notes = [f"{precision.name} is slow on {card.name}: {support.reason}"] * support.slow
    is_fastest = precision is other or (precision.is_16bit and not support.slow)
    has_room = not plan.changes or budget_gib is None or plan.fits(budget_gib)
    if has_room and not is_fastest and not card.support(other.name).slow:
        with suppress(ConfigError, PrecisionUnsupported):  # it may ask for what 16 bits cannot do
            instead = plan.changed({"precision": other.name}, "")
            times, needed = plan.step_ms / instead.step_ms, instead.needed_gib
            is_too_much = _fits(instead.prediction.method, needed, budget_gib) is False
            notes.append(
                f"With precision={other.name}{' as well' * bool(plan.changes)} a step would take "
                f"{instead.step_ms:.1f} ms, {times:.1f} times as fast, and a card needs "
                f"{at_least(needed * 2**30)} GiB{', too much' * is_too_much} (predicted)"
            )
    return ". ".join(notes)


@app.command()
def check(configs: ConfigNames) -> None:
    """Check config files, without running anything."""
    from labutils.config.reader import load_config
    from labutils.config.schema import ConfigError

    code = 0
    for path in configs:
        try:
            load_config(path)
        except ConfigError as error:
            print(error, file=sys.stderr)
            code = 1
        else:
            print(f"{path}: ok")
    raise typer.Exit(code)


@app.command()
def doctor() -> None:
    """Say what this machine can train, how fast, and what is wrong."""
    import pandas as pd

    from labutils import machine
    from labutils.config.choices import PRECISIONS

    problem, device = machine.gpu_problem(), machine.choose_device()
    facts = machine.environment(device) | {"runs": str(runs_dir())}
    for name in PRECISIONS:
        answer = machine.support(name, device)
        verdict = "slow" if answer.slow else "yes" if answer.ok else "no"
        facts[name] = f"{verdict:5s} {answer.reason}"
    for key, value in facts.items():
        print(f"{key:15s} {value}")
    if problem:
        print(f"\nGPU NOT USED: {problem}", file=sys.stderr)
    if device.type == "cpu":
        busy = machine.choose_threads()
        if busy:
            print(f"\n{busy}")
        step_ms = _small_step_ms(device)
        print(
            f"\nWithout a GPU experiments train a small GPT-2. A step takes {step_ms:.0f} ms now."
        )
        # where 16 bits are slow, notebooks take smaller steps: the ratio stays
        times = pd.read_csv(REFERENCE_DIR / "notebook_seconds.csv", index_col="notebook").dropna()
        minutes = times.seconds * step_ms / times.step_ms / 60
        told = ", ".join(f"{name} {value:.1f}" for name, value in minutes.items())
        print(f"Minutes of Run All, by this step: {told}")
    make_folder(runs_dir())
    raise typer.Exit(1 if problem else 0)


def _small_step_ms(device: torch.device) -> float:
    """Return the milliseconds of a step of the small GPT-2 in float32: the median of six."""
    from labutils.config.reader import load_config
    from labutils.training.run import UNTIMED_STEPS
    from labutils.training.train import train
    from labutils.workload.build import build

    work = build(load_config("fp32"), device)
    parts = work.model, work.data.batches, work.loss_fn, work.optimizer
    series = train(*parts, steps=UNTIMED_STEPS + 6, progress=False)
    return statistics.median(series.step_ms[UNTIMED_STEPS:])


@app.command()
def labs(
    notebooks: Notebooks = (),
    in_place: InPlace = False,
    keep_going: KeepGoing = False,
    student: Student = None,
) -> None:
    """Execute notebooks, the four or those named; results go to runs/."""
    from labutils.course import labs as notebooks_of
    from labutils.course.exhibits import play

    if student and (in_place or keep_going):
        raise typer.BadParameter("--student executes nothing: it excludes the other options")
    course = notebooks_of.all_notebooks() if student else notebooks_of.core_notebooks()
    paths = [notebooks_of.find_notebook(name) for name in notebooks] or course
    if student:
        for path in paths:
            print(f"wrote {notebooks_of.write_student_copy(path, student)}, without outputs")
        return
    make_folder(runs_dir())  # said now, and not after minutes
    how = {"in_place": in_place, "keep_going": keep_going}
    # a list: with all() around a generator the first failure would keep the others from running
    succeeded = [notebooks_of.execute(path, **how) for path in paths]
    if not notebooks:
        print(f"wrote {play.write_page(runs_dir())}: open it in a browser")
    print(f"Open a notebook: jupyter lab {runs_dir()}. All as pages: make site RUNS={runs_dir()}")
    raise typer.Exit(0 if all(succeeded) else 1)


@app.command()
def grade(folder: Path, out: Out = None, timeout: Timeout = 120) -> None:
    """Run submitted notebooks; write scores.csv and misconceptions.csv."""
    from labutils.course.labs import grade_folder

    out = out or runs_dir() / "grades" / folder.resolve().name
    scores = grade_folder(folder, out, timeout)
    print(f"{len(scores)} students. Wrote {out}: scores.csv, misconceptions.csv")
