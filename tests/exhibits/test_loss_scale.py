from __future__ import annotations

import math

import pytest
import torch

import labutils as lab
from labutils.exhibits import loss_scale_data
from labutils.techniques.numerics import fp16_fate

SCALES = range(31)
INTERVALS = (1, 2, 5, 2000)


def ask(browser, root, expression: str, values):
    """Return what the page's own functions make of `values`."""
    names = "const { half, shares, walk } = arguments[0].exhibit, values = arguments[1];"
    return browser.execute_script(f"{names} return {expression};", root, values)


def test_gradients_on_the_edges_have_the_right_fate(show, browser):
    """All that lies just below, on, and just above what decides, at every scale."""
    edges = []
    for threshold in (2.0**-25, 2.0**-14 - 2.0**-25, 2.0**-14, 65504.0, 65520.0):
        for k in SCALES:
            middle = torch.tensor(threshold * 2.0**-k)
            up, down = torch.tensor(torch.inf), torch.tensor(0.0)
            edges += [middle, torch.nextafter(middle, up), -torch.nextafter(middle, down)]
    values = torch.stack([*edges, torch.tensor(0.0), torch.tensor(1e-45), torch.tensor(3e38)])
    root = show(lab.play.loss_scale(values))
    found = ask(browser, root, "values.map(shares)", [*SCALES])
    for k in SCALES:
        assert found[k] == fp16_fate(values, 2.0**k), k


def test_gradients_that_are_not_numbers_are_refused():
    for wrong in (torch.tensor([1.0, math.nan]), torch.tensor([math.inf]), torch.zeros(3)):
        with pytest.raises(ValueError, match="finite"):
            loss_scale_data.counted(wrong)


def walked_by_torch(largest: list[float], scale: float, interval: int) -> list[tuple[float, bool]]:
    """Return (scale after it, was it skipped) of each step, by torch's own GradScaler."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    taken: list[int] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    scaler.scale(torch.ones(1))  # makes the scale
    found = []
    for size in largest:
        n_taken = len(taken)
        weight.grad = (torch.tensor([size]) * scaler.get_scale()).half().float()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), len(taken) == n_taken))
    return found


def runs_to_walk() -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    powers = torch.empty(5, 200).uniform_(-12, 2, generator=generator)
    edge = [65520 / 2.0**k for k in (16, 15, 14, 13)] * 10
    huge = [1e-38] * 300  # the scale grows to the end of float32
    return [loss_scale_data.largest_gradients(), *(2.0**powers).tolist(), edge, huge]


@pytest.mark.parametrize("interval", INTERVALS)
def test_the_scaler_walks_as_torchs_does(show, browser, interval):
    root = show(lab.play.loss_scale())
    for largest in runs_to_walk():
        for start in (0, 10, 16, 24, 30):
            steps = ask(browser, root, "walk(...values)", [largest, 2.0**start, interval])
            found = [(step["after"], step["skipped"]) for step in steps]
            assert found == walked_by_torch(largest, 2.0**start, interval), start
