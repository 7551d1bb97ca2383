"""Notebooks: executed into runs/, copied for students, and a class's, graded."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

from labutils.config.schema import ConfigError
from labutils.course.exercises import VERDICTS
from labutils.files import REPO_DIR, make_folder, runs_dir, write_atomically
from labutils.machine import choose_device, product_name

CELL_TIMEOUT_S = 1200
OTHER_FILES = {  # how files begin that are no notebooks, what they are, and what to do
    rb"[\s\xef\xbb\xbf]*<": "it is a web page; download the notebook itself",
    rb"PK": "it is a zip archive; unpack it",
    rb"\xff\xfe|\xfe\xff": "it is UTF-16 text; save it as UTF-8",
    rb"[\s\xef\xbb\xbf]*{": "it is damaged, or ends too early; save or download it again",
    rb"\s*$": "it is empty; save the notebook again",
    rb"": "Jupyter cannot open it; choose another file",
}
GUESS = re.compile(r'(\blab\.guess\(\s*"\w+",\s*f?"[^"]*")\s*\)')  # as it stands, without one
N_COVER = 4  # cells at most, before the first section
# a sentence on outputs to be cleared, of which a copy has none
CLEARING = re.compile(r"\b(?=[A-Z])(?:(?!\n\n)[^.])*?\b(?:saved outputs|[Cc]lear)\b[^.]*\.[ \n]?")


def core_notebooks() -> list[Path]:
    """Return the paths of notebooks 01 to 04, in order."""
    return sorted(REPO_DIR.glob("0*.ipynb"))


def all_notebooks() -> list[Path]:
    """Return the paths of the course's notebooks: the core, then the optional ones."""
    return [*core_notebooks(), *sorted(REPO_DIR.glob("further/*.ipynb"))]


def find_notebook(name: str) -> Path:
    """Return the notebook meant by a path, or by the name of a notebook of this course.

    The name may lack its ending, and a number is enough: "02". Raises OSError or ConfigError.
    """
    path = Path(name)
    if not path.is_file():
        known = {key: p for p in all_notebooks() for key in (p.stem.partition("-")[0], p.stem)}
        if path.name.removesuffix(".ipynb") not in known:
            there_are = ", ".join(p.relative_to(REPO_DIR).as_posix() for p in all_notebooks())
            raise FileNotFoundError(f"no such notebook: {name}. There are: {there_are}")
        path = known[path.name.removesuffix(".ipynb")]
    read_notebook(path)
    return path


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Return a notebook; a byte order mark before it is skipped.

    Raises OSError, and ConfigError for a file that is no notebook: it says what the file is.
    """
    content = path.read_bytes()
    try:
        notebook = nbformat.reads(content.decode("utf-8-sig"), as_version=4)
        "".join(cell.cell_type + cell.source for cell in notebook.cells)  # each has both
    except Exception as error:  # nbformat has no class of its own for JSON of another shape
        kinds = (kind for begin, kind in OTHER_FILES.items() if re.match(begin, content))
        raise ConfigError(f"{path} is not a notebook: {next(kinds)}") from error
    return notebook


def write_notebook(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Write a notebook as it is committed."""
    write_atomically(path, (nbformat.writes(notebook) + "\n").encode())


def without_outputs(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the notebook, its cells without what they have printed."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def client_of(notebook: nbformat.NotebookNode, folder: Path, **options: Any) -> NotebookClient:
    """Return what runs a notebook in a folder."""
    return NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of nothing of the course
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        **options,
    )


