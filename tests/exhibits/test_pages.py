"""The pages that `labs` writes: they open without a network, on any screen, in light and dark."""

from __future__ import annotations

import nbformat
import pytest

from labutils import pages
from labutils.pages import page
from labutils.training.records import RunRecord
from tests.helpers import REPO

NOTEBOOKS = [*sorted(REPO.glob("0*.ipynb")), *sorted(REPO.glob("further/*.ipynb"))]
LINKS = "[02](02-X.ipynb), [elsewhere](https://a.b/03-X.ipynb)"
WIDE = f"# 01 · A title\n\n## A & B\n$2^{{k-1}}$ and {LINKS}\n\n$$\\frac{{a}}{{b}}$$\n\n"
WIDE += "```\n# no heading\n```\n\n"
WIDE += "|" + "a_long_heading|" * 9 + "\n" + "|" + "-|" * 9 + "\n" + "|" + "a_long_value|" * 9


def opened(visit, tmp_path, text: str = WIDE, width: int = 1200) -> None:
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("x = 1")]
    path = tmp_path / "page.html"
    path.write_text(page(nbformat.v4.new_notebook(cells=cells), "A Card"), encoding="utf-8")
    visit(path, width)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_page_asks_for_nothing_and_fits_a_narrow_screen(path, visit, browser, tmp_path):
    file = tmp_path / "page.html"
    notebook = nbformat.read(path, as_version=4)
    file.write_text(page(notebook, "A Card"), encoding="utf-8")
    visit(file, 400)  # the fixture looks at requests and at the console
    assert browser.title.endswith("A Card") and browser.title != "Notebook – A Card"
    assert browser.execute_script("return document.body.scrollWidth <= window.innerWidth")
    headings = browser.find_elements("css selector", "main h2")
    assert len(browser.find_elements("css selector", "nav li")) == 1 + len(headings) >= 4
    prose = "return [...document.querySelectorAll('.jp-MarkdownOutput')].map(e => e.innerText)"
    assert "$$" not in "".join(browser.execute_script(prose))


def test_formulas_are_drawn_and_links_lead_to_pages(visit, browser, tmp_path):
    opened(visit, tmp_path)
    assert len(browser.find_elements("css selector", "math")) == 2
    assert browser.find_elements("css selector", "math[display=block] mfrac")
    assert browser.title == "01 · A title – A Card"
    assert browser.find_elements("css selector", 'a[href="02-X.html"]')
    assert browser.find_elements("css selector", 'a[href="https://a.b/03-X.ipynb"]')
    entry = browser.find_element("css selector", "nav li:nth-child(2) a")
    assert entry.text == "A & B"
    target = entry.get_attribute("href").split("#")[1]
    assert browser.execute_script("return !!document.getElementById(arguments[0])", target)


def test_a_wide_table_scrolls_by_itself(visit, browser, tmp_path):
    opened(visit, tmp_path, width=400)
    table = browser.find_element("css selector", "table")
    sizes = "const e = arguments[0]; e.scrollLeft = 1e4;"
    sizes += "return [e.clientWidth <= innerWidth, e.scrollWidth > e.clientWidth, e.scrollLeft > 0]"
    assert browser.execute_script(sizes, table) == [True, True, True]


def test_printed_columns_scroll_and_sentences_wrap(visit, browser, tmp_path):
    row = "a row of a table   " + "12345.6   " * 9
    sentence = "A sentence that is wider than the screen goes on in the next line, as prose does."
    cell = nbformat.v4.new_code_cell("x = 1")
    cell.outputs = [
        nbformat.v4.new_output("stream", text=f"{sentence}\n{row}\n{row}\n{sentence}\n")
    ]
    path = tmp_path / "page.html"
    path.write_text(page(nbformat.v4.new_notebook(cells=[cell]), "A Card"), encoding="utf-8")
    visit(path, 400)
    [columns] = browser.find_elements("css selector", ".columns")
    assert columns.text.count("a row of a table") == 2 and "sentence" not in columns.text
    sizes = "const e = arguments[0]; return [e.scrollWidth > e.clientWidth, e.clientHeight]"
    scrolls, high = browser.execute_script(sizes, columns)
    assert scrolls and high < 60  # two lines, none of them broken
    printed = browser.find_element("css selector", "pre:has(.columns)")
    assert browser.execute_script("return arguments[0].clientHeight", printed) > high + 4 * 14


def test_the_page_is_dark_where_the_system_is(visit, browser, tmp_path):
    opened(visit, tmp_path)
    colour = "return getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        seen.append(browser.execute_script(colour))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen == ["rgb(255, 255, 255)", "rgb(17, 17, 17)"]


def test_the_index_leads_to_what_is_there(runs, visit, browser):
    runs.mkdir()
    RunRecord(id="20261121-000000000000-0000", created="", name="older").save()
    RunRecord(id="20261122-000000000000-0000", created="", name="mine <b>").save()
    made_in = {"notebook": "01-A"}
    RunRecord(id="20261123-000000000000-0000", created="", name="fp32", environment=made_in).save()
    (runs / "exhibits.html").write_text("<title>Things</title>")
    (runs / "01-A.html").write_text("<title>01 · A – A Card</title>")
    (runs / "01-A.ipynb").write_text("{}")
    visit(pages.write_index(), 400)
    assert browser.execute_script("return document.body.scrollWidth <= window.innerWidth")
    links = browser.find_elements("css selector", "a")
    names = ["Exhibits", "mine <b>", "older", "01 · A – A Card"]
    assert [link.text for link in links if link.is_displayed()] == names
    browser.find_element("css selector", "summary").click()  # runs of a notebook are folded
    assert [link.text for link in links] == [*names, "fp32"]
    for link in links:  # relative, and there
        assert (runs / link.get_dom_attribute("href")).is_file()


def test_a_link_to_a_notebook_that_was_not_executed_says_so(runs):
    runs.mkdir()
    (runs / "02-B.html").write_text('<title>02</title><a href="scaler.html">more</a>')
    (runs / "02-B.ipynb").write_text("{}")
    index = pages.write_index()
    assert "labutils labs scaler" in (runs / "scaler.html").read_text(encoding="utf-8")
    assert "scaler" not in index.read_text(encoding="utf-8")
    (runs / "scaler.html").write_text("executed")
    pages.write_index()
    assert (runs / "scaler.html").read_text() == "executed"


def test_a_log_has_one_line_for_each_cell_and_no_warning(runs, tmp_path, capfd):
    path = tmp_path / "quick.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in ("1", "1/0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert not pages.execute(path)
    printed, errors = capfd.readouterr()
    assert "\r" not in printed and "cell 1/2, " in printed
    assert len(printed.splitlines()) == 2 + 2  # each cell, the time, the files
    assert "WARNING" not in errors and "\x1b" not in errors and "ZeroDivisionError" in errors
