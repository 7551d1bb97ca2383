"""Each right solution of notebook 02 passes; each classic wrong one fails with the misconception it
shows.
"""

from __future__ import annotations

import ast
import inspect
import re

import nbformat
import pytest
import torch

from labutils import checks
from tests.helpers import committed
from tests.solutions import notebook_02 as right
from tests.solutions.test_solutions_01 import verdict

NOTEBOOK = "02-Gradient_Accumulation.ipynb"


def test_right_answers_pass(capsys):
    assert verdict(capsys, checks.amp_window, right.amp_window) == "Right."
    assert verdict(capsys, checks.accumulation_epoch, right.accumulation_epoch) == "Right."
    assert verdict(capsys, checks.floor_gib, 1e9, right.FLOOR_GIB) == "Right."
    assert verdict(capsys, checks.floor_gib, 1e9, 14.9) == "Right."
    assert verdict(capsys, checks.beta2, 0.95, 4, right.BETA2) == "Right."
    assert verdict(capsys, checks.beta2, 0.95, 4, 0.815) == "Right."


def broken(function, *changes: tuple[str, str]):
    """Return the right solution with source lines replaced."""
    source = inspect.getsource(function)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    namespace = {"torch": right.torch, "F": right.F, "islice": right.islice}
    exec(source, namespace)
    return namespace[function.__name__]


SCALE, UNSCALE = "        scaler.scale(loss).backward()\n", "    scaler.unscale_(optimizer)\n"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)\n"
STEP, UPDATE = "    scaler.step(optimizer)\n", "    scaler.update()\n"
OWN_STEP = "    optimizer.step()\n"
ZERO = "    optimizer.zero_grad(set_to_none=True)\n"
SUM = ', reduction="sum") / n_rows'


def inner(*lines: str) -> str:
    return "".join(f"    {line}" for line in lines)


@pytest.mark.parametrize(
    ("changes", "misconception"),
    [
        ([(SUM, ")")], "the gradient grows with their number"),
        ([(SUM, ") / len(micro_batches)")], "a mean of means"),
        ([(SUM, ', reduction="sum")')], "never divided"),
        (
            [
                (UNSCALE + CLIP + STEP + UPDATE, CLIP + OWN_STEP),
                (SCALE, SCALE + inner(UNSCALE, UPDATE)),
            ],
            "only the last",
        ),
        ([(SCALE, SCALE + inner(UNSCALE, UPDATE))], "more than once"),
        ([(SCALE, SCALE + inner(UNSCALE))], "it raised RuntimeError"),
        ([(SCALE, inner(ZERO) + SCALE)], "only the last micro-batch"),
        (
            [
                (SCALE, SCALE + inner(UNSCALE, CLIP, STEP, UPDATE, ZERO)),
                (UNSCALE + CLIP + STEP + UPDATE, ""),
            ],
            "4 times",
        ),
        ([(UNSCALE + CLIP, CLIP + UNSCALE)], "far too short"),
        ([(UNSCALE, "")], "far too short"),
        ([(CLIP, "")], "longer than max_grad_norm"),
        ([(STEP, OWN_STEP)], "The whole window must be skipped"),
        ([(UNSCALE, ""), (STEP + UPDATE, OWN_STEP)], "is the scale ever taken out"),
        ([(UPDATE, "")], "updated once"),
        ([(ZERO, "")], "never cleared"),
        ([("dtype=torch.float16", "enabled=False")], "is autocast on"),
        ([(STEP, "")], "stepped 0 times"),
        ([(UPDATE, UPDATE + "    raise ValueError('x')\n")], "it raised ValueError"),
    ],
)
def test_wrong_window_is_named(capsys, changes, misconception):
    printed = verdict(capsys, checks.amp_window, broken(right.amp_window, *changes))
    assert printed.startswith("Not yet:")
    assert misconception in printed


EPOCH_CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)\n"
EPOCH_STEP, EPOCH_ZERO = "        optimizer.step()\n", "        optimizer.zero_grad()\n"
BACKWARD = "            loss.backward()\n"
WINDOWS = "    while window := list(islice(batches, grad_accum_steps)):\n"


@pytest.mark.parametrize(
    ("changes", "misconception"),
    [
        ([(SUM, ")")], "the gradient grows with their number"),
        ([(SUM, ") / len(window)")], "a mean of means"),
        ([(SUM, ', reduction="sum")')], "never divided"),
        (
            [
                (
                    SUM,
                    ', reduction="sum") / sum(len(y) for _, y in window) * len(window) / grad_accum_steps',
                )
            ],
            "as if it",
        ),
        (
            [(WINDOWS, "    batches = list(batches)[:6]\n    batches = iter(batches)\n" + WINDOWS)],
            "last, shorter",
        ),
        ([(EPOCH_ZERO, "")], "earlier window"),
        ([(EPOCH_CLIP, "")], "not clipped"),
        ([(BACKWARD, BACKWARD + "    " + EPOCH_CLIP)], "clipped after every micro-batch"),
        (
            [("window_loss += loss.item()", "window_loss = loss.item() * n_rows / len(y)")],
            "last micro-batch only",
        ),
        (
            [("window_loss += loss.item()", "window_loss = loss.item()")],
            "not the means over all rows",
        ),
        ([("    return losses\n", "")], "one loss per optimizer step"),
        ([(EPOCH_STEP, "")], "never stepped"),
        ([(BACKWARD, BACKWARD + "    " + EPOCH_STEP)], "windows are there"),
        (
            [("batches = [], iter(batches)", "batches = [], iter([*batches[:1], *batches])")],
            "wrong micro-batches",
        ),
    ],
)
def test_wrong_epoch_is_named(capsys, changes, misconception):
    printed = verdict(capsys, checks.accumulation_epoch, broken(right.accumulation_epoch, *changes))
    assert printed.startswith("Not yet:")
    assert misconception in printed


