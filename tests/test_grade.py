"""A class is graded: no right answer is marked wrong, and nobody is accused."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from labutils.grade import CALL, answers_of, grade_folder
from labutils.pages import core_notebooks

SETUP = "import labutils as lab"
RUNS = "my_runs = {}"
CHECK_RUNS = "lab.checks.block_runs(12, 3, my_runs)"
LIMIT = "my_limit = None"
CHECK_LIMIT = "lab.checks.lost_below(my_limit)"
RIGHT = {"block_runs": "right", "lost_below": "right"}
RIGHT_LIMIT = """import math
import torch

def my_limit(weight, dtype, direction):
    mantissa, exponent = math.frexp(weight)
    spacing = torch.finfo(dtype).eps * 2.0 ** (exponent - 1)
    return spacing / 4 if direction < 0 and mantissa == 0.5 else spacing / 2"""


def submission(*answers: str, runs: str = "my_runs = 24", limit: str = RIGHT_LIMIT) -> list[str]:
    """Return the cells of a submission; `answers` are cells that stand between."""
    return [SETUP, *answers, runs, CHECK_RUNS, limit, CHECK_LIMIT]


# {student: (cells, {exercise: how its verdict begins})}
HONEST = {
    "plain": submission(),
    "imports gc": submission("import gc; gc.collect()"),
    "inspects": submission("import inspect; print(inspect.getsource(lab.guess))"),
    "shuffles": submission("import random; x = [1, 2]; random.shuffle(x)"),
    "aliases": [
        "from labutils import checks as judge",
        "limit = None",
        RIGHT_LIMIT,
        "judge.lost_below(my_limit)",
        "judge.block_runs(n_layer=12, unit=3, answer=24)",
    ],
    "deletes a key": submission("d = {'a': 1}; del d['a']", runs="d[0] = 24; my_runs = d[0]"),
    "fills a list": submission(
        runs="def fill(x):\n    x.append(24)\nx = []\nfill(x)\nmy_runs = x[0]"
    ),
    "lambda": submission(
        limit=f"{RIGHT_LIMIT}\nlimit = my_limit\nmy_limit = lambda w, d, s: limit(w, d, s)"
    ),
    "tries first": submission("my_runs = 12", CHECK_RUNS),
    "other cells fail": submission("1 / 0"),
}
OTHERS = {
    "open": (submission(runs="my_runs = None", limit=LIMIT), ["open", "open"]),
    "no checkpoint": (submission(runs="my_runs = 12"), ["wrong: that is the step", "right"]),
    "too high": (
        submission(limit=RIGHT_LIMIT.replace("spacing / 2", "spacing")),
        ["right", "wrong: for a weight"],
    ),
    "raises": (
        submission(limit="def my_limit(*_):\n    raise OSError('no')"),
        ["right", "wrong: it raised OSError: no"],
    ),
    "raises before": (submission(runs="my_runs = 1 / 0"), ["look at this: its cell", "right"]),
    "syntax error": (submission(runs="my_runs = = 24"), ["look at this: its cell", "right"]),
    "endless": (submission(limit="while True:\n    pass"), ["right", "look at this: its cell"]),
    "exits": (submission(runs="import os; os._exit(0)"), ["look at this: its cell", "right"]),
    "other arguments": (
        [SETUP, "lab.checks.block_runs(2, 1, 4)", RIGHT_LIMIT, CHECK_LIMIT],
        ["look at this: its check was called with other", "right"],
    ),
    "cell deleted": ([SETUP, RIGHT_LIMIT, CHECK_LIMIT], ["look at this: its check was", "right"]),
    "no setup": (submission()[1:], ["look at this: its cell raised NameError"] * 2),
}


def write(path: Path, cells: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    code = [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=code), path)


@pytest.fixture
def course(tmp_path: Path) -> Path:
    path = tmp_path / "course.ipynb"
    write(path, submission(runs="my_runs = None", limit=LIMIT))
    return path


@pytest.mark.slow
def test_a_class_is_graded(course, tmp_path):
    for student, cells in HONEST.items():
        write(tmp_path / "class" / student / "answers.ipynb", cells)
    for student, (cells, _) in OTHERS.items():
        write(tmp_path / "class" / f"{student}.ipynb", cells)
    write(tmp_path / "class" / "empty.ipynb", [])
    (tmp_path / "class" / "text.ipynb").write_text("no notebook")
    out = tmp_path / "out"
    scores = grade_folder(tmp_path / "class", out, timeout=20, jobs=2, course=[course])
    assert len(scores) == len(HONEST) + len(OTHERS) + 2
    columns = ["block_runs", "lost_below"]
    for student in HONEST:
        assert list(scores.loc[student, columns]) == ["right", "right"], student
    for student, (_, begins) in OTHERS.items():
        for verdict, begin in zip(scores.loc[student, columns], begins, strict=True):
            assert verdict.startswith(begin), (student, verdict)
    for student in ("empty", "text"):
        assert scores.loc[student, columns].str.startswith("look at this").all()
    assert scores.loc["plain", "right"] == 2 and scores.loc["exits", "right"] == 1
    assert not re.search("tamper|cheat", scores.to_string())
    read = pd.read_csv(out / "scores.csv", index_col="student")
    assert read.loc["no checkpoint", "block_runs"].startswith("wrong: that is the step")
    wrong = pd.read_csv(out / "misconceptions.csv")
    assert list(wrong.exercise.value_counts().items()) == [("lost_below", 2), ("block_runs", 1)]


def test_a_folder_without_notebooks_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no notebook"):
        grade_folder(tmp_path, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("path", core_notebooks(), ids=lambda path: path.stem)
def test_no_exercise_needs_a_cell_tagged_slow(path, tmp_path):
    """Each check of a notebook is called, and its answer is open, without the slow cells."""
    answers = answers_of(path, timeout=300)
    assert answers.keys() == set(CALL.findall(path.read_text(encoding="utf-8"))) - {
        "hint",
        "self_test",
    }
    assert {verdict for verdict, _ in answers.values()} <= {"open"}
