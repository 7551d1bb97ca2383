"""A class is graded: no right answer is marked wrong, and nobody is accused."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from labutils.grade import CALL, answers_of, grade_folder
from labutils.pages import core_notebooks

SETUP = "import labutils as lab"
RUNS = "my_runs = {}"
CHECK_RUNS = "lab.exercises.block_runs(my_runs)"
STEP = "my_step = None"
CHECK_STEP = "lab.exercises.amp_step(my_step)"
RIGHT_STEP = """import torch

def my_step(model, x, y, optimizer, scaler, max_grad_norm):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()"""


def submission(*answers: str, runs: str = "my_runs = 24", step: str = RIGHT_STEP) -> list[str]:
    """Return the cells of a submission; `answers` are cells that stand between."""
    return [SETUP, *answers, runs, CHECK_RUNS, step, CHECK_STEP]


RIGHT = ["right", "right"]
# {student: (cells, how the verdicts of its two exercises begin)}
CLASS = {
    "aliases": (
        [
            "from labutils import exercises as judge",
            RIGHT_STEP,
            "judge.amp_step(my_step)",
            "judge.block_runs(answer=24)",
        ],
        RIGHT,
    ),
    "tries first": (submission("1 / 0", "my_runs = 12", CHECK_RUNS), RIGHT),
    "open": (submission(runs="my_runs = None", step=STEP), ["open", "open"]),
    "no checkpoint": (submission(runs="my_runs = 12"), ["wrong: that is a step", "right"]),
    "too long": (
        submission(step=RIGHT_STEP.replace(", max_grad_norm)\n", ", 1e9)\n")),
        ["right", "wrong: optimizer step 1: the gradients are not clipped"],
    ),
    "raises": (
        submission(step="def my_step(*_):\n    raise OSError('no')"),
        ["right", "wrong: it raised OSError: no"],
    ),
    "raises before": (submission(runs="my_runs = 1 / 0"), ["look at this: its cell", "right"]),
    "exits": (submission(runs="import os; os._exit(0)"), ["look at this: its cell", "right"]),
    "cell deleted": ([SETUP, RIGHT_STEP, CHECK_STEP], ["look at this: its check was", "right"]),
    "no setup": (submission()[1:], ["look at this: its cell raised NameError"] * 2),
}


def write(path: Path, cells: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    code = [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=code), path)


@pytest.fixture
def course(tmp_path: Path) -> Path:
    path = tmp_path / "course.ipynb"
    write(path, submission(runs="my_runs = None", step=STEP))
    return path


@pytest.mark.slow
def test_a_class_is_graded(course, tmp_path):
    for student, (cells, _) in CLASS.items():
        write(tmp_path / "class" / f"{student}.ipynb", cells)
    write(tmp_path / "class" / "in two" / "answers.ipynb", submission())
    write(tmp_path / "class" / "in two" / "optional.ipynb", [SETUP])
    write(tmp_path / "class" / "empty.ipynb", [])
    other = tmp_path / "another.ipynb"
    write(other, [SETUP, "lab.exercises.break_one('clipping', None)"])
    easier = [SETUP, "lab.exercises.break_one('step count', lambda *_: [])"]
    write(tmp_path / "class" / "other arguments" / other.name, easier)
    damaged = tmp_path / "class" / "text" / other.name
    write(damaged, [])
    damaged.write_text("no notebook")
    out = tmp_path / "out"
    scores = grade_folder(tmp_path / "class", out, timeout=600, jobs=2, course=[course, other])
    looks = ["look at this", "look at this"]
    expected = {student: begins for student, (_, begins) in CLASS.items()}
    expected |= {"in two": RIGHT, "empty": looks}
    assert set(scores.index) == {*expected, "text", "other arguments"}
    assert scores.loc["text"].notna().sum() == 2 and scores.break_one["text"].startswith(looks[0])
    easier = scores.break_one["other arguments"]
    assert easier == "look at this: its check was called with other arguments than the course's"
    for student, begins in expected.items():
        for exercise, begin in zip(("block_runs", "amp_step"), begins, strict=True):
            assert scores.loc[student, exercise].startswith(begin), student
    assert scores.right["tries first"] == 2 and scores.right["exits"] == 1
    read = pd.read_csv(out / "scores.csv", index_col="student")
    assert read.block_runs["no checkpoint"].startswith("wrong: that is a step")
    wrong = pd.read_csv(out / "misconceptions.csv")
    assert list(wrong.exercise.value_counts().items()) == [("amp_step", 2), ("block_runs", 1)]


def test_work_that_cannot_be_read_has_a_row_and_costs_no_other(course, tmp_path, capsys):
    """A file is named after the course's notebook, or after its student."""
    folder = tmp_path / "class"
    for place in ("mark/course.ipynb", "wrong/course.ipynb", "cut/course.ipynb", "nobody/.a"):
        write(folder / place, [SETUP, "my_runs = 12", CHECK_RUNS])
    for hidden in (
        "mark/._course.ipynb",
        "cut/.ipynb_checkpoints/course.ipynb",
        "__MACOSX/a.ipynb",
    ):
        write(folder / hidden, [])
    (folder / "mark" / "course.ipynb").write_text(
        (folder / "wrong" / "course.ipynb").read_text(encoding="utf-8"), encoding="utf-8-sig"
    )
    (folder / "cut" / "course.ipynb").write_text('{"cells": [')
    (folder / "anna.ipynb").write_text("<html>")
    (folder / "packed.zip").write_bytes(b"PK")
    scores = grade_folder(folder, tmp_path / "out", course=[course])
    reasons = {
        "cut": "look at this: cannot be read: it is damaged, or ends too early",
        "anna": "look at this: cannot be read: it is a web page",
        "packed": "look at this: no notebook",
        "nobody": "look at this: no notebook",
    }
    assert set(scores.index) == {"mark", "wrong", *reasons} and not scores.right.any()
    assert scores.block_runs["mark"].startswith("wrong: that is a step without checkpoints")
    printed = capsys.readouterr().out
    for student, reason in reasons.items():
        assert scores.block_runs[student].startswith(reason) and student in printed
        assert scores.amp_step[student] == scores.block_runs[student]
    assert list(pd.read_csv(tmp_path / "out" / "misconceptions.csv").students) == [2]


