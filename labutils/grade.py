"""Grade a class: a folder of notebooks becomes scores.csv and misconceptions.csv.

A verdict is what the notebook said when it ran here, top to bottom in a fresh kernel. It proves
nothing about who wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import nbformat
import pandas as pd
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from tqdm import tqdm

from labutils.config.schema import ConfigError
from labutils.exercises import VERDICTS
from labutils.files import code_version
from labutils.pages import QUIET, all_notebooks, read_notebook

SLOW = "slow"  # the tag of cells that train for long, and that no exercise needs
CALL = re.compile(r"\bexercises\.(\w+)\(")
MOST_BYTES = {"RLIMIT_DATA": 6 * 2**30, "RLIMIT_FSIZE": 2**30, "RLIMIT_NPROC": 4096}
LOOK = "look at this: "
# How names begin that nobody hands in: hidden files, what macOS packs, and ours.
NOT_WORK = (".", "__MACOSX", "scores.csv", "misconceptions.csv", "verdicts.jsonl")


# {exercise: (verdict, the check's other arguments)}. A verdict is "right", "wrong: …" with the
# misconception, "open", or "look at this: …" with the reason.
Answers = dict[str, tuple[str, str]]


def grade_folder(
    folder: Path,
    out: Path,
    *,
    timeout: float = 120,
    jobs: int = 1,
    course: Sequence[Path] = (),
) -> pd.DataFrame:
    """Run the notebooks below a folder and return a row a student, a column an exercise.

    Writes `scores.csv` (the same table, with the number of right answers), `misconceptions.csv`
    (how many students had which) and `verdicts.jsonl`, from which a second call takes what has
    run already with equal content. A cell may take `timeout` seconds; `jobs` notebooks run at once,
    each with at most 6 GiB and files of 1 GiB (not on Windows). `course` are the notebooks that
    have the exercises, by default ours.

    A student is a folder below `folder`, or a file in it; hidden ones are left out. A file that
    cannot be read says so in the columns of the course's notebook that it is named after. If it is
    named after none, or if a student has no notebook, that stands in every column that is blank,
    or in a column `notebook` where nobody has an exercise. Raises FileNotFoundError if nobody has a
    notebook, and ConfigError if one in `course` cannot be read.
    """
    rows: dict[str, dict[str, str]] = {}
    whose = {}  # {notebook: its student}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        top = folder / parts[0]
        if top.resolve() == out.resolve() or any(part.startswith(NOT_WORK) for part in parts):
            continue
        student = top.name if top.is_dir() else top.stem
        rows[student] = {}
        if path.suffix == ".ipynb":
            whose[path] = student
    if not whose:
        raise FileNotFoundError(f"no notebook is below {folder}; if archives are, unpack them")
    blanks = {}  # {student: what stands in a row's cells that are blank}
    for student in sorted(rows.keys() - whose.values()):
        print(f"{student} handed in no notebook; if it is in an archive, unpack it")
        blanks[student] = f"{LOOK}no notebook"
    exercises = {path: _exercises(path) for path in course or all_notebooks()}
    own = {}  # {notebook: that of the course which it answers}
    damaged = {}
    for path, student in whose.items():
        try:
            theirs = _exercises(path)
        except (OSError, ConfigError) as error:
            print(error)
            reason = str(error).removeprefix(f"{path} is not a notebook: ")
            damaged[path] = f"{LOOK}cannot be read: {reason}"
            theirs = set()  # then its name tells
        best = max(exercises, key=lambda p: (len(exercises[p] & theirs), p.name == path.name))
        if path not in damaged or best.name == path.name:
            own[path] = best
        else:
            blanks[student] = damaged[path]
    needed = [path for path in exercises if path in own.values()]
    sound = sorted(own.keys() - damaged.keys())
    answers = _run_all([*needed, *sound], out / "verdicts.jsonl", timeout, jobs)
    for path, original in own.items():
        row, given = rows[whose[path]], answers.get(path, {})
        for exercise, (_, our_arguments) in answers[original].items():
            if exercise in row and exercise not in given:
                continue  # another notebook of this student has it
            not_called = damaged.get(path, f"{LOOK}its check was not called")
            verdict, arguments = given.get(exercise, (not_called, our_arguments))
            if arguments != our_arguments and not verdict.startswith(LOOK):
                verdict = f"{LOOK}its check was called with other arguments than the course's"
            if row.get(exercise) != "right":
                row[exercise] = verdict
    columns = pd.DataFrame(rows, dtype=object)  # a student each
    if columns.empty:
        columns = columns.reindex(["notebook"])
    scores = columns.fillna(blanks).T.rename_axis("student")
    scores.insert(0, "right", (scores == "right").sum(axis=1))
    scores.to_csv(out / "scores.csv")
    _misconceptions(scores).to_csv(out / "misconceptions.csv", index=False)
    return scores


def _misconceptions(scores: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each exercise and misconception: how many students had it."""
    verdicts = scores.drop(columns="right").melt(var_name="exercise", value_name="verdict")
    wrong = verdicts[verdicts.verdict.str.startswith("wrong: ", na=False)]
    wrong = wrong.assign(misconception=wrong.verdict.str.removeprefix("wrong: "))
    counts = wrong.groupby(["exercise", "misconception"]).size()
    return counts.sort_values(ascending=False).rename("students").reset_index()


