from __future__ import annotations

import math

import pytest
import torch

import labutils as lab
from labutils.exhibits import loss_scale_data
from labutils.techniques.numerics import FP16, fp16_fate

SCALES = range(31)
INTERVALS = (1, 2, 5, 2000)


@pytest.fixture(scope="module")
def exhibit():
    return lab.play.loss_scale()


def ask(browser, root, expression: str, values):
    """Return what the page's own functions make of `values`."""
    names = "const { half, shares, walk } = arguments[0].exhibit, values = arguments[1];"
    return browser.execute_script(f"{names} return {expression};", root, values)


def values_to_store() -> list[float]:
    """Return 10,000 values of both signs: of all sizes of FP16 and beyond, ties, neighbours."""
    generator = torch.Generator().manual_seed(0)
    random = 2.0 ** torch.empty(6_000).uniform_(-30, 20, generator=generator)
    ties = torch.arange(1, 2_001) * 2.0**-25
    large = 65_000 + torch.arange(1_000.0)
    powers = 2.0 ** torch.arange(-30, 20)
    up = torch.nextafter(powers, torch.tensor(torch.inf))
    below_normal = 2.0**-14 * (1 - torch.arange(849.0) * 2.0**-14)
    found = torch.cat([random, ties, large, powers, up, below_normal, torch.zeros(51)])
    found[1::2] *= -1
    return found.tolist()


def test_the_page_stores_what_torch_stores_bit_for_bit(exhibit, show, browser):
    root = show(exhibit)
    values = values_to_store()
    assert len(values) == 10_000
    text = "values.map(half).map((x) => Object.is(x, -0) ? '-0' : String(x))"
    found = ask(browser, root, text, values)
    texts = [text.replace("Infinity", "inf") for text in found]
    mine = torch.tensor([float(text) for text in texts], dtype=torch.float64)
    bits = torch.tensor(values).to(torch.float16).view(torch.int16)
    assert mine.to(torch.float16).double().equal(mine)  # each is an FP16 number
    assert mine.to(torch.float16).view(torch.int16).equal(bits)


def test_the_shares_are_fp16_fate_at_every_scale(exhibit, show, browser):
    root = show(exhibit)
    found = ask(browser, root, "values.map(shares)", [*SCALES])
    for k in SCALES:
        assert found[k] == fp16_fate(loss_scale_data.gradients(), 2.0**k), k


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
def test_the_scaler_walks_as_torchs_does(exhibit, show, browser, interval):
    root = show(exhibit)
    for largest in runs_to_walk():
        for start in (0, 10, 16, 24, 30):
            steps = ask(browser, root, "walk(...values)", [largest, 2.0**start, interval])
            found = [(step["after"], step["skipped"]) for step in steps]
            assert found == walked_by_torch(largest, 2.0**start, interval), start


def test_the_run_is_that_of_notebook_01():
    found = loss_scale_data.largest_gradients()
    assert len(found) == 30 and all(0.01 < size < 10 for size in found)
    # the first batch of section 7, by hand
    model = lab.build_model("gpt2-nano")
    batch = next(lab.batches(lab.sequences(64), 1, seed=0))
    (lab.lm_loss_sum(model, batch) / lab.count_targets(batch)).backward()
    assert found[0] == pytest.approx(lab.flat_gradient(model).abs().max().item(), rel=1e-5)


def drag(browser, root, name: str, value: int):
    slider = root.find_element("css selector", f'[data-part="{name}"]')
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    browser.execute_script(script, slider, value)
    return slider


def test_dragging_the_scale_changes_the_table(exhibit, show, browser):
    root = show(exhibit)
    drag(browser, root, "power", 24)
    right = fp16_fate(loss_scale_data.gradients(), 2.0**24)
    n = int((loss_scale_data.gradients() != 0).sum())
    for fate, share in right.items():
        row = root.find_element("css selector", f'tr[data-fate="{fate}"]')
        assert int(row.get_attribute("data-count")) == round(share * n)
        assert row.text.split()[1] == f"{round(share * n):,}"
    assert "2²⁴" in root.find_element("css selector", '[data-part="sentence"]').text


def test_one_click_is_one_step(exhibit, show, browser):
    root = show(exhibit)
    drag(browser, root, "first", 18)
    right = walked_by_torch(loss_scale_data.largest_gradients(), 2.0**18, 5)
    next_step, to_end, again = root.find_elements("css selector", "button")
    happened = root.find_element("css selector", '[data-part="happened"]')
    table = root.find_element("css selector", '[data-part="steps"]')
    assert "No step yet" in happened.text
    next_step.send_keys(" ")  # by keyboard
    assert "Step 1 of 30" in happened.text
    assert ("skipped, and the scale is halved to 2¹⁷" in happened.text) == right[0][1]
    next_step.click()
    assert "Step 2 of 30" in happened.text
    to_end.click()
    n_skipped = sum(skipped for _, skipped in right)
    assert f"Skipped so far: {n_skipped} of 30." in happened.text
    assert len(table.find_elements("css selector", "tr")) == 30
    assert not next_step.is_enabled()
    again.click()
    assert "No step yet" in happened.text


def test_the_thresholds_are_those_of_fp16(exhibit):
    assert f'"max":{FP16.max}' in exhibit.html and f'"eps":{FP16.eps}' in exhibit.html