def test_a_class_without_one_sound_notebook_has_rows(tmp_path):
    """The tables may lie beside the work: they are nobody's."""
    (tmp_path / "anna.ipynb").write_bytes(b"")
    (tmp_path / "berta.zip").write_bytes(b"PK")
    for _ in range(2):
        scores = grade_folder(tmp_path, tmp_path / "grades")
        assert list(scores.index) == ["anna", "berta"]
        assert scores.notebook["anna"].startswith("look at this: cannot be read: it is empty")
        assert scores.notebook["berta"] == "look at this: no notebook"


def test_a_cell_that_takes_too_long_is_stopped_without_a_traceback(tmp_path, capfd):
    write(tmp_path / "endless.ipynb", [f"import time; time.sleep(600)  # {CHECK_STEP}"])
    verdict, _ = answers_of(tmp_path / "endless.ipynb", timeout=1)["amp_step"]
    assert verdict == "look at this: its cell took more than 1 s"
    assert "Traceback" not in capfd.readouterr().err  # the kernel writes there too


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
def test_a_notebook_leaves_no_process_behind(tmp_path):
    """A program that a cell began ends with its kernel, also when the kernel is gone already."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    begin = f"subprocess.Popen(['sleep', '600'], stdout=open('{tmp_path}/pipe', 'w'))"
    write(tmp_path / "begins.ipynb", [f"import os, subprocess\n{begin}\nos._exit(0)"])
    answers_of(tmp_path / "begins.ipynb", timeout=600)
    assert select.select([reader], [], [], 60)[0], "the program still holds the pipe"
    os.close(reader)


def test_a_folder_without_notebooks_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no notebook"):
        grade_folder(tmp_path, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("path", core_notebooks(), ids=lambda path: path.stem)
def test_no_exercise_needs_a_cell_tagged_slow(path, tmp_path):
    """Each check of a notebook is called, and its answer is open, without the slow cells."""
    answers = answers_of(path, timeout=3600)
    assert answers.keys() == set(CALL.findall(path.read_text(encoding="utf-8"))) - {
        "hint",
        "self_test",
    }
    assert {verdict for verdict, _ in answers.values()} <= {"open"}
