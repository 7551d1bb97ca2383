from __future__ import annotations

from collections import Counter

import pytest
import torch
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import labutils as lab
from labutils.config.choices import PRECISIONS
from labutils.exhibits import step_data
from labutils.memory.ledger import CAST_WEIGHTS, GRADIENTS

RUNS = [row.name for row in PRECISIONS.values() if row.name in ("fp32", "fp16", "bf16")]

SCALARS = 64  # bytes: the ledger is of a later step, which meets a few scalars of the one before


@pytest.fixture(scope="module")
def exhibit():
    return lab.play.step()


@pytest.fixture(scope="module")
def steps() -> dict[str, list[step_data.Moment]]:
    return {name: step_data.moments(lab.load_config(name)) for name in RUNS}


def by_category(moment: step_data.Moment) -> dict[str, int]:
    found: Counter = Counter()
    for (category, _), n_bytes in moment.alive.items():
        found[category] += n_bytes
    return dict(found)


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_is_that_of_the_memory_ledger(steps, name):
    ledger = lab.predict_memory(lab.load_config(name), "cpu")
    peak = max(steps[name], key=lambda moment: moment.alive.total())
    assert peak.phase == ledger.peak_phase
    for category, n_bytes in ledger.categories.items():
        assert by_category(peak).get(category, 0) == pytest.approx(n_bytes, abs=SCALARS), category
    for phase in ("forward", "loss", "backward"):
        largest = max(one.alive.total() for one in steps[name] if one.phase == phase)
        right = sum(ledger.phases[phase].values())
        assert largest == pytest.approx(right, abs=SCALARS), phase


@pytest.mark.parametrize("name", RUNS)
def test_copies_of_weights_come_with_autocast_and_go_in_backward(steps, name):
    row = PRECISIONS[name]
    copies = [moment.alive[CAST_WEIGHTS, row.products] for moment in steps[name]]
    if not row.autocast:
        assert not any(category == CAST_WEIGHTS for one in steps[name] for category, _ in one.alive)
        return
    model = lab.build_model("gpt2-nano")
    factors = [p for key, p in model.named_parameters() if p.dim() == 2 and "wpe" not in key]
    after_loss = [i for i, moment in enumerate(steps[name]) if moment.phase == "loss"][-1]
    assert copies[after_loss] == 2 * sum(p.numel() for p in factors)
    assert max(copies) > copies[after_loss]  # copies of biases are dropped
    assert copies[0] == copies[-1] == 0
    complete = next(i for i, one in enumerate(steps[name]) if one.phase == "clip") - 1
    assert copies[complete] == 0


@pytest.mark.parametrize("name", RUNS)
def test_lines_of_the_loop_come_in_order(steps, name):
    phases = list(dict.fromkeys(moment.phase for moment in steps[name]))
    scaled = ["forward", "loss", "backward", "unscale", "clip", "step", "update", "clear"]
    if not PRECISIONS[name].loss_scale:
        scaled = [phase for phase in scaled if phase not in ("unscale", "update")]
    assert phases == scaled
    first, last = steps[name][0].alive, steps[name][-1].alive
    assert last.total() == pytest.approx(first.total(), abs=SCALARS)
    gradients = [moment.alive[GRADIENTS, "float32"] for moment in steps[name]]
    assert gradients[0] == gradients[-1] == 0 < gradients[-2]


def test_unscaling_is_in_place():
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 500)).sum()).backward()
    cpu = torch.device("cpu")
    before = lab.allocated_bytes(cpu)
    with lab.peak_allocated(cpu) as found:
        scaler.unscale_(optimizer)
    assert found.n_bytes - before <= SCALARS


def test_the_page_adds_up_what_is_alive(exhibit, steps, show, browser):
    root = show(exhibit)
    groups = [tuple(group) for group in step_data.data()["groups"]]
    for name in RUNS:
        script = "return arguments[0].exhibit.alive(arguments[1])"
        found = browser.execute_script(script, root, name)
        right = [[moment.alive[group] for group in groups] for moment in steps[name]]
        assert found == right, name


def shown(root) -> dict[str, int]:
    rows = root.find_elements("css selector", "tr[data-bytes]")
    found = {row.get_attribute("data-group"): row.get_attribute("data-bytes") for row in rows}
    return {group: int(n_bytes) for group, n_bytes in found.items()}


def test_the_slider_and_the_buttons_show_a_moment(exhibit, steps, show, browser):
    root = show(exhibit)
    slider = root.find_element("css selector", "input[type=range]")
    number = root.find_element("css selector", "output")
    for _ in range(3):
        slider.send_keys(Keys.ARROW_RIGHT)
    root.find_element("css selector", '[data-part="next"]').send_keys(Keys.ENTER)
    assert number.text == f"5 of {len(steps['fp16'])}"
    moment = steps["fp16"][4]
    for group, n_bytes in shown(root).items():
        assert moment.alive[tuple(group.rsplit(" ", 1))] == n_bytes, group
    sentence = root.find_element("css selector", "[aria-live]").text
    assert moment.what[1:] in sentence and f"{moment.alive.total() / 2**20:.2f} MiB" in sentence
    root.find_element("css selector", '[data-part="back"]').click()
    assert number.text.startswith("4 of")


def test_a_button_leads_to_unscale_and_the_line_is_marked(exhibit, show):
    root = show(exhibit)
    root.find_element("css selector", '[data-jump="unscale"]').click()
    line = root.find_element("css selector", "[aria-current]")
    assert "scaler.unscale_(optimizer)" in line.text
    root.find_element("css selector", '[data-part="next"]').click()
    assert "clip_grad_norm_" in root.find_element("css selector", "[aria-current]").text


def test_another_precision_has_other_lines_and_other_bytes(exhibit, steps, show):
    root = show(exhibit)
    choice = Select(root.find_element("css selector", "select"))
    assert [option.text for option in choice.options] == RUNS
    for name in RUNS:
        choice.select_by_visible_text(name)
        row = PRECISIONS[name]
        code = root.find_element("css selector", '[data-part="code"]').text
        assert ("autocast" in code, "scaler" in code) == (row.autocast, row.loss_scale)
        root.find_element("css selector", '[data-jump="the peak"]').click()
        peak = max(moment.alive.total() for moment in steps[name])
        total = root.find_element("css selector", 'tr[data-group="all"]')
        assert f"{peak / 2**20:.2f}" in total.text
        assert bool(root.find_elements("css selector", '[data-jump="first 16-bit copy"]')) == (
            row.autocast
        )