def _exercises(path: Path) -> set[str]:
    cells = read_notebook(path).cells
    return {
        name for cell in cells if cell.cell_type == "code" for name in CALL.findall(cell.source)
    }


# ---- running


def _run_all(paths: Sequence[Path], store: Path, timeout: float, jobs: int) -> dict[Path, Answers]:
    """Return the answers in each notebook; what has run already is read from `store`."""
    keys = {}
    for path in paths:
        keys[path] = hashlib.sha256(path.read_bytes() + code_version().encode()).hexdigest()
    answers: dict[str, Answers] = {}
    if store.exists():
        for line in store.read_text(encoding="utf-8").splitlines():
            answers |= json.loads(line)
    open_paths = {keys[path]: path for path in paths if keys[path] not in answers}
    store.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, get_context("spawn"), _limit) as pool:
        runs = {pool.submit(answers_of, path, timeout): key for key, path in open_paths.items()}
        progress = tqdm(as_completed(runs), "notebooks", len(runs), file=sys.stdout, mininterval=1)
        with store.open("a", encoding="utf-8") as file:
            for run in progress:
                key = runs[run]
                answers[key] = run.result()
                print(json.dumps({key: answers[key]}), file=file, flush=True)
    return {path: answers[key] for path, key in keys.items()}


def _limit() -> None:
    """Limit this process, and with it the kernels it starts; Windows has no such limits."""
    if sys.platform == "win32":
        return
    import resource

    for name, most in MOST_BYTES.items():
        _, hard = resource.getrlimit(getattr(resource, name))
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (limit, hard))


def answers_of(path: Path, timeout: float) -> Answers:
    """Run a notebook without its slow cells and return its answers.

    A cell that takes longer than `timeout` seconds, or that ends its kernel, is left out and the
    notebook runs once more, so that one answer does not cost the others.
    """
    notebook = read_notebook(path)
    left_out: dict[int, str] = {}
    for _ in range(1 + len(notebook.cells)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            stopped = _run(notebook, Path(folder), timeout)
            verdicts = _read(Path(folder) / "verdicts")
        if stopped is None:
            break
        number, why = stopped
        left_out[number] = why
        notebook.cells[number].metadata["tags"] = [SLOW]
    answers: Answers = {}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                left_out.setdefault(number, f"its cell raised {output.ename}: {output.evalue}")
        if number in left_out:
            answers |= {name: (LOOK + left_out[number], "") for name in CALL.findall(cell.source)}
    return answers | verdicts


def _run(notebook: nbformat.NotebookNode, folder: Path, timeout: float) -> tuple[int, str] | None:
    """Run a notebook; return (number, why) of a cell that stopped it, or None."""
    current, group = 0, None

    def begin(cell_index: int, **_: object) -> None:
        nonlocal current, group
        current, group = cell_index, getattr(client.km.provisioner, "pgid", None)

    client = NotebookClient(
        notebook,
        timeout=timeout,
        allow_errors=True,
        extra_arguments=QUIET,
        kernel_name="python3",
        skip_cells_with_tag=SLOW,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=begin,
        shutdown_kernel="immediate",  # a busy one, asked to end, prints errors
    )
    own = {"LABUTILS_RUNS": str(folder / "runs"), VERDICTS: str(folder / "verdicts")}
    try:
        client.execute(env=os.environ | own | {"MPLBACKEND": "Agg"})
    except CellTimeoutError:
        return current, f"its cell took more than {timeout:g} s"
    except DeadKernelError:
        return current, "its cell ended the kernel"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(group, signal.SIGKILL)  # what a kernel that ended has started
    return None


def _read(path: Path) -> Answers:
    """Return what the exercises wrote; a line that is not theirs is left out."""
    verdicts: Answers = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                written = json.loads(line)
                verdicts[str(written["exercise"])] = str(written["verdict"]), written["arguments"]
    return verdicts
