from __future__ import annotations

import pytest

from labutils import checks


@pytest.mark.parametrize(
    "check",
    [
        lambda: checks.fp16_survivors([1.0], None),
        lambda: checks.bytes_per_parameter(None),
        lambda: checks.amp_step(None),
        lambda: checks.amp_window(None),
        lambda: checks.accumulation_epoch(None),
        lambda: checks.floor_gib(1e9, None),
        lambda: checks.beta2(0.95, 4, None),
        lambda: checks.block_runs(12, 3, None),
        lambda: checks.best_segments(100, 9, None),
        lambda: checks.placement([1, 2], 1, None),
        lambda: checks.nvidia_smi(3.0, 3.6, 0.5, None),
        lambda: checks.leak(None),
        lambda: checks.largest_batch({2: 900, 6: 1700}, 4096, None),
    ],
)
def test_unanswered_exercise_passes_and_says_so(check, capsys):
    assert check() is None
    assert capsys.readouterr().out.startswith("Open:")


@pytest.mark.parametrize("exercise", checks.HINTS)
def test_hints_come_in_steps(exercise, capsys):
    for number in (1, 2, 3, 99):
        checks.hint(exercise, number)
    printed = capsys.readouterr().out.splitlines()
    assert len(set(printed[:3])) == 3
    assert printed[2] == printed[3]