def given_functions() -> dict[str, str]:
    """Return {name: source} of the functions that the notebook gives as broken."""
    cells = nbformat.reads(committed(NOTEBOOK), as_version=4).cells
    source = "\n".join(
        cell.source for cell in cells if cell.cell_type == "code" and "def broken_" in cell.source
    )
    tree = ast.parse(source)
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ["broken_window", "broken_epoch"])
def test_what_the_notebook_gives_as_broken_is_not_right(capsys, name):
    namespace = {"torch": right.torch, "F": right.F}
    exec(given_functions()[name], namespace)
    check = checks.amp_window if name == "broken_window" else checks.accumulation_epoch
    assert verdict(capsys, check, namespace[name]).startswith("Not yet:")


def test_the_given_epoch_can_be_mended_one_bug_at_a_time(capsys):
    """Each mended bug changes the verdict, so that the reader sees progress."""
    namespace = {"torch": right.torch, "F": right.F}
    source = given_functions()["broken_epoch"]
    seen = []
    for old, new in (
        ("i % grad_accum_steps == 0", "(i + 1) % grad_accum_steps == 0"),
        (
            "(i + 1) % grad_accum_steps == 0",
            "(i + 1) % grad_accum_steps == 0 or i + 1 == len(batches)",
        ),
    ):
        exec(source, namespace)
        seen.append(verdict(capsys, checks.accumulation_epoch, namespace["broken_epoch"]))
        assert old in source
        source = source.replace(old, new)
    exec(source, namespace)
    seen.append(verdict(capsys, checks.accumulation_epoch, namespace["broken_epoch"]))
    assert len(set(seen)) == 3 and all(text.startswith("Not yet:") for text in seen)


@pytest.mark.parametrize(
    ("answer", "misconception"),
    [
        (16, "right in GB"),
        (12e9 / 2**30, "gradients are missing"),
        (4e9 / 2**30, "what does AdamW remember"),
        (8e9 / 2**30, "what does AdamW remember"),
        (6, "too low"),
        (40, "too high"),
        ("x", "a number of GiB"),
    ],
)
def test_wrong_floor_is_named(capsys, answer, misconception):
    assert misconception in verdict(capsys, checks.floor_gib, 1e9, answer)


@pytest.mark.parametrize(
    ("answer", "misconception"),
    [
        (0.95, "unchanged"),
        (0.95**0.25, "other direction"),
        (1 - 0.05 / 4, "other direction"),
        (0.8, "first-order"),
        (0.95 / 4, "not a length"),
        (0.5, "compare half-lives"),
    ],
)
def test_wrong_beta2_is_named(capsys, answer, misconception):
    assert misconception in verdict(capsys, checks.beta2, 0.95, 4, answer)


def test_neither_hints_nor_notebook_hold_an_answer():
    exercises = ("amp_window", "accumulation_epoch", "floor_gib", "beta2")
    hints = " ".join(text for name in exercises for text in checks.HINTS[name])
    cells = nbformat.reads(committed(NOTEBOOK), as_version=4).cells
    text = " ".join(cell.source for cell in cells) + hints
    assert not re.search(r"0\.8145|14\.9\b|0\.95 ?\*\* ?4", text)


def window_at_once(model, window, optimizer, scaler, max_grad_norm):
    whole = [tuple(torch.cat(parts) for parts in zip(*window, strict=True))]
    right.amp_window(model, whole, optimizer, scaler, max_grad_norm)


def tail_not_clipped(model, batches, optimizer, n, max_grad_norm):
    return [
        right.accumulation_epoch(
            model, batches[i : i + n], optimizer, n, max_grad_norm if i + n <= len(batches) else 1e9
        )[0]
        for i in range(0, len(batches), n)
    ]


def tail_not_cleared(model, batches, optimizer, n, max_grad_norm):
    """The last window steps, and its gradients stay for the next epoch."""
    clear = optimizer.zero_grad
    losses = right.accumulation_epoch(
        model, batches[: len(batches) // n * n], optimizer, n, max_grad_norm
    )
    optimizer.zero_grad = lambda *_, **__: None
    try:
        return losses + right.accumulation_epoch(
            model, batches[len(batches) // n * n :], optimizer, n, max_grad_norm
        )
    finally:
        optimizer.zero_grad = clear


def test_what_is_right_only_at_first_sight(capsys):
    assert "full batch" in verdict(capsys, checks.amp_window, window_at_once)
    assert "step 3 of epoch 1, with clipping: the gradients are not clipped" in verdict(
        capsys, checks.accumulation_epoch, tail_not_clipped
    )
    assert (
        "were the gradients of the last window cleared"
        in verdict(capsys, checks.accumulation_epoch, tail_not_cleared).lower()
    )


@pytest.mark.parametrize("answer", [12.5, 13, 14.4])
def test_a_floor_below_the_right_one_is_too_low(capsys, answer):
    assert "too low" in verdict(capsys, checks.floor_gib, 1e9, answer)


@pytest.mark.parametrize("answer", ["14.9", float("nan"), -1, True])
def test_a_floor_that_is_no_number_is_refused(capsys, answer):
    assert "a number of GiB" in verdict(capsys, checks.floor_gib, 1e9, answer)
