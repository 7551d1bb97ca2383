"""Each right solution passes; each classic wrong one fails with the misconception it shows."""

from __future__ import annotations

import inspect

import pytest

from labutils import checks
from tests.solutions import notebook_01 as right


def verdict(capsys, check, *arguments) -> str:
    check(*arguments)
    return capsys.readouterr().out.strip()


def test_right_answers_pass(capsys):
    assert verdict(capsys, checks.fp16_survivors, right.VALUES, right.SURVIVORS) == "Right."
    assert verdict(capsys, checks.bytes_per_parameter, right.BYTES_PER_PARAMETER) == "Right."
    assert verdict(capsys, checks.amp_step, right.amp_step) == "Right."


@pytest.mark.parametrize(
    ("answer", "misconception"),
    [
        ([6.1e-5, 1.0, 6e4], "full precision, not the numbers"),
        ([5e-6, 6.1e-5, 1.0, 6e4], "full precision"),
        ([*right.SURVIVORS, 2e-8], "rounding takes it to 0"),
        ([*right.SURVIVORS, 7e4], "beyond the largest"),
        ([4e-8, 5e-6, 6.1e-5, 1.0], "well inside the range"),
        ([3.0], "some of the given values"),
        (5, "some of the given values"),
        ([], "full precision"),
    ],
)
def test_wrong_survivors_are_named(capsys, answer, misconception):
    assert misconception in verdict(capsys, checks.fp16_survivors, right.VALUES, answer)


@pytest.mark.parametrize(
    ("answer", "misconception"),
    [
        (16, "that is AdamW"),
        (6, "everything halved"),
        (8, "is missing"),
        (10, "in 16 bits"),
        (14, "only during a step"),
        ("x", "one number"),
        ([4, 4, 4], "it raised TypeError"),
    ],
)
def test_wrong_bytes_are_named(capsys, answer, misconception):
    assert misconception in verdict(capsys, checks.bytes_per_parameter, answer)


def broken(*changes: tuple[str, str]):
    """Return the right step with source lines replaced."""
    source = inspect.getsource(right.amp_step)
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    namespace = {"torch": right.torch, "F": right.F}
    exec(source, namespace)
    return namespace["amp_step"]


UNSCALE = "    scaler.unscale_(optimizer)\n"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)\n"
STEP, UPDATE = "    scaler.step(optimizer)\n", "    scaler.update()\n"
ZERO = "    optimizer.zero_grad(set_to_none=True)\n"


@pytest.mark.parametrize(
    ("changes", "misconception"),
    [
        ([(UNSCALE + CLIP, CLIP + UNSCALE)], "too short"),
        ([(UNSCALE, "")], "too short"),
        ([(CLIP, "")], "longer than max_grad_norm"),
        ([(STEP, "    optimizer.step()\n")], "weights changed"),
        ([(UPDATE, "")], "who updates it"),
        ([(ZERO, "")], "never cleared"),
        ([("scaler.scale(loss)", "loss")], "scaler.scale"),
        ([("dtype=torch.float16", "enabled=False")], "is autocast on"),
        ([("torch.float16", "torch.bfloat16")], "for which dtype"),
        ([(STEP, "")], "did not change the weights"),
        ([(CLIP, CLIP + "    raise ValueError('x')\n")], "it raised ValueError"),
    ],
)
def test_wrong_step_is_named(capsys, changes, misconception):
    printed = verdict(capsys, checks.amp_step, broken(*changes))
    assert printed.startswith("Not yet:")
    assert misconception in printed


def test_the_broken_step_of_the_notebook_is_not_right(capsys):
    step = broken(
        (UNSCALE + CLIP + STEP + UPDATE + ZERO, CLIP + UNSCALE + "    optimizer.step()\n")
    )
    assert "Not yet" in verdict(capsys, checks.amp_step, step)


@pytest.mark.parametrize(
    "accepted",
    [
        [(ZERO, "    model.zero_grad()\n")],
        [("\n    scaler.scale", "\n    optimizer.zero_grad()\n    scaler.scale"), (ZERO, "")],
    ],
)
def test_other_right_ways_pass(capsys, accepted):
    assert verdict(capsys, checks.amp_step, broken(*accepted)) == "Right."


def test_hints_never_hold_an_answer():
    hints = " ".join(hint for steps in checks.HINTS.values() for hint in steps)
    assert "16 bytes" not in hints and "2.98" not in hints and "4e-08" not in hints
