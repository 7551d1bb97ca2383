"""Optional notebooks whose judge still stands in the package: each goes with its cell."""

from __future__ import annotations

import pytest

from labutils import exercises
from tests.solutions import further_eight_bits, further_rounding

MODULES = (further_eight_bits, further_rounding)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NOTEBOOK)
def test_answers_get_their_verdicts(capsys, module):
    for exercise, solution in module.SOLUTIONS.items():
        for words, answer in [("Right.", each) for each in solution.right] + solution.wrong:
            getattr(exercises, exercise)(answer)
            assert words in capsys.readouterr().out
