"""The page's sums are those of notebook 03's checks, and of real steps."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from torch import nn
from torch.utils.checkpoint import checkpoint

import labutils as lab
from labutils.checks import checkpointing as checks
from labutils.exhibits.segments_data import networks, ratio

COST = """
const [root, cases] = arguments;
return cases.map(([lengths, ratio, keep]) => root.exhibit.cost(lengths, ratio, keep));
"""


def some_lengths(n_layer: int, rng: random.Random) -> list[int]:
    inner = sorted(rng.sample(range(1, n_layer), rng.randrange(n_layer)))
    ends = [*inner, n_layer]
    return [end - start for start, end in zip([0, *inner], ends, strict=True)]


def test_peaks_are_those_of_the_exercise(browser, show):
    root = show(lab.play.segments())
    rng = random.Random(0)
    cases = []
    for _ in range(2_000):
        n_layer, r = rng.randrange(2, 49), rng.randrange(1, 65) / 2
        cases.append([some_lengths(n_layer, rng), r, False])
    found = browser.execute_script(COST, root, cases)
    for (lengths, r, _), page in zip(cases, found, strict=True):
        n = len(lengths)
        assert page["peak"] == checks._peak_of_lengths(lengths, r)
        assert page["forward"] == n
        assert page["rule"] == n + r * max(lengths)
        assert page["runsAgain"] == sum(lengths)
        at = page["at"]
        assert at + r * lengths[at - 1] == page["peak"]


def test_the_smallest_peak_is_that_of_the_exercise(browser, show):
    root = show(lab.play.segments())
    cases = [(n, r / 2) for n in (2, 3, 5, 12, 24, 36, 48) for r in (1, 2, 3, 8, 18, 32, 64)]
    script = "return arguments[1].map(([n, r]) => arguments[0].exhibit.best(n, r));"
    found = browser.execute_script(script, root, cases)
    for (n, r), page in zip(cases, found, strict=True):
        assert page == checks._smallest_peak_of_lengths(n, r), (n, r)


def test_equal_segments_follow_the_rule_of_the_exercise(browser, show):
    root = show(lab.play.segments())
    script = "return arguments[1].map(([L, n]) => arguments[0].exhibit.equal(L, n));"
    cases = [(n_layer, n) for n_layer in (12, 36, 47) for n in range(1, n_layer + 1)]
    all_lengths = browser.execute_script(script, root, cases)
    cost_cases = [[lengths, 4, False] for lengths in all_lengths]
    costs = browser.execute_script(COST, root, cost_cases)
    for (n_layer, n), lengths, page in zip(cases, all_lengths, costs, strict=True):
        assert sum(lengths) == n_layer
        assert max(lengths) == math.ceil(n_layer / n)
        if n_layer % n == 0:
            assert page["peak"] == page["rule"] == n + 4 * n_layer / n


class Placed(nn.Module):
    """Layers that keep 4 times their input, in segments of some lengths."""

    def __init__(self, lengths: list[int], keep: bool, width: int) -> None:
        super().__init__()
        self.lengths, self.keep = lengths, keep
        self.layers = nn.ModuleList()
        for _ in range(sum(lengths)):
            wide = nn.Linear(width, 3 * width), nn.Tanh()
            self.layers.append(nn.Sequential(*wide, nn.Linear(3 * width, width), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = 0
        for i, length in enumerate(self.lengths, 1):
            segment = nn.Sequential(*self.layers[end : end + length])
            end += length
            is_kept = self.keep and i == len(self.lengths)
            x = segment(x) if is_kept else checkpoint(segment, x, use_reentrant=False)
        return x


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def test_real_steps_need_as_many_inputs_as_the_page_says(browser, show):
    """Beside weights, their gradients, and what one layer's backward needs for itself."""
    cases = []
    for lengths in ([12], [1] * 12, [4, 4, 4], [5, 4, 3], [3, 4, 5], [6, 3, 2, 1], [1, 2, 3, 6]):
        cases += [[lengths, 4, False], [lengths, 4, True]]
    pages = browser.execute_script(COST, show(lab.play.segments()), cases)
    x = torch.randn(2048, 32)
    extra = []
    for (lengths, _, keep), page in zip(cases, pages, strict=True):
        model = Placed(lengths, keep, 32)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ledger = lab.measure_step(model, [x], squares, sgd, count_targets=lambda x: 1)
        weights = ledger.categories["parameters"] + ledger.categories["gradients"]
        extra.append((ledger.peak_bytes - weights) / x.nbytes - page["peak"])
    assert max(extra) - min(extra) < 0.4  # inputs; the random states are a part of it


@pytest.mark.parametrize(("keep", "again"), [(False, 12), (True, 9)])
def test_layers_run_again_as_often_as_the_page_says(browser, show, keep, again):
    root = show(lab.play.segments())
    (page,) = browser.execute_script(COST, root, [[[5, 4, 3], 4, keep]])
    model, runs = Placed([5, 4, 3], keep, 4), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
    model(torch.ones(1, 4)).sum().backward()
    assert page["runsAgain"] == again == len(runs) - 12


