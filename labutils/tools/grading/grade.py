"""Grade a folder of submissions: a row for each exercise of each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

from labutils.checks import EXERCISES
from labutils.files import REPO_DIR
from labutils.machine.host import free_host_bytes, usable_cpus
from labutils.tools.grading import notebook
from labutils.tools.grading.capstone import judge_config
from labutils.tools.grading.process import Limits, Outcome
from labutils.tools.grading.queue import Kept, judge_all
from labutils.tools.grading.submissions import (
    BY_FILE,
    Task,
    notebooks_in,
    student_of,
    tasks_in,
    version,
)

POINTS = Path(__file__).with_name("points.yaml")
COLUMNS = ["submission", "exercise", "verdict", "reason", "points", "of", "student"]
USUAL_GIB = 0.7  # of a process that judges


def read_points(path: Path = POINTS) -> dict[str, float]:
    """Return {exercise: points} of a YAML file. Raises ValueError."""
    try:
        points = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(points, dict):
        raise ValueError(f"{path}: lines such as 'amp_step: 3' are missing")
    for name, value in points.items():
        if name not in EXERCISES:
            raise ValueError(f"{path}: there is no exercise {name!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ValueError(f"{path}: {name}: points are a number, not {value!r}")
    return points


def at_once() -> int:
    """Return how many answers can be judged at once on this machine."""
    return max(1, min(usable_cpus(), int(free_host_bytes() / 2**30 / USUAL_GIB)))


def grade_folder(
    folder: Path,
    limits: Limits | None = None,
    kept: Path | None = None,
    points: Mapping[str, float] | None = None,
    n_at_once: int | None = None,
    with_capstone: bool = True,
    retry: bool = False,
    progress: Callable[[Sequence], Callable[[str], object]] | None = None,
) -> pd.DataFrame:
    """Return a table with a row for each exercise of each submission in a folder.

    Verdicts are kept in the file `kept`, and not judged again. `retry` judges those again for which
    time or memory was the reason. Raises ValueError.
    """
    points = read_points() if points is None else points
    limits = limits or Limits()
    closed = (*limits.closed, folder.resolve(), REPO_DIR / "tests" / "solutions")
    limits = Limits(limits.seconds, limits.memory_gib, closed)
    paths = notebooks_in(folder)
    tasks = [task for task in tasks_in(folder) if points.get(task.exercise, 1) > 0]
    outcomes = Kept(kept, retry)
    new = {task.key for task in tasks if task.outcome is None} - set(outcomes.outcomes)
    tell = progress(sorted(new)) if progress else lambda exercise: None
    judge_all(tasks, limits, outcomes, n_at_once or at_once(), tell)
    rows = [_row(task, task.outcome or outcomes.outcomes[task.key], points) for task in tasks]
    if with_capstone and points.get("capstone", 1) > 0:
        rows += _capstones(folder, paths, limits, outcomes, points)
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(task: Task, outcome: Outcome, points: Mapping[str, float]) -> list:
    of = points.get(task.exercise, 1.0) if task.exercise else 0.0
    reason = "; ".join(part for part in (outcome.reason, task.remark) if part)
    earned = round(outcome.share * of, 2)
    if outcome.verdict == "tampered":
        earned = float("nan")  # a person decides; the nets also catch honest code
    return [task.submission, task.exercise, outcome.verdict, reason, earned, of, task.student]


def _capstones(
    folder: Path, paths: Sequence[Path], limits: Limits, kept: Kept, points: Mapping[str, float]
) -> list[list]:
    """Judge the files that answer the capstone, one after the other: each trains a small twin."""
    configs = sorted({*folder.glob("**/*capstone*.yaml"), *folder.glob("**/*capstone*.yml")})
    rows = []
    for path in configs:
        name, student = path.relative_to(folder).as_posix(), student_of(path, folder)[0]
        content = path.read_bytes()
        key = hashlib.sha256(version().encode() + content).hexdigest()[:24]
        if key not in kept.outcomes:
            kept.add(key, judge_config(content, limits))
        rows.append(_row(Task(name, student, "capstone"), kept.outcomes[key], points))
    have = {student_of(path, folder)[0] for path in configs}
    for path in paths:
        student = student_of(path, folder)[0]
        if student not in have and _is_capstone(path):
            task = Task(path.relative_to(folder).as_posix(), student, "capstone")
            rows.append(_row(task, Outcome("missing", "no file *capstone*.yaml beside it"), points))
    return rows


def _is_capstone(path: Path) -> bool:
    try:
        found = notebook.exercises_of(notebook.code_cells(path))
    except ValueError:
        return False
    return bool(BY_FILE & set(found))
