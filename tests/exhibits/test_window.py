"""The film's bytes are the ledger's; the weights of tokens are those that torch finds."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
import torch
from selenium.webdriver.common.keys import Keys

import labutils as lab
from labutils.exhibits.window_data import GROUPS, LENGTHS, window_config
from tests.helpers import REPO

FRAMES = "return arguments[0].exhibit.frames(arguments[1], arguments[2]);"
WEIGH = "return arguments[1].map((lengths) => arguments[0].exhibit.weigh(lengths));"


@pytest.fixture(scope="module")
def exhibit():
    return lab.play.window()


def part(root, name: str):
    return root.find_element("css selector", f'[data-part="{name}"]')


def grouped(by_category: dict[str, int]) -> list[int]:
    return [sum(by_category[category] for category in group) for group in GROUPS.values()]


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 2), (2, 5), (8, 4), (1, 7), (3, 16), (1, 128)])
def test_each_phase_has_the_ledgers_bytes_at_its_peak(exhibit, browser, show, n, m):
    frames = browser.execute_script(FRAMES, show(exhibit), n, m)
    ledger = lab.predict_memory(window_config(n, m), "cpu")
    for phase, by_category in ledger.phases.items():
        of_phase = [frame["bytes"] for frame in frames if frame["phase"] == phase]
        assert max(of_phase, key=sum) == grouped(by_category), phase


def test_a_film_shows_every_micro_batch_and_the_whole_batch_lasts_as_long(exhibit, browser, show):
    root = show(exhibit)
    frames = browser.execute_script(FRAMES, root, 5, 3)
    numbers = list(dict.fromkeys(frame["number"] for frame in frames))
    assert numbers == [1, 2, 3, 4, 5, None]
    second, fifth = ([f["bytes"] for f in frames if f["number"] == k] for k in (2, 5))
    assert second == fifth
    script = "return arguments[0].exhibit.wholeFrames(5, 3);"
    whole = browser.execute_script(script, root)
    assert len(whole) == len(frames)
    single = browser.execute_script(FRAMES, root, 1, 15)
    assert max(sum(f["bytes"]) for f in whole) == max(sum(f["bytes"]) for f in single)


def test_gradients_stay_between_micro_batches_and_activations_go(exhibit, browser, show):
    frames = browser.execute_script(FRAMES, show(exhibit), 3, 4)
    gradients, activations = list(GROUPS).index("gradients"), list(GROUPS).index("activations")
    starts = [b for a, b in pairwise(frames) if a["number"] != b["number"]]
    full = starts[0]["bytes"][gradients]
    assert full > 4 * 1e6
    for frame in starts[:-1]:  # two micro-batches begin; then the optimizer
        assert frame["bytes"][gradients] == full
        assert frame["bytes"][activations] < 0.01 * full


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


def test_lengths_and_sizes_are_those_of_notebook_02():
    cells = json.loads((REPO / "02-Gradient_Accumulation.ipynb").read_text(encoding="utf-8"))
    source = "\n".join("".join(cell["source"]) for cell in cells["cells"])
    assert f"for lengths in ({LENGTHS[-1]}, {LENGTHS[0]}):" in source
    assert "def step_config(n, m, seq_len=64" in source


def test_keys_and_buttons_move_through_the_film(exhibit, show):
    root = show(exhibit)
    moment, sentence = part(root, "moment"), part(root, "sentence")
    assert sentence.text.startswith("Micro-batch 1 of 4, forward phase")
    moment.send_keys(Keys.ARROW_RIGHT)
    assert part(root, "moment-text").text.startswith("2 of ")
    for phase in ("1 of 4, loss", "1 of 4, backward", "2 of 4, forward"):
        part(root, "next").click()
        assert phase in sentence.text
    assert "The gradients of earlier micro-batches stay: 4.5 MiB." in sentence.text
    part(root, "previous").send_keys(Keys.ENTER)
    assert "1 of 4, backward" in sentence.text
    moment.send_keys(Keys.END)
    assert sentence.text.startswith("The optimizer updates the weights")
    part(root, "to-peak").click()
    together = root.find_element("css selector", '[data-category="together"] td:nth-child(2)')
    assert f"4 × 4 {together.text} MiB" in part(root, "peaks").text


def test_the_peaks_are_those_that_notebook_02_prints(exhibit, show):
    root = show(exhibit)
    part(root, "m").send_keys(Keys.HOME)  # 2 sequences
    for _ in range(2):
        part(root, "n").send_keys(Keys.ARROW_LEFT)
    peaks = {
        (n, m): lab.predict_memory(window_config(n, m), "cpu").peak_mib
        for n, m in ((2, 2), (1, 4), (1, 2))
    }
    said = part(root, "peaks").text
    for (n, m), mib in peaks.items():
        assert f"{n} × {m} {mib:.1f} MiB" in said
    percent = 100 * peaks[2, 2] / peaks[1, 4]
    assert f"needs {percent:.1f} % of the peak of the whole batch" in said
    part(root, "n").send_keys(Keys.HOME)
    assert "One micro-batch is the whole batch." in part(root, "peaks").text


def test_lengths_move_and_equal_ones_have_no_error(exhibit, show):
    root = show(exhibit)
    buttons = part(root, "cases").find_elements("css selector", "button")
    buttons[2].click()
    error = weights_by_torch(LENGTHS[2])[2]
    assert f"off by {100 * error:.1f} %" in part(root, "error").text
    buttons[-1].click()
    assert "the mean of means is right" in part(root, "error").text
    root.find_element("css selector", '[data-length="3"]').send_keys(Keys.HOME)
    cells = part(root, "tokens").find_elements("css selector", "tr:last-child td")
    assert [cell.text for cell in cells[:2]] == ["4", "1"]
    assert cells[3].text == "25 %"