def test_networks_keep_what_the_ledger_says():
    ids = torch.zeros((4, 64), dtype=torch.int64)
    for precision in ("fp32", "bf16"):
        kept = []
        for n_layer in (2, 3):
            switches = {"dropout": 0.0, "activation": "gelu_tanh"}
            model = lab.build_model("gpt2-nano", n_layer=n_layer, **switches)
            args = (model, {"input_ids": ids, "labels": ids}, lab.lm_loss_sum, torch.optim.SGD)
            ledger = lab.predict_module(*args, precision=precision, device="a100")
            kept.append(ledger.phases["loss"]["activations"])
        measured = (kept[1] - kept[0]) / (4 * 4 * 64 * 128)
        assert measured == pytest.approx(ratio(precision), rel=0.01)
    assert {one["n_layer"] for one in networks()} >= {m.n_layer for m in lab.MODELS.values()}


def value(root, row: str) -> str:
    return root.find_element("css selector", f'tr[data-row="{row}"] td').text


def text(root, name: str) -> str:
    return root.find_element("css selector", f'[data-part="{name}"]').text


def press(root, preset: str) -> None:
    root.find_element("css selector", f'[data-preset="{preset}"]').click()


def test_buttons_place_the_segments(show):
    root = show(lab.play.segments(16, 1.0))
    for preset, lengths, peak, extra in (
        ("√L", "4 × 4", "8 inputs", "100 %"),
        ("per block", "16 × 1", "17 inputs", "100 %"),
        ("one", "16", "17 inputs", "100 %"),
        ("none", "16", "17 inputs", "0 %"),
        ("unequal", "6 + 5 + 4 + 1", "7 inputs", "100 %"),
    ):
        press(root, preset)
        assert value(root, "layers in the segments") == lengths
        assert value(root, "peak") == peak
        assert value(root, "extra forward work") == extra


def test_a_click_or_a_key_begins_a_segment_and_joins_two(show, browser):
    root = show(lab.play.segments(6, 2.0))
    press(root, "one")
    root.find_element("css selector", '[data-cut="2"]').click()
    assert value(root, "layers in the segments") == "2 + 4"
    cut = root.find_element("css selector", '[data-cut="2"]')
    cut.send_keys(Keys.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(Keys.SPACE)
    assert value(root, "layers in the segments") == "2 + 1 + 3"
    cut.send_keys(Keys.ENTER)
    assert value(root, "layers in the segments") == "2 × 3"
    assert value(root, "peak") == "8 inputs"
    assert "while backward goes through segment 2" in text(root, "sentence")
    root.find_element("css selector", '[data-part="keep"]').send_keys(Keys.SPACE)
    assert value(root, "computed again") == "3 of 6 layers"
    assert value(root, "extra work in a step") == "16.7 %"


def test_the_game_counts_tries_and_knows_the_goal(show):
    root = show(lab.play.segments(6, 1.0))
    assert "Some placement reaches 4 inputs" in text(root, "game")
    root.find_element("css selector", '[data-part="try"]').click()
    assert "Try 1: 7 inputs. Best reachable: 4." in text(root, "game")
    assert "75 % above it" in text(root, "game")
    press(root, "unequal")
    root.find_element("css selector", '[data-part="try"]').click()
    assert "You found the smallest peak, in 2 tries." in text(root, "game")
    slider = root.find_element("css selector", '[data-part="n-layer"]')
    slider.send_keys(Keys.ARROW_RIGHT)  # another network: another game
    assert text(root, "game").startswith("The exercise")


def test_a_network_sets_the_sliders(show):
    from selenium.webdriver.support.ui import Select

    root = show(lab.play.segments())
    Select(root.find_element("css selector", "select")).select_by_visible_text("gpt2-large, bf16")
    assert text(root, "n-layer-text") == "36"
    assert text(root, "ratio-text") == "9"
    root.find_element("css selector", '[data-part="ratio"]').send_keys(Keys.ARROW_LEFT)
    assert text(root, "ratio-text") == "8.5"
    chosen = root.find_element("css selector", "select")
    assert chosen.get_property("value") == ""


def test_every_instant_is_in_a_table(show):
    root = show(lab.play.segments(6, 2.0))
    press(root, "√L")
    root.find_element("css selector", "summary").click()
    find = partial(root.find_elements, "css selector", '[data-part="instants"] tr')
    WebDriverWait(root.parent, 5).until(lambda _: find())  # a browser tells of it later
    rows = find()
    cells = rows[1].find_elements("css selector", "td")
    assert len(rows) == 3
    assert [cell.text for cell in cells] == ["segment 2", "4 to 6", "2", "6", "8"]
