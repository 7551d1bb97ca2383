"""Each right answer passes; each classic wrong one gets the misconception it shows."""

from __future__ import annotations

import ast
import itertools
import re

import nbformat
import pytest
import torch

import labutils as lab
from labutils import checks
from labutils.checks.accumulation import INNOCENT, LATE_LINE
from labutils.checks.epoch_trials import judge_epoch
from labutils.checks.quiz import QUIZZES
from tests.helpers import committed
from tests.solutions import notebook_01, notebook_02, notebook_03, notebook_04

NOTEBOOKS = (notebook_01, notebook_02, notebook_03, notebook_04)
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
    assert verdict(capsys, exercise, answer).startswith("Right.")


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
    ],
)
def test_what_the_notebook_gives_as_broken_is_not_right(capsys, notebook, name, exercise):
    function = defined(given_function(notebook, name), name)
    assert verdict(capsys, exercise, function).startswith("Not yet:")


def test_the_loop_to_break_is_right_as_it_is_given(capsys):
    names = {}
    exec(f"import torch\nimport torch.nn.functional as F\n{given_epoch()}", names)
    assert set(judge_epoch(names["right_epoch"]).values()) == {None}
    assert "still right" in verdict(capsys, "break_one", names["right_epoch"])


def given_epoch() -> str:
    return given_function(notebook_02.NOTEBOOK, "right_epoch")


def test_each_judge_can_be_the_only_one_that_fails():
    last, clip = notebook_02.EPOCH_STEP, notebook_02.EPOCH_CLIP
    alone = {
        "clipping": notebook_02.epoch((clip, "")),
        "unequal lengths": notebook_02.ONLY_UNEQUAL[0],
        "logged losses": notebook_02.epoch(("losses.append(window_loss)", "losses.append(0.0)")),
        "step count": notebook_02.epoch((last, "")),
    }
    for judge, epoch in alone.items():
        failed = {name for name, problem in judge_epoch(epoch).items() if problem}
        assert failed == {judge}


def test_a_narrower_range_gets_more_points(capsys):
    for high, points in ((100, 3), (105, 2), (115, 1)):
        checks.peak_range(99.2, 50.0, (99, high))
        assert f"{points} of 3 points" in capsys.readouterr().out


def test_the_bug_stands_in_the_line_that_the_check_knows():
    """The line is numbered in the notebook; one level less to the right, it counts windows."""
    for cell in cells_of(notebook_02.NOTEBOOK):
        if "def suspect" in cell.source:
            source = cell.source
    line = f"            done += 1  # {LATE_LINE}\n"
    assert source.count(line) == 1
    assert [int(n) for n in re.findall(r"  # (\d+)$", source, re.M)] == list(range(1, 14))
    assert INNOCENT.keys() | {LATE_LINE} == set(range(1, 14))
    seen = {}
    for name, text in (("given", source), ("mended", source.replace(line, line[4:]))):
        asked = seen[name] = []
        names = {"lab": lab, "torch": torch, "islice": itertools.islice}
        exec(text, names)
        model = lab.build_model("gpt2-nano", dropout=0.0)
        stream = itertools.islice(lab.batches(lab.sequences(16), 1, seed=0), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        names["suspect"](model, stream, optimizer, lambda n, asked=asked: asked.append(n) or 0.0, 2)
    assert seen == {"given": [0, 2, 4], "mended": [0, 1, 2]}


@pytest.mark.parametrize("quiz", QUIZZES)
def test_self_test_tells_right_from_wrong_and_gives_no_answer_away(capsys, quiz):
    def printed_for(answers: list) -> str:
        checks.self_test(answers, quiz)
        return capsys.readouterr().out.strip()

    _, truths, _ = zip(*QUIZZES[quiz], strict=True)
    opposites = [not truth for truth in truths]
    nothing = [None] * len(truths)
    assert printed_for([truths[0], *nothing[1:]]).startswith("1. right")
    assert 2 <= sum(truths) <= len(truths) - 2
    for answers, word in ((truths, "right"), (opposites, "wrong"), (nothing, "open")):
        printed = printed_for(answers)
        assert printed.count(f". {word}") == len(truths)
    assert "(" not in printed.replace("empty_cache()", "")
    assert f"{len(truths)} statements" in printed_for([True])
