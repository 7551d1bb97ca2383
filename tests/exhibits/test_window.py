"""The film's bytes are the ledger's; the weights of tokens are those that torch finds."""

from __future__ import annotations

import random

import pytest
import torch

import labutils as lab
from labutils.exhibits.window_data import GROUPS, window_config

FRAMES = "return arguments[0].exhibit.frames(arguments[1], arguments[2]);"
WEIGH = "return arguments[1].map((lengths) => arguments[0].exhibit.weigh(lengths));"


@pytest.fixture(scope="module")
def exhibit():
    return lab.play.window()


def grouped(by_category: dict[str, int]) -> list[int]:
    return [sum(by_category[category] for category in group) for group in GROUPS.values()]


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 2), (2, 5), (8, 4), (1, 7), (3, 16), (1, 128)])
def test_each_phase_has_the_ledgers_bytes_at_its_peak(exhibit, browser, show, n, m):
    frames = browser.execute_script(FRAMES, show(exhibit), n, m)
    ledger = lab.predict_memory(window_config(n, m), "cpu")
    for phase, by_category in ledger.phases.items():
        of_phase = [frame["bytes"] for frame in frames if frame["phase"] == phase]
        assert max(of_phase, key=sum) == grouped(by_category), phase


def weights_by_torch(lengths: list[int]) -> tuple[list[float], list[float], float]:
    """Return the weights of a token, right and by the mean of means, and the gradient's error.

    The loss of a token of micro-batch i is the i-th weight, so mean gradients are unrelated.
    """
    w = torch.zeros(len(lengths), dtype=torch.float64, requires_grad=True)
    losses = [w[i].expand(length - 1) for i, length in enumerate(lengths)]
    n_targets = sum(map(len, losses))
    (right,) = torch.autograd.grad(sum(loss.sum() for loss in losses) / n_targets, w)
    (wrong,) = torch.autograd.grad(sum(loss.mean() for loss in losses) / len(losses), w)
    counts = torch.tensor([len(loss) for loss in losses])
    error = lab.compare_gradients(wrong, right).error
    return (right / counts).tolist(), (wrong / counts).tolist(), error


def test_weights_and_error_are_those_of_torchs_gradients(exhibit, browser, show):
    rng = random.Random(0)
    cases = [[rng.randrange(2, 65) for _ in range(4)] for _ in range(300)]
    pages = browser.execute_script(WEIGH, show(exhibit), cases)
    for lengths, page in zip(cases, pages, strict=True):
        right, wrong, error = weights_by_torch(lengths)
        assert [page["right"]] * 4 == pytest.approx(right, rel=1e-12)
        assert page["wrong"] == pytest.approx(wrong, rel=1e-12)
        assert page["error"] == pytest.approx(error, rel=1e-9, abs=1e-12)
