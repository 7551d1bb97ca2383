"""Turn a folder of submissions into tasks: whose they are, which exercises, which answers."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labutils.files import REPO_DIR
from labutils.tools.grading import notebook, tampering
from labutils.tools.grading.judge import last_parameter
from labutils.tools.grading.notebook import Cut
from labutils.tools.grading.process import Outcome

BY_FILE = {"capstone"}  # its answer is a file, and a training run judges it

# "Ada Lovelace_1234567_assignsubmission_file" (Moodle's folders), "lovelaceada_12_345_01.ipynb"
# or "lovelaceada_LATE_12_345_01.ipynb" (Canvas's files)
MOODLE = re.compile(r"(?P<name>[^_]+)_(?P<number>\d+)_assignsubmission_\w+")
CANVAS = re.compile(r"(?P<name>[^_]+)(?:_LATE)?_(?P<number>\d+)_\d+_.+")


@dataclass(frozen=True)
class Task:
    """One exercise of one submission. It has an answer to judge, or an outcome already.

    `key` names what is judged: equal keys get equal outcomes. `remark` is said beside any verdict.
    `text` is what the student wrote in the cells of the answer.
    """

    submission: str
    student: str
    exercise: str
    answer: Cut | None = None
    outcome: Outcome | None = None
    remark: str = ""
    key: str = ""
    text: str = ""


def notebooks_in(folder: Path) -> list[Path]:
    """Return the submitted notebooks in a folder and those below it.

    Raises ValueError.
    """
    found = sorted(folder.glob("**/*.ipynb"))
    paths = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    if not paths:
        raise ValueError(f"no notebook in {folder}")
    return paths


def student_of(path: Path, folder: Path) -> tuple[str, str]:
    """Return (name, number) of whose file it is: by folder, or by Moodle's or Canvas's names.

    The number is empty where none is known.
    """
    first = path.relative_to(folder).parts[0]
    for pattern in (MOODLE, CANVAS):
        if match := pattern.fullmatch(first):
            return match["name"], match["number"]
    return Path(first).stem if first == path.name else first, ""


def tasks_in(folder: Path) -> list[Task]:
    """Return the tasks of every submitted notebook in a folder. Raises ValueError."""
    return [task for path in notebooks_in(folder) for task in tasks_of(path, folder)]


def tasks_of(path: Path, folder: Path) -> Iterator[Task]:
    """Yield a task for each exercise that a submitted notebook should have."""
    name, student = path.relative_to(folder).as_posix(), student_of(path, folder)[0]
    try:
        cells = notebook.code_cells(path)
    except ValueError as error:
        yield Task(name, student, "", outcome=Outcome("failed", str(error)))
        return
    calls = list(notebook.calls_in(cells))
    tampered = list(tampering.suspicious(cells))
    for exercise in notebook.expected(cells):
        places = [call for call in calls if call.exercise == exercise]
        if exercise in BY_FILE:
            continue
        if not places:
            why = _why_missing(cells, exercise)
            yield Task(name, student, exercise, outcome=Outcome("missing", why))
            continue
        last = places[-1]
        answer = notebook.answer_of(cells, last, last_parameter(exercise)[0])
        remarks = [f"called in {len(places)} cells; the last counts"] if len(places) > 1 else []
        if what := _tampering(exercise, answer, cells, tampered):
            remarks.append(f"look at this: {what}")  # the answer is judged like any other
        key = key_of(exercise, answer)
        text = "\n".join(cells[i] for i in answer.cells if cells[i] not in own_cells())
        yield Task(name, student, exercise, answer, None, "; ".join(remarks), key, text)


@functools.cache
def own_cells() -> frozenset[str]:
    """Return the cells of the course's own notebooks."""
    return frozenset(cell for cells in notebook.course().values() for cell in cells)


def _tampering(
    exercise: str, answer: Cut, cells: list[str], found: list[tuple[int, str]]
) -> str | None:
    """Return what concerns this exercise of the suspicious lines: its own, or the whole package."""
    if answer.expression == "None" or answer.source.rstrip().endswith("= None"):
        return None  # open: nothing to gain
    for cell, what in found:
        is_about_all = not re.search(r"\bchecks\.[a-z]", what) or f"checks.{exercise}" in what
        calls = [call.exercise for call in notebook.calls_in([cells[cell]])]
        if exercise in calls or (not calls and is_about_all):
            return what
    return None


def _why_missing(cells: list[str], exercise: str) -> str:
    for cell in cells:
        if exercise in cell and not notebook.is_python(cell):
            return "its cell is not Python"
    return f"no cell calls checks.{exercise}"


def key_of(exercise: str, answer: Cut) -> str:
    """Return a hash of what decides a verdict: the answer's source, the checks and the course."""
    parts = (version(), exercise, answer.source, answer.expression)
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:24]


@functools.cache
def version() -> str:
    """Return a hash of the checks, of this grader and of the course's own cells."""
    package = REPO_DIR / "labutils"
    sources = [*package.glob("checks/*.py"), *package.glob("tools/grading/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sorted(sources)]
    texts += [cell for cells in notebook.course().values() for cell in cells]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
