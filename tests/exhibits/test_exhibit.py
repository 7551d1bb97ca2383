"""What all exhibits share: small, self-contained, readable without scripts, on a narrow screen."""

from __future__ import annotations

import re

import nbformat
import pytest

import labutils as lab
from labutils.exhibits.everything import save_all
from labutils.exhibits.exhibit import FOLDER
from labutils.pages import page as notebook_page

NAMES = sorted(path.stem for path in FOLDER.glob("*.html"))


@pytest.fixture(scope="module", params=NAMES)
def exhibit(request):
    return getattr(lab.play, request.param)()


def test_an_exhibit_is_small_and_fetches_nothing(exhibit):
    assert len(exhibit.html.encode()) <= 60_000
    assert not re.search(r"https?:|\bimport\b|fetch\(|XMLHttp|<link|<iframe", exhibit.html)
    assert exhibit._repr_mimebundle_()["text/html"] == exhibit.html


def test_an_exhibit_has_a_still_with_a_text_for_where_scripts_are_stripped(exhibit):
    without = re.sub(r"<script>.*?</script>", "", exhibit.html, flags=re.S)
    assert re.search(r'<img alt="[^"]{20,}" src="data:image/png;base64,', without)
    assert f'data-exhibit="{exhibit.name}"' in without
    assert "<input" not in without and "<button" not in without


def test_it_answers_to_ordinary_controls(exhibit, show):
    root = show(exhibit)
    assert root.get_attribute("data-live") == ""
    assert root.find_elements("css selector", "input[type=range], select, button")
    assert root.find_elements("css selector", "table, output, [aria-live]")


@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_is_no_wider_than_the_screen(exhibit, show, browser, width):
    root = show(exhibit, width)
    assert browser.execute_script("return document.body.scrollWidth <= window.innerWidth")
    fits = "return arguments[0].scrollWidth <= arguments[0].clientWidth"
    assert browser.execute_script(fits, root)  # nothing is hidden behind a scroll bar


def test_two_of_a_kind_live_on_one_page(exhibit, browser, tmp_path):
    from labutils.exhibits.exhibit import page

    path = tmp_path / "two.html"
    path.write_text(page("Two", [exhibit, exhibit]), encoding="utf-8")
    browser.get(path.as_uri())
    assert len(browser.find_elements("css selector", "[data-exhibit][data-live]")) == 2


def test_one_page_has_all_of_them(show, browser, tmp_path):
    path = save_all(tmp_path / "exhibits.html")
    browser.get(path.as_uri())
    live = browser.find_elements("css selector", "[data-exhibit][data-live]")
    assert sorted(root.get_attribute("data-exhibit") for root in live) == NAMES
    titles = [title.text for title in browser.find_elements("css selector", "h2")]
    assert len(set(titles)) == len(NAMES)


def test_it_runs_in_an_exported_notebook(exhibit, browser, tmp_path):
    data = exhibit._repr_mimebundle_()
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", data)])
    text = notebook_page(nbformat.v4.new_notebook(cells=[cell]), "A Card")
    path = tmp_path / "notebook.html"
    path.write_text(text, encoding="utf-8")
    browser.get(path.as_uri())
    assert browser.find_elements("css selector", "[data-exhibit][data-live]")
