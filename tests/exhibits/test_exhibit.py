"""What all exhibits share: small, self-contained, for every reader and for a narrow screen."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

import labutils as lab
from labutils.exhibits.exhibit import FOLDER, names, page
from tests.exhibits.conftest import NODE_MODULES, needed

EACH = pytest.mark.parametrize("name", names())
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
AXE = """
const done = arguments[0];
for (const folded of document.querySelectorAll("details")) folded.open = true;
for (const button of document.querySelectorAll("button")) { // tensors to look at
  if (button.textContent.startsWith("Story")) button.click();
}
const told = ({ id, nodes }) => [id, nodes.map((node) => node.failureSummary)];
axe.run(document).then(({ violations }) => done(violations.map(told)));
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
    visit(page("A title", [exhibit(name)]), 400)  # the fixture looks at requests and the console
    root = browser.find_element("css selector", LIVE)
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
        assert "Event 1: 3 MiB" in browser.execute_script(SPOKEN, root, slider)[2]
    assert browser.execute_script(FITS, root)


@pytest.mark.parametrize(("scheme", "n_of_each"), [("light", 1), ("dark", 2)])
def test_axe_finds_no_violation(visit, browser, scheme, n_of_each):
    axe = Path(needed(NODE_MODULES / "axe-core" / "axe.min.js", "npm ci --prefix tests/exhibits"))
    emulated = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    visit(page("All", n_of_each * [exhibit(name) for name in names()]))
    live = browser.find_elements("css selector", LIVE)
    assert [root.get_attribute("data-exhibit") for root in live] == n_of_each * names()
    browser.execute_script(axe.read_text(encoding="utf-8"))
    assert browser.execute_async_script(AXE) == []
    doubles = "const ids = [...document.querySelectorAll('[id]')].map((element) => element.id);"
    assert browser.execute_script(f"{doubles} return ids.length === new Set(ids).size")


def test_scripts_and_styles_are_formatted(node):
    program = NODE_MODULES / ".bin" / "prettier"
    command = [needed(program, "npm ci --prefix tests/exhibits"), "--check"]
    command += ["--config", NODE_MODULES.parent / "package.json"]
    files = [*FOLDER.glob("*.js"), *FOLDER.glob("*.css")]
    subprocess.run([*command, *files], check=True)
