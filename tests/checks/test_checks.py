from __future__ import annotations

import inspect

import nbformat
import pytest

from labutils import checks
from labutils.grade import CALL
from tests.helpers import REPO, committed


@pytest.mark.parametrize("exercise", checks.EXERCISES)
def test_unanswered_exercise_passes_and_says_so(exercise, capsys):
    check = getattr(checks, exercise)
    nothing = [None] * len(inspect.signature(check).parameters)
    assert check(*nothing) is None
    assert capsys.readouterr().out.startswith("Open:")


@pytest.mark.parametrize("exercise", checks.EXERCISES)
def test_hints_come_in_steps(exercise, capsys):
    for number in (1, 2, 3, 99):
        checks.hint(exercise, number)
    printed = capsys.readouterr().out.splitlines()
    assert len(set(printed[:3])) == 3
    assert printed[2] == printed[3]


def test_an_unknown_exercise_is_answered_with_the_known_ones(capsys):
    checks.hint("amp_stepp")
    printed = capsys.readouterr().out
    assert "'amp_stepp'" in printed and all(name in printed for name in checks.EXERCISES)


def test_every_exercise_is_in_a_notebook_and_every_check_there_exists():
    called = set()
    for path in sorted([*REPO.glob("0*.ipynb"), *REPO.glob("further/*.ipynb")]):
        text = committed(path.relative_to(REPO).as_posix())
        for cell in nbformat.reads(text, as_version=4).cells:
            if cell.cell_type == "code":
                called |= set(CALL.findall(cell.source))
    assert called - {"hint", "self_test"} == checks.EXERCISES.keys()


def test_collected_verdicts_are_not_printed(capsys):
    with checks.collect_verdicts() as verdicts:
        checks.leak(None)
        checks.leak("running_mean")
        checks.leak("forward")
    assert capsys.readouterr().out == ""
    is_open, right, wrong = verdicts
    assert is_open.is_open and not right.is_open
    assert right.problem is None and "Who still needs them" in wrong.problem
    assert {verdict.exercise for verdict in verdicts} == {"leak"}
    checks.leak("running_mean")
    assert capsys.readouterr().out == "Right.\n"


def test_what_an_answer_raises_is_printed_to_readers_and_raised_to_collectors(capsys):
    def raises(*_):
        raise ValueError("x")

    checks.amp_step(raises)
    assert capsys.readouterr().out == "Not yet: it raised ValueError: x\n"
    with pytest.raises(ValueError, match="x"), checks.collect_verdicts():
        checks.amp_step(raises)
