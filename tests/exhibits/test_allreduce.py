from __future__ import annotations

import math

import pytest
import torch
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

import labutils as lab
from labutils.exhibits import allreduce_data

FORMATS = {one.name: one for one in allreduce_data.FORMATS}
EXCHANGE = """
const { formats, exchange, errorOf } = arguments[0].exhibit;
return arguments[3].map((n) => {
  const mean = exchange(n, formats[arguments[1]], arguments[2], arguments[4]);
  return [mean.map(String), errorOf(mean, n)];
});
"""
BYTES = """
const { formats, sentBytes, leastSeconds } = arguments[0].exhibit;
const [n, parameters, format] = [arguments[1], arguments[2], formats[arguments[3]]];
return [sentBytes(n, parameters, format), leastSeconds(n, parameters, format, 2)];
"""


@pytest.fixture
def root(show):
    return show(lab.play.allreduce())


@pytest.mark.parametrize("scale", [1.0, 2.0**-13, 2.0**-16, 2.0**15, 2.0**20])
@pytest.mark.parametrize("order", lab.exchange.ORDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_page_sums_as_torch_does_bit_for_bit(root, browser, name, order, scale):
    workers = [*allreduce_data.WORKERS, 1]
    found = browser.execute_script(EXCHANGE, root, name, order, workers, scale)
    for n, (texts, error) in zip(workers, found, strict=True):
        some = allreduce_data.gradients()[:n]
        right = lab.exchange.exchanged_mean(some, FORMATS[name].dtype, order, scale)
        values = [float(text.replace("Infinity", "inf")) for text in texts]
        mean = torch.tensor(values, dtype=torch.float64)
        assert torch.equal(mean.nan_to_num(7, 8, 9), right.double().nan_to_num(7, 8, 9)), n
        if mean.isfinite().all():
            judge = some.double().mean(0)
            wrong = ((mean - judge).norm() / judge.norm()).item()
            assert error == pytest.approx(wrong, rel=1e-9, abs=1e-15)


def test_some_values_of_this_test_are_lost_and_some_overflow():
    """Otherwise the comparison above would say nothing about the ends of FP16."""
    some = allreduce_data.gradients()
    assert some.shape == (64, 64) and some.all()
    small = lab.exchange.exchanged_mean(some[:8], torch.float16, scale=2.0**-16)
    large = lab.exchange.exchanged_mean(some, torch.float16, scale=2.0**20)
    assert (small == 0).any() and small.any()
    assert large.isinf().any() and large.isfinite().any()


@pytest.mark.parametrize("n", allreduce_data.WORKERS)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_and_least_time_are_those_of_a_ring(root, browser, name, n):
    size = torch.finfo(FORMATS[name].dtype).bits // 8
    right = lab.exchange.ring_bytes(size * 1_000_000, n)
    sent, seconds = browser.execute_script(BYTES, root, n, 1_000_000, name)
    assert sent == pytest.approx(right)
    assert seconds == pytest.approx(right / 2e9)


def row(root, name: str) -> list[str]:
    cells = root.find_elements("css selector", f'tr[data-format="{name}"] td')
    return [cell.text for cell in cells]


def part(root, name: str):
    return root.find_element("css selector", f'[data-part="{name}"]')


def test_it_begins_with_the_right_numbers(root):
    sent = lab.exchange.ring_bytes(2 * lab.n_parameters("gpt2"), 8)
    assert row(root, "BF16")[1] == f"{sent / 1e6:.3g} MB"
    seconds = sent / (allreduce_data.LINKS["PCI Express 4.0 × 16"] * 1e9)
    assert row(root, "BF16")[2] == f"{1000 * seconds:.3g} ms"
    error = allreduce_data.errors("ring")["BF16"][8]
    assert float(row(root, "BF16")[3]) == pytest.approx(error, rel=0.05)
    sentence = part(root, "sentence").text
    assert sentence.startswith("8 workers exchange 124.4 million gradients in BF16, in 14 hops.")


def test_keys_change_workers_format_link_and_order(root):
    before = part(root, "sentence").text
    part(root, "workers").send_keys(Keys.ARROW_RIGHT)
    assert "16 workers" in part(root, "sentence").text != before
    Select(part(root, "order")).select_by_visible_text("tree")
    assert "in 8 hops" in part(root, "sentence").text
    error = allreduce_data.errors("tree")["FP16"][16]
    assert float(row(root, "FP16")[3]) == pytest.approx(error, rel=0.05)
    Select(part(root, "format")).select_by_visible_text("FP32")
    assert "gradients in FP32" in part(root, "sentence").text
    slow = next(name for name in allreduce_data.LINKS if name.startswith("10 Gbit"))
    Select(part(root, "link")).select_by_value(slow)
    sent = lab.exchange.ring_bytes(4 * lab.n_parameters("gpt2"), 16)
    assert f"{slow} needs at least {1000 * sent / 1.25e9:.3g} ms" in part(root, "sentence").text


def test_a_button_takes_a_models_exact_size_and_the_slider_another(root):
    root.find_element("css selector", '[data-jump="gpt2-xl"]').send_keys(Keys.ENTER)
    assert part(root, "parameters").text == "1.558 billion"
    pressed = root.find_elements("css selector", '[aria-pressed="true"]')
    assert [button.text for button in pressed] == ["gpt2-xl"]
    part(root, "size").send_keys(Keys.HOME)
    assert part(root, "parameters").text == "1 million"
    assert not root.find_elements("css selector", '[aria-pressed="true"]')


def test_small_gradients_vanish_in_fp16_and_large_ones_overflow(root):
    scale = part(root, "scale")
    scale.send_keys(Keys.HOME)
    lost = int(row(root, "FP16")[4].split()[0])
    kept = lab.exchange.exchanged_mean(allreduce_data.gradients()[:8], torch.float16, scale=2**-30)
    assert lost == (kept == 0).sum() > 0
    assert row(root, "BF16")[4] == "0 of 64"
    scale.send_keys(Keys.END)
    assert row(root, "FP16")[3] == "overflow"
    texts = [text.text for text in root.find_elements("css selector", "svg text")]
    assert "FP16: overflow" in texts
    assert math.isfinite(float(row(root, "BF16")[3]))


def test_a_number_of_workers_without_data_is_refused():
    with pytest.raises(ValueError, match="not 7"):
        lab.play.allreduce(7)
