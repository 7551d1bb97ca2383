"""A class is graded: no right answer is marked wrong, and nobody is accused."""

from __future__ import annotations

import inspect
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from labutils.course import labs
from labutils.course.labs import CALL, core_notebooks, grade_folder, verdicts_of
from tests.solutions.notebook_01 import amp_step

SETUP = "import labutils as lab"
CHECK_RUNS = "lab.exercises.block_runs(my_runs)"
STEP = "my_step = None"
CHECK_STEP = "lab.exercises.amp_step(my_step)"
RIGHT_STEP = f"""import torch
import torch.nn.functional as F

{inspect.getsource(amp_step)}
my_step = amp_step"""


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
    "exits": (
        submission(step="import os; os._exit(0)"),
        ["right", "look at this: its cell raised NameError"],
    ),
    "cell deleted": ([SETUP, RIGHT_STEP, CHECK_STEP], ["look at this: its check was", "right"]),
    "no setup": (submission()[1:], ["look at this: its cell raised NameError"] * 2),
}


def write(path: Path, cells: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    code = [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=code), path)


@pytest.fixture(autouse=True)
def course(tmp_path: Path, monkeypatch) -> Path:
    """A course of one notebook with two exercises."""
    path = tmp_path / "course.ipynb"
    write(path, submission(runs="my_runs = None", step=STEP))
    monkeypatch.setattr(labs, "core_notebooks", lambda: [path])
    return path


@pytest.mark.slow
def test_a_class_is_graded(tmp_path):
    for student, (cells, _) in CLASS.items():
        write(tmp_path / "class" / f"{student}.ipynb", cells)
    write(tmp_path / "class" / "in two" / "answers.ipynb", submission())
    write(tmp_path / "class" / "in two" / "optional.ipynb", [SETUP, "my_runs = 12", CHECK_RUNS])
    scores = grade_folder(tmp_path / "class", tmp_path / "out", timeout=600)
    expected = {student: begins for student, (_, begins) in CLASS.items()} | {"in two": RIGHT}
    assert set(scores.index) == set(expected)
    for student, begins in expected.items():
        for exercise, begin in zip(("block_runs", "amp_step"), begins, strict=True):
            assert scores.loc[student, exercise].startswith(begin), student
    assert scores.right["tries first"] == 2 and scores.right["exits"] == 1
    read = pd.read_csv(tmp_path / "out" / "scores.csv", index_col="student")
    assert read.block_runs["no checkpoint"].startswith("wrong: that is a step")
    wrong = pd.read_csv(tmp_path / "out" / "misconceptions.csv")
    assert list(wrong.exercise.value_counts().items()) == [("amp_step", 2), ("block_runs", 1)]
    assert not wrong.misconception.str.startswith("wrong").any()


def test_work_that_cannot_be_read_has_a_row_and_costs_no_other(tmp_path):
    folder = tmp_path / "class"
    for place in ("mark/a.ipynb", "wrong/a.ipynb", "cut/a.ipynb", "nobody/.a"):
        write(folder / place, [SETUP, "my_runs = 12", CHECK_RUNS])
    for hidden in ("mark/._a.ipynb", "cut/.ipynb_checkpoints/a.ipynb", "__MACOSX/a.ipynb"):
        write(folder / hidden, [])
    with_mark = (folder / "wrong" / "a.ipynb").read_text(encoding="utf-8")
    (folder / "mark" / "a.ipynb").write_text(with_mark, encoding="utf-8-sig")
    (folder / "cut" / "a.ipynb").write_text('{"cells": [')
    write(folder / "blank.IPYNB", [f"open({str(tmp_path / 'ran')!r}, 'w')"])
    (folder / "anna.ipynb").write_text("<html>")
    (folder / "odd.ipynb").write_text(
        with_mark.replace('"metadata": {}', '"metadata": {"tags": null}')
    )
    (folder / "packed.zip").write_bytes(b"PK")
    reasons = {
        "cut": "look at this: cannot be read: it is damaged, or ends too early",
        "anna": "look at this: cannot be read: it is a web page",
        "packed": "look at this: no notebook",
        "nobody": "look at this: no notebook",
        "blank": "look at this: no check is called",
        "odd": "look at this: cannot be read: ",
    }
    for _ in range(2):  # the tables may lie beside the work: they are nobody's
        scores = grade_folder(folder, folder / "grades")
        assert set(scores.index) == {"mark", "wrong", *reasons} and not scores.right.any()
        assert list(scores) == ["right", "notebook", "block_runs", "amp_step"]
        assert scores.block_runs["mark"].startswith("wrong: that is a step without checkpoints")
        assert scores.amp_step["mark"] == "look at this: its check was not called"
        for student, reason in reasons.items():
            assert scores.notebook[student].startswith(reason)
    assert list(pd.read_csv(folder / "grades" / "misconceptions.csv").students) == [2]
    assert not (tmp_path / "ran").exists()  # what names no exercise


def test_a_cell_that_ignores_interrupts_costs_no_other_answer(tmp_path, capfd):
    busy = "while True:\n    try:\n        time.sleep(9)\n    except KeyboardInterrupt: pass"
    lines = '{"exercise": "block_runs", "verdict": "right"}\\nno line of ours\\n'
    says = f"import os\nopen(os.environ['LABUTILS_VERDICTS'], 'a').write('{lines}')"
    write(tmp_path / "endless.ipynb", [f"import time\n{busy}  # {CHECK_STEP}", says])
    assert verdicts_of(tmp_path / "endless.ipynb", timeout=2) == {
        "amp_step": "look at this: its cell ended the kernel, or ignored an interrupt",
        "block_runs": "right",
    }
    assert "Traceback" not in capfd.readouterr().err  # the kernel writes there too


def test_a_class_of_one_who_calls_no_check_has_its_row(tmp_path):
    write(tmp_path / "class" / "anna.ipynb", ["1"])
    scores = grade_folder(tmp_path / "class", tmp_path / "out")
    words = "look at this: no check is called; optional notebooks judge themselves"
    assert scores.notebook.to_dict() == {"anna": words}


def test_who_ends_the_command_keeps_what_is_graded(tmp_path, monkeypatch):
    for student in ("anna", "ben"):
        write(tmp_path / "class" / f"{student}.ipynb", [])

    def verdicts(path, timeout):
        if path.stem == "ben":
            raise KeyboardInterrupt
        return {"block_runs": "right"}

    monkeypatch.setattr(labs, "verdicts_of", verdicts)
    with pytest.raises(KeyboardInterrupt):
        grade_folder(tmp_path / "class", tmp_path / "out")
    assert list(pd.read_csv(tmp_path / "out" / "scores.csv").student) == ["anna"]


def test_a_folder_without_notebooks_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no notebook"):
        grade_folder(tmp_path / "class", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("path", core_notebooks(), ids=lambda path: path.stem)
def test_no_exercise_needs_a_cell_tagged_slow(path, tmp_path):
    """Each check of a notebook is called, and its answer is open, without the slow cells."""
    verdicts = verdicts_of(path, timeout=3600)
    assert verdicts.keys() == set(CALL.findall(path.read_text(encoding="utf-8")))
    assert set(verdicts.values()) <= {"open"}
