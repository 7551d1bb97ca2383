"""What all exhibits share: small, self-contained, for a keyboard and for a narrow screen."""

from __future__ import annotations

import re
from functools import cache

import nbformat
import pytest
from selenium.webdriver.common.keys import Keys

import labutils as lab
from labutils.exhibits.everything import save_all
from labutils.exhibits.exhibit import FOLDER, page
from labutils.pages import page as notebook_page

NAMES = sorted(path.stem for path in FOLDER.glob("*.html"))
EACH = pytest.mark.parametrize("name", NAMES)
LIVE = "[data-exhibit][data-live]"
FITS = """
const [root] = arguments;
return document.body.scrollWidth <= window.innerWidth && root.scrollWidth <= root.clientWidth;
"""


@cache
def exhibit(name: str):
    return getattr(lab.play, name)()


@EACH
def test_an_exhibit_is_small_and_fetches_nothing(name):
    html = exhibit(name).html
    assert len(html.encode()) <= 60_000
    assert not re.search(r"https?:|\bimport\b|fetch\(|XMLHttp|<link|<iframe", html)
    assert exhibit(name)._repr_mimebundle_()["text/html"] == html


@EACH
def test_an_exhibit_has_a_still_with_a_text_for_where_scripts_are_stripped(name):
    without = re.sub(r"<script>.*?</script>", "", exhibit(name).html, flags=re.S)
    assert re.search(r'<img alt="[^"]{20,}" src="data:image/png;base64,', without)
    assert f'data-exhibit="{name}"' in without
    assert "<input" not in without and "<button" not in without


@EACH
def test_it_lives_on_a_narrow_screen_and_each_slider_answers_to_keys(name, show, browser):
    root = show(exhibit(name), 400)  # `show` looks at requests and at the console
    assert root.get_attribute("data-live") == ""
    assert root.find_elements("css selector", "table, output, [aria-live]")
    assert browser.execute_script(FITS, root)
    sliders = root.find_elements("css selector", "input[type=range]")
    for slider in sliders:
        slider.send_keys(Keys.HOME)
        lowest = root.get_attribute("innerHTML")
        slider.send_keys(Keys.END)
        assert root.get_attribute("innerHTML") != lowest, slider.accessible_name
    if not sliders:
        before = root.text
        buttons = root.find_elements("css selector", "button")
        ready = [button for button in buttons if button.is_displayed() and button.is_enabled()]
        ready[0].send_keys(Keys.ENTER)
        assert root.text != before
    assert browser.execute_script(FITS, root)


def test_one_page_has_all_of_them_and_another_one_two_of_each(browser, tmp_path):
    browser.get(save_all(tmp_path / "all.html").as_uri())
    live = browser.find_elements("css selector", LIVE)
    assert sorted(root.get_attribute("data-exhibit") for root in live) == NAMES
    exhibits = [exhibit(name) for name in NAMES]
    (tmp_path / "two.html").write_text(page("Two", [*exhibits, *exhibits]), encoding="utf-8")
    browser.get((tmp_path / "two.html").as_uri())
    assert len(browser.find_elements("css selector", LIVE)) == 2 * len(NAMES)


def test_they_run_in_an_exported_notebook(browser, tmp_path):
    cells = []
    for name in NAMES:
        output = nbformat.v4.new_output("display_data", exhibit(name)._repr_mimebundle_())
        cells.append(nbformat.v4.new_code_cell(outputs=[output]))
    path = tmp_path / "notebook.html"
    text = notebook_page(nbformat.v4.new_notebook(cells=cells), "A Card")
    path.write_text(text, encoding="utf-8")
    browser.get(path.as_uri())
    assert len(browser.find_elements("css selector", LIVE)) == len(NAMES)