def execute(path: Path, *, in_place: bool = False, keep_going: bool = False) -> bool:
    """Run a notebook in a fresh kernel, write `runs/<name>.ipynb`, return success.

    It is written even if a cell fails, or at Ctrl-C: it shows how far it came. `in_place` writes
    it back to `path` instead, if it came to its end. `keep_going` executes what follows a cell that
    fails, too.
    """
    # without outputs: else a cell that is not reached keeps another machine's
    notebook, problem = without_outputs(read_notebook(path)), ""
    options = {"allow_errors": keep_going, "coalesce_streams": True}  # of a bar, only its end
    client = client_of(notebook, REPO_DIR, timeout=CELL_TIMEOUT_S, **options)
    start, interrupted = time.perf_counter(), False
    try:
        with client.setup_kernel(env=os.environ | {"LABUTILS_NOTEBOOK": path.stem}):
            code = [(n, cell) for n, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
            bar = {"unit": " cells", "file": sys.stdout, "mininterval": 0}
            for number, cell in tqdm(code, path.name, **bar):
                client.execute_cell(cell, number)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem, interrupted = f"interrupted in {path.name}", True
        # a client that is interrupted between two of its own tasks leaves one that never began
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    notebook.metadata.pop("widgets", None)
    failed = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":  # its frames name folders of this machine
                output.traceback = [f"{output.ename}: {output.evalue}"]
                failed += [] if "raises-exception" in cell.metadata.get("tags", []) else [number]
    if keep_going and failed and not problem:
        problem = f"failed: cells {', '.join(map(str, failed))} of {path.name}, from 0"
    target = path if in_place and not problem else runs_dir() / path.name
    if target != path:
        where, seconds = product_name(choose_device()), time.perf_counter() - start
        notebook.metadata["executed"] = f"Executed in {seconds:.0f} s on {where}"
    write_notebook(target, notebook)
    print(f"wrote {target}")
    if problem:
        print(problem, file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt  # the notebooks after it are not executed
    return not problem


def write_student_copy(path: Path, folder: Path) -> Path:
    """Write a notebook without outputs and without solutions into a folder; return the copy's path.

    A guess then comes before its result, and `...` stands where it is written. Cells tagged
    `solution` are left out, and so is how to clear outputs. A notebook of the
    course keeps its place below the folder, so that links lead from copy to copy, and those to
    pictures and other files back into the course. Raises OSError if the copy is there already.
    """
    notebook = without_outputs(read_notebook(path))
    notebook.cells = [c for c in notebook.cells if "solution" not in c.metadata.get("tags", [])]
    source, place = path.resolve(), Path(path.name)
    if source.is_relative_to(REPO_DIR):
        place = source.relative_to(REPO_DIR)
    make_folder(folder)
    target = folder / place
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another folder")

    def from_copy(link: re.Match) -> str:
        file = source.parent / link[1]
        if file.suffix == ".ipynb" or not file.is_file():
            return link[0]
        return f"]({Path(os.path.relpath(file, target.resolve().parent)).as_posix()})"

    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.source = GUESS.sub(r"\1, ...)", cell.source)
        else:
            cell.source = re.sub(r"\]\(([^()#:]+)\)", from_copy, cell.source)
            if number < N_COVER:
                cell.source = CLEARING.sub("", cell.source)
    write_notebook(target, notebook)
    return target


# ---- A class

CALL = re.compile(r"\bexercises\.(?!hint|self_test)(\w+)\(")
LOOK = "look at this: "
SLOW = "slow"  # the tag of cells that train for long, and that no exercise needs
# how names begin that nobody hands in: hidden files, what macOS packs, and ours
NOT_WORK = (".", "__MACOSX", "scores.csv", "misconceptions.csv")


def grade_folder(folder: Path, out: Path, timeout: float = 120) -> pd.DataFrame:
    """Run the notebooks below a folder; return a row for each student, a column for each exercise.

    Writes this table as `scores.csv`, with the number of right answers, and `misconceptions.csv`:
    how many students had which; both after each student, so that Ctrl-C loses none. A verdict is
    what the notebook said when it ran here. It proves nothing about who wrote it. A student is a
    folder below `folder`, or a file in it; hidden ones are left out. The column `notebook` says who
    has none, and whose cannot be read.
    Raises FileNotFoundError if nobody has a notebook.
    """
    course = [_exercises(read_notebook(path)) for path in core_notebooks()]
    whose: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        top = folder / parts[0]
        if top.resolve() == out.resolve() or any(part.startswith(NOT_WORK) for part in parts):
            continue
        notebooks = whose.setdefault(top.name if top.is_dir() else top.stem, [])
        notebooks += [path] if path.suffix.lower() == ".ipynb" else []
    if not any(whose.values()):
        raise FileNotFoundError(f"no notebook is below {folder}; if archives are, unpack them")
    make_folder(out)
    rows: dict[str, dict[str, str]] = {}
    for student, paths in tqdm(whose.items(), "students", file=sys.stdout, mininterval=1):
        row = rows[student] = {} if paths else {"notebook": f"{LOOK}no notebook"}
        for path in paths:
            try:
                verdicts = verdicts_of(path, timeout)
            except Exception as error:  # whatever is odd in it costs no other student
                reason = str(error).removeprefix(f"{path} is not a notebook: ")
                row["notebook"] = f"{LOOK}cannot be read: {reason}"
                continue
            of_course = max(course, key=lambda names: len(names.keys() & verdicts.keys()))
            if of_course.keys() & verdicts.keys():
                verdicts = dict.fromkeys(of_course, f"{LOOK}its check was not called") | verdicts
            is_right = {name for name, verdict in row.items() if verdict == "right"}
            row |= {name: verdicts[name] for name in verdicts if name not in is_right}
        if not row:
            row["notebook"] = f"{LOOK}no check is called; optional notebooks judge themselves"
        scores = _write_scores(rows, course, out)
    return scores


def _write_scores(
    rows: dict[str, dict[str, str]], course: list[dict[str, None]], out: Path
) -> pd.DataFrame:
    """Write the tables of some students; return the first, its columns in the course's order."""
    scores = pd.DataFrame.from_dict(rows, orient="index", dtype=object).rename_axis("student")
    columns = {name: None for names in ({"notebook": None}, *course, scores) for name in names}
    scores = scores[[name for name in columns if name in scores]]
    wrong = scores.melt(var_name="exercise", value_name="misconception").dropna()
    wrong = wrong[wrong.misconception.str.startswith("wrong: ")]
    wrong.misconception = wrong.misconception.str.removeprefix("wrong: ")
    scores.insert(0, "right", (scores == "right").sum(axis=1))
    scores.to_csv(out / "scores.csv")
    wrong.value_counts().rename("students").to_csv(out / "misconceptions.csv")
    return scores


def _exercises(notebook: nbformat.NotebookNode) -> dict[str, None]:
    """Return the names of the exercises that a notebook checks, in order."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return dict.fromkeys(CALL.findall("\n".join(code)))


def verdicts_of(path: Path, timeout: float) -> dict[str, str]:
    """Run a notebook without its slow cells; return {exercise: "right", "wrong: …", "open" or
    "look at this: …"}.

    A cell that takes longer than `timeout` seconds is interrupted. Without one that ignores this,
    or that ends its kernel, the notebook runs once more, so that one answer does not cost the
    others. A notebook that nowhere names the exercises is not run. Raises as `read_notebook` does.
    """
    notebook = read_notebook(path)
    if not any("exercises" in cell.source for cell in notebook.cells):
        return {}
    reasons: dict[int, str] = {}
    for _ in notebook.cells:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            stopped = _run(notebook, Path(folder), timeout)
            written = Path(folder, "verdicts")
            said = written.read_text(encoding="utf-8", errors="replace") if written.exists() else ""
        if stopped is None:
            break
        reasons[stopped] = "ended the kernel, or ignored an interrupt"
        notebook.cells[stopped].metadata["tags"] = [SLOW]
    verdicts: dict[str, str] = {}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                raised = f"raised {output.ename}: {output.evalue}"
                too_long = f"took more than {timeout:g} s"
                reasons.setdefault(number, too_long if "KeyboardInt" in raised else raised)
        if number in reasons:
            reason = f"{LOOK}its cell {reasons[number]}"
            verdicts |= dict.fromkeys(CALL.findall(cell.source), reason)
    for line in said.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a line that no exercise wrote
            verdict = json.loads(line)
            verdicts[str(verdict["exercise"])] = str(verdict["verdict"])
    return verdicts


def _run(notebook: nbformat.NotebookNode, folder: Path, timeout: float) -> int | None:
    """Run a notebook; return the number of a cell that stopped it, or None."""
    options = {"interrupt_on_timeout": True, "allow_errors": True, "skip_cells_with_tag": SLOW}
    options["shutdown_kernel"] = "immediate"  # a busy one, asked to end, prints errors
    client = client_of(without_outputs(notebook), folder, timeout=timeout, **options)
    own = {"LABUTILS_RUNS": str(folder / "runs"), VERDICTS: str(folder / "verdicts")}
    number, env = 0, os.environ | own | {"MPLBACKEND": "Agg"}
    with suppress(DeadKernelError), client.setup_kernel(env=env):
        kernel: Any = client.km
        for number, cell in enumerate(notebook.cells):
            # the end of a cell that catches interrupts
            end = threading.Timer(timeout + 5, kernel.provisioner.process.kill)
            end.start()
            try:
                client.execute_cell(cell, number)
            finally:
                end.cancel()
        return None
    return number
