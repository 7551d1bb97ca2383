"""Each right answer of notebook 03 passes; each classic wrong one fails with the misconception it
shows.
"""

from __future__ import annotations

import re

import nbformat
import pytest

from labutils import checks
from tests.helpers import committed
from tests.solutions import notebook_03 as right
from tests.solutions.test_solutions_01 import verdict

NOTEBOOK = "03-Gradient_Checkpointing.ipynb"
KEPT_MIB = [2, 2, 2, 2, 40, 2, 2, 2, 2, 2, 2, 2]


def test_right_answers_pass(capsys):
    assert verdict(capsys, checks.block_runs, 12, 3, right.BLOCK_RUNS) == "Right."
    assert verdict(capsys, checks.best_segments, 100, 4, right.SEGMENTS) == "Right."
    assert verdict(capsys, checks.placement, KEPT_MIB, 1, [0.0, 4.0, 5.0]) == "Right."
    assert verdict(capsys, checks.placement, KEPT_MIB, 1, right.STARTS) == "Right."


@pytest.mark.parametrize(
    ("answer", "misconception"),
    [
        (12, "without checkpointing"),
        (16, "not one block of each"),
        (21, "wherever it stands"),
        (20, "what goes in"),
        (36, "is not one"),
        (2, "more blocks"),
        (7, "block by block"),
        ("x", "block by block"),
    ],
)
def test_wrong_number_of_runs_is_named(capsys, answer, misconception):
    assert misconception in verdict(capsys, checks.block_runs, 12, 3, answer)


@pytest.mark.parametrize(
    ("answer", "misconception"),
    [
        (10, "keeps as much as its input"),
        (100, "one checkpoint per layer"),
        (1, "one segment"),
        (5, "the other way"),
        (50, "too many segments"),
        (15, "too few segments"),
        (20.5, "whole number"),
        (0, "between 1 and 100"),
        ("x", "whole number"),
    ],
)
def test_wrong_number_of_segments_is_named(capsys, answer, misconception):
    assert misconception in verdict(capsys, checks.best_segments, 100, 4, answer)


@pytest.mark.parametrize(
    ("answer", "misconception"),
    [
        ([0, 3, 6, 9], "equally long"),
        ([0, 4], "equally long"),
        ([0], "One segment"),
        (list(range(12)), "at each layer"),
        ([0, 2, 4, 5, 8], "so many segments"),
        ([4, 5], "starts at layer 0"),
        ([0, 12], "from 0 to 11"),
        (5, "is a list of layer numbers"),
    ],
)
def test_wrong_placement_is_named(capsys, answer, misconception):
    assert misconception in verdict(capsys, checks.placement, KEPT_MIB, 1, answer)


def test_neither_hints_nor_notebook_hold_an_answer():
    hints = " ".join(
        text for name in ("block_runs", "best_segments", "placement") for text in checks.HINTS[name]
    )
    cells = nbformat.reads(committed(NOTEBOOK), as_version=4).cells
    text = " ".join(cell.source for cell in cells) + hints
    assert not re.search(r"\[0, 4, 5\]|\b24 (times|runs)|\b30 segments", text)
