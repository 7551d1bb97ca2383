"""The pages that `labs` writes: they open without a network, on any screen, in light and dark."""

from __future__ import annotations

import re

import nbformat
import pytest

from labutils import pages
from labutils.training.record import RunRecord
from tests.helpers import REPO

NOTEBOOKS = sorted(REPO.glob("0*.ipynb"))
LINKS = "[02](02-X.ipynb), [elsewhere](https://a.b/03-X.ipynb)"
TEXT = f"# 01 · A title\n\n## A & B\n$2^{{k-1}}$ and {LINKS}\n\n$$\\frac{{a}}{{b}}$$\n\n"
TEXT += "```\n# no heading\n```\n\n"
FITS = "return document.body.scrollWidth <= window.innerWidth"
PROSE = "return [...document.querySelectorAll('.jp-MarkdownOutput')].map((e) => e.innerText)"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_page_asks_for_nothing_and_fits_a_narrow_screen(path, visit, browser):
    notebook = nbformat.read(path, as_version=4)
    visit(pages.page(notebook, "A Card"), 400)  # the fixture looks at requests and at the console
    assert browser.title.endswith("A Card") and browser.title != "Notebook – A Card"
    assert browser.execute_script(FITS)
    headings = browser.find_elements("css selector", "main h2")
    assert len(browser.find_elements("css selector", "nav li")) == 1 + len(headings) >= 4
    assert browser.find_elements("css selector", "[data-exhibit][data-live]")  # and all live
    assert not browser.find_elements("css selector", "[data-exhibit]:not([data-live])")
    assert "$$" not in "".join(browser.execute_script(PROSE))
    assert not browser.find_elements("css selector", "img[alt^='No description']")


def test_formulas_are_drawn_and_links_lead_to_pages(visit, browser):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(TEXT)])
    visit(pages.page(notebook, "A Card"), 400)
    assert browser.find_elements("css selector", "math[display=block] mfrac")
    for link in ("02-X.html", "https://a.b/03-X.ipynb"):
        assert browser.find_elements("css selector", f'a[href="{link}"]')
    entry = browser.find_element("css selector", "nav li:nth-child(2) a")
    assert entry.text == "A & B"
    assert browser.find_elements("css selector", f'h2[id="{entry.get_attribute("hash")[1:]}"]')


@pytest.mark.parametrize("link", ["further/train_gpt2.py", "../README.md"])
def test_a_link_to_a_file_of_the_course_leads_there_from_runs(link, runs):
    cell = nbformat.v4.new_markdown_cell(f"[a file]({link})")
    text = pages.page(nbformat.v4.new_notebook(cells=[cell]), "A Card")
    (href,) = re.findall(r'<a href="([^"]*)">a file</a>', text)
    assert (runs / href).resolve() == REPO / link.removeprefix("../")


def test_the_index_leads_to_what_is_there(runs, visit, browser):
    runs.mkdir()
    RunRecord(id="20261122-000000000000-0000", created="", name="mine <b>").save()
    made_in = {"notebook": "01-A"}
    RunRecord(id="20261123-000000000000-0000", created="", name="fp32", environment=made_in).save()
    (runs / "01-A.html").write_text('<title>01 · A – A Card</title><a href="scaler.html">more</a>')
    (runs / "01-A.ipynb").write_text("{}")
    visit(pages.write_index().read_text(encoding="utf-8"), 400)
    assert browser.execute_script(FITS)
    links = browser.find_elements("css selector", "a")
    names = ["mine <b>", "01 · A – A Card"]
    assert [link.text for link in links if link.is_displayed()] == names
    browser.find_element("css selector", "summary").click()  # runs of a notebook are folded
    assert [link.text for link in links] == [*names, "fp32"]
    for link in links:  # relative, and there
        assert (runs / link.get_dom_attribute("href")).is_file()
    missing = runs / "scaler.html"  # of a notebook that was not executed
    assert "labutils labs scaler" in missing.read_text(encoding="utf-8")
    missing.write_text("executed")
    pages.write_index()
    assert missing.read_text() == "executed"
