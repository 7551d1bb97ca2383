from __future__ import annotations

import json

import nbformat
import pytest

from labutils.tools.grading import notebook
from labutils.tools.grading.submissions import student_of, tasks_of


def cut(*cells: str) -> str:
    """Return the source for the answer of the first check in the last cell."""
    call = list(notebook.calls_in(cells))[-1]
    return notebook.answer_of(list(cells), call, "answer").source


def test_an_answer_brings_what_it_needs_and_nothing_else():
    cells = ["import slow\nslow.train()", "b = 1; other = slow.train()", "c = {}", "c['x'] = b"]
    cells += ["print(c)\nd = c['x'] + 1\nlab.checks.leak(d)"]
    assert cut(*cells).splitlines() == ["b = 1", "c = {}", "c['x'] = b", "d = c['x'] + 1"]


def test_the_local_names_of_a_function_bring_nothing():
    cells = ["model = slow()", "k = 2", "def f(x):\n    model = x * k\n    return model"]
    assert "slow" not in cut(*cells, "lab.checks.repair(f)")
    assert "k = 2" in cut(*cells, "lab.checks.repair(f)")


def test_what_a_function_looks_up_when_it_runs_may_stand_below_it():
    cells = ["def f():\n    return helper()", "def helper():\n    return 1", "lab.checks.repair(f)"]
    assert "def helper" in cut(*cells)


def test_a_method_of_the_answer_counts_and_one_of_a_module_does_not():
    cells = ["import torch", "x = []\nx.append(3)\ntorch.manual_seed(0)", "lab.checks.leak(x)"]
    assert cut(*cells).splitlines() == ["x = []", "x.append(3)"]


def test_a_keyword_and_unpacked_arguments_are_understood():
    call = next(notebook.calls_in(["lab.checks.placement(1, 2, answer=3 + 4)"]))
    assert notebook.answer_of(["..."], call, "answer").expression == "3 + 4"
    cells = ["everything = (1, 2, 7)\nlab.checks.placement(*everything)"]
    found = notebook.answer_of(cells, next(notebook.calls_in(cells)), "answer")
    names: dict = {}
    exec(found.source, names)
    assert eval(found.expression, names) == 7


@pytest.mark.parametrize("first", ["%matplotlib inline", "!pip list", "%%time", "?lab"])
def test_what_only_ipython_understands_does_not_hide_a_cell(first):
    found = notebook.as_python(f"{first}\nx = 1\nlab.checks.leak(x)")
    assert notebook.exercises_of([found]) == ["leak"]


def test_a_cell_that_is_no_python_has_no_exercise():
    assert not notebook.is_python("def (\nlab.checks.leak(1)")
    assert notebook.exercises_of(["def (\nlab.checks.leak(1)"]) == []


def test_every_exercise_of_the_course_can_be_found_with_what_is_given_to_it():
    from labutils.checks import EXERCISES

    for exercise in EXERCISES:
        given = notebook.given_of(exercise)
        assert "lab.run_experiment" not in given.source and "lab.answer" not in given.source


def test_a_renamed_notebook_is_known_by_its_exercises(tmp_path):
    for path in notebook.course():
        text = path.read_text(encoding="utf-8")
        (tmp_path / "mine.ipynb").write_text(text, encoding="utf-8")
        own = notebook.exercises_of(notebook.course()[path])
        if own and "capstone" not in own:
            assert [task.exercise for task in tasks_of(tmp_path / "mine.ipynb", tmp_path)] == own


def test_a_notebook_that_lost_its_checks_is_known_by_its_other_cells():
    for cells in notebook.course().values():
        own = notebook.exercises_of(cells)
        left = [cell for cell in cells if not notebook.exercises_of([cell])]
        assert notebook.expected(left) == own


def test_whose_a_file_is(tmp_path):
    def student(name: str) -> tuple[str, str]:
        return student_of(tmp_path / name, tmp_path)

    assert student("Ada Byron_123_assignsubmission_file/01.ipynb") == ("Ada Byron", "123")
    assert student("byronada_LATE_12_345_01-Mixed.ipynb") == ("byronada", "12")
    assert student("byronada_12_345_01-Mixed.ipynb") == ("byronada", "12")
    assert student("ada/01.ipynb") == ("ada", "")
    assert student("ada.ipynb") == ("ada", "")


def test_damaged_files_are_said_to_be_so(tmp_path):
    for name, text in (("a", "{"), ("b", '{"cells": 3}'), ("c", "[]")):
        (tmp_path / f"{name}.ipynb").write_text(text)
        (task,) = tasks_of(tmp_path / f"{name}.ipynb", tmp_path)
        assert "no notebook that can be read" in task.outcome.reason
    (tmp_path / "d.ipynb").write_text("\ufeff" + json.dumps(nbformat.v4.new_notebook()))
    assert {task.outcome.verdict for task in tasks_of(tmp_path / "d.ipynb", tmp_path)} == {
        "missing"
    }
