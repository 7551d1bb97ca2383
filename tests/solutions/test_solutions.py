"""Each right answer passes; each classic wrong one gets the misconception it shows."""

from __future__ import annotations

import ast
import re

import nbformat
import pytest

from labutils import checks
from labutils.checks.quiz import STATEMENTS
from tests.helpers import committed
from tests.solutions import (
    notebook_01,
    notebook_02,
    notebook_03,
    notebook_04,
    notebook_capstone,
)

NOTEBOOKS = (notebook_01, notebook_02, notebook_03, notebook_04, notebook_capstone)
SOLUTIONS = {one.exercise: one for notebook in NOTEBOOKS for one in notebook.SOLUTIONS}


def verdict(capsys, exercise: str, answer: object) -> str:
    getattr(checks, exercise)(*SOLUTIONS[exercise].given, answer)
    return capsys.readouterr().out.strip()


def right_answers() -> list:
    cases = []
    for name, solution in SOLUTIONS.items():
        for i, answer in enumerate(solution.right):
            cases.append(pytest.param(name, answer, id=f"{name}-{i}"))
    return cases


def wrong_answers() -> list:
    cases = []
    for name, solution in SOLUTIONS.items():
        for i, (answer, words) in enumerate(solution.wrong):
            cases.append(pytest.param(name, answer, words, id=f"{name}-{i}"))
    return cases


@pytest.mark.parametrize(("exercise", "answer"), right_answers())
def test_right_answers_pass(capsys, exercise, answer):
    assert verdict(capsys, exercise, answer) == "Right."


@pytest.mark.parametrize(("exercise", "answer", "words"), wrong_answers())
def test_wrong_answers_get_their_misconception(capsys, exercise, answer, words):
    printed = verdict(capsys, exercise, answer)
    assert printed.startswith("Not yet: ")
    assert words in printed


@pytest.mark.parametrize("exercise", checks.EXERCISES)
def test_every_exercise_has_right_and_wrong_answers(exercise):
    assert SOLUTIONS[exercise].right and SOLUTIONS[exercise].wrong


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.NOTEBOOK)
def test_neither_hints_nor_notebook_hold_an_answer(notebook):
    texts = [cell.source for cell in cells_of(notebook.NOTEBOOK)]
    for solution in notebook.SOLUTIONS:
        texts += checks.EXERCISES[solution.exercise].hints
    assert not re.search(notebook.SECRETS, " ".join(texts))


def test_hints_name_no_number_of_bytes():
    for check in checks.EXERCISES.values():
        assert "16 bytes" not in " ".join(check.hints)


def cells_of(notebook: str) -> list[nbformat.NotebookNode]:
    return nbformat.reads(committed(notebook), as_version=4).cells


def given_function(notebook: str, name: str) -> str:
    """Return the source of a function that the notebook gives as broken."""
    for cell in cells_of(notebook):
        if cell.cell_type == "code" and f"def {name}" in cell.source:
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return ast.unparse(node)
    raise AssertionError(f"{notebook} has no function {name}")


def defined(source: str, name: str):
    namespace = {"torch": notebook_01.torch, "F": notebook_01.F}
    exec(source, namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("notebook", "name", "exercise"),
    [
        (notebook_01.NOTEBOOK, "broken_step", "amp_step"),
        (notebook_02.NOTEBOOK, "broken_window", "amp_window"),
        (notebook_02.NOTEBOOK, "broken_epoch", "accumulation_epoch"),
        (notebook_04.NOTEBOOK, "leaking_training", "repair"),
    ],
)
def test_what_the_notebook_gives_as_broken_is_not_right(capsys, notebook, name, exercise):
    function = defined(given_function(notebook, name), name)
    assert verdict(capsys, exercise, function).startswith("Not yet:")


def test_the_given_epoch_can_be_mended_one_bug_at_a_time(capsys):
    """Each mended bug changes the verdict, so that the reader sees progress."""
    source = given_function(notebook_02.NOTEBOOK, "broken_epoch")
    steps_first = "i % grad_accum_steps == 0"
    steps_last = "(i + 1) % grad_accum_steps == 0"
    steps_at_tail = f"{steps_last} or i + 1 == len(batches)"
    seen = []
    for old, new in ((steps_first, steps_last), (steps_last, steps_at_tail), ("", "")):
        seen.append(verdict(capsys, "accumulation_epoch", defined(source, "broken_epoch")))
        assert old in source
        source = source.replace(old, new)
    assert len(set(seen)) == 3 and all(text.startswith("Not yet:") for text in seen)


def test_self_test_tells_right_from_wrong_and_gives_no_answer_away(capsys):
    def printed_for(answers: list) -> str:
        checks.self_test(answers)
        return capsys.readouterr().out.strip()

    _, truths, _ = zip(*STATEMENTS, strict=True)
    opposites = [not truth for truth in truths]
    nothing = [None] * len(truths)
    first = printed_for([False, *nothing[1:]]).splitlines()[0]
    # Saving activations does not always lower the peak.
    assert first.startswith("1. right") and "saves activations always lowers" in first
    for answers, word in ((truths, "right"), (opposites, "wrong"), (nothing, "open")):
        printed = printed_for(answers)
        assert printed.count(f". {word}") == len(truths)
    assert "(" not in printed.replace("empty_cache()", "")
    assert "10 statements" in printed_for([True])
