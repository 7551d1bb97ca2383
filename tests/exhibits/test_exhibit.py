"""What all exhibits share: small, self-contained, for every reader and for a narrow screen."""

import re
from functools import cache
from pydoc import plaintext, render_doc

import numpy as np
import pytest
import torch
from selenium.webdriver.common.keys import Keys

import labutils as lab
from labutils.course.exhibits.play import NAMES, write_page
from tests.exhibits.conftest import UNFOLD

PAGE = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>An exhibit</title>'
EACH = pytest.mark.parametrize("name", NAMES)
LIVE = "[data-exhibit][data-live]"
FITS = """
const [root] = arguments;
return document.body.scrollWidth <= window.innerWidth && root.scrollWidth <= root.clientWidth;
"""
SPOKEN = """
const [root, slider] = arguments;
return [slider.ariaValueText, slider.parentElement.querySelector(".value").textContent,
  root.querySelector("[role=status]").textContent];
"""
MOVE = """
const [root, slider] = arguments;
root.querySelector("[role=status]").textContent = "";
slider.value = slider.min;
slider.dispatchEvent(new Event("input", { bubbles: true }));
"""


@cache
def exhibit(name: str):
    return getattr(lab.play, name)()


@EACH
def test_an_exhibit_is_small_fetches_nothing_and_has_a_still(name):
    html = exhibit(name).html
    assert len(html.encode()) <= 60_000
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|\b(im|ex)port\b|fetch\(|<link", html)
    assert not re.search(r"\b(transition|animation)\b", html)  # nothing moves by itself
    without = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert re.search(r'<img alt="[^"]*\d[^"]*" src="data:image/webp;base64,', without)  # a finding
    assert f'data-exhibit="{name}"' in without and "<button" not in without


@EACH
def test_it_lives_on_a_narrow_screen_and_says_what_each_slider_is_at(name, visit, browser):
    # the fixture looks at requests and the console
    visit(PAGE + exhibit(name).html, 400)
    root = browser.find_element("css selector", LIVE)
    browser.execute_script(UNFOLD)
    for slider in root.find_elements("css selector", "input[type=range]"):
        browser.execute_script(MOVE, root, slider)
        *lowest, silent = browser.execute_script(SPOKEN, root, slider)
        slider.send_keys(Keys.END)
        assert slider.get_dom_attribute("data-lm-suppress-shortcuts") == ""  # keys stay, in Jupyter
        *highest, announced = browser.execute_script(SPOKEN, root, slider)
        assert lowest[0] == lowest[1] != highest[0] == highest[1], slider.accessible_name
        assert announced and not silent  # once it is set, not while it moves
    if name == "allocator":
        root.find_element("css selector", "button").send_keys(Keys.ENTER)
        assert "Event 4: empty_cache()" in browser.execute_script(SPOKEN, root, slider)[2]
    assert browser.execute_script(FITS, root)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("number", (torch.tensor(-0.0), "FP16"), "1000000000000000"),
        ("segments", (np.int64(36), 2), "peak without checkpoints 73 inputs"),
        ("step", ("fp32",), "Without autocast there are no"),
        ("amdahl", (0.5, np.float64(4)), "The step is 1.6× as fast"),
        ("plan", (63,), "63 sequences"),
    ],
)
def test_it_begins_as_it_is_told(name, arguments, words, visit, browser):
    visit(PAGE + getattr(lab.play, name)(*arguments).html)
    text = browser.find_element("css selector", LIVE).text
    assert words in text or words in text.replace("\n", "")  # a bit is a button of its own


DRAG = """
const [picture] = arguments, { left, top, width } = picture.getBoundingClientRect();
const at = { clientX: left + 0.9 * width, clientY: top + 5, buttons: 1, bubbles: true };
picture.dispatchEvent(new PointerEvent("pointermove", at));
"""


@pytest.mark.parametrize("name", ["step", "window"])
def test_one_drags_in_the_picture(name, visit, browser):
    visit(PAGE + exhibit(name).html)
    sliders = browser.find_elements("css selector", f"{LIVE} input[type=range]")
    moment = sliders[-1 if name == "step" else 2]
    browser.execute_script(DRAG, browser.find_element("css selector", f"{LIVE} svg.dragged"))
    share = int(moment.get_property("value")) / int(moment.get_property("max"))
    assert share == pytest.approx(0.93, abs=0.05)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("plan", {"model": "gpt3"}, "'gpt2-xl'"),
        ("plan", {"size": 1}, "micro_batch_size=4, model='gpt2'"),
        ("step", {"precision": "tf32"}, "'fp32', 'fp16', 'bf16'"),
        ("amdahl", {"share": 1.5, "speedup": 2}, "share of 0 to 1"),
        ("amdahl", {"share": 0.5, "speedup": 0}, "positive speed-up"),
        ("amdahl", {"share": 0.5}, "both"),
    ],
)
def test_what_an_exhibit_cannot_show_is_refused_with_what_it_can(name, wrong, right):
    with pytest.raises((ValueError, TypeError), match=right):
        getattr(lab.play, name)(**wrong)


def test_help_says_arguments_and_choices():
    text = render_doc(lab.play, renderer=plaintext)
    assert "step(precision='fp16')" in text and "precision: fp32, fp16, bf16" in text


def test_axe_finds_no_violation(violations, visit, browser, tmp_path):
    text = write_page(tmp_path).read_text(encoding="utf-8")
    again = re.sub(r' id="\w+"', "", text[text.index("<h2 ") :])
    visit(text.replace("</main>", again))  # each of them twice
    live = browser.find_elements("css selector", LIVE)
    assert [root.get_attribute("data-exhibit") for root in live] == 2 * NAMES
    assert violations() == []
    doubles = "const ids = [...document.querySelectorAll('[id]')].map((element) => element.id);"
    assert browser.execute_script(f"{doubles} return ids.length === new Set(ids).size")
