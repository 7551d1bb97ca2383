"""The site that `make site` writes: without a network, on any screen, light and dark."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.exhibits.conftest import UNFOLD
from tests.helpers import REPO

pytestmark = pytest.mark.slow  # Sphinx is no part of the gate
pytest.importorskip("sphinx")
# .github stays: a page leads there
LEFT_OUT = [".git", ".[!g]*", "runs", "site", "wheels", "node_modules", "__pycache__", "*.egg-info"]
ADDRESS = "https://github.com/someone/lab"
TOO_WIDE = """
return [...document.querySelectorAll(arguments[0])].filter((it) => it.offsetParent &&
  (it.scrollWidth > it.clientWidth + 1 || it.getBoundingClientRect().right > innerWidth))
  .map((it) => (it.textContent || it.src).slice(0, 200));
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site of a copy of the course that has an address, and a card that ran notebook 01."""
    course = tmp_path_factory.mktemp("copy") / "course"
    shutil.copytree(REPO, course, ignore=shutil.ignore_patterns(*LEFT_OUT))
    about = (course / "pyproject.toml").read_text(encoding="utf-8")
    urls = f'[project.urls]\nRepository = "{ADDRESS}"\n\n[project.scripts]'
    (course / "pyproject.toml").write_text(about.replace("[project.scripts]", urls), "utf-8")
    (course / "benchmarks" / "cards" / "h100").mkdir(parents=True)
    shutil.copy(REPO / "01-Mixed_Precision.ipynb", course / "benchmarks" / "cards" / "h100")
    command = [sys.executable, "-m", "sphinx", "-c", "docs", ".", "site"]
    answer = subprocess.run(command, cwd=course, capture_output=True, text=True)
    assert answer.returncode == 0 and answer.stderr == "", answer.stderr
    assert "03-Gradient_Checkpointing" in answer.stdout  # a line a page
    return course / "site"


@pytest.fixture(scope="session")
def address(site):
    """Where the site is served on this machine."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            """Say nothing."""

    handler = partial(Handler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


PAGES = ["index", "exhibits", "README", "01-Mixed_Precision", "04-Memory_Profiling"]
PAGES += ["docs/contents", "further/where_time_goes", "docs/what_it_saves"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_nothing_fits_a_narrow_screen_and_axe_finds_no_violation(
    name, address, violations, visit, browser
):
    visit(f"{address}/{name}.html", 400)  # the fixture looks at requests and at the console
    fits = "return document.documentElement.scrollWidth <= window.innerWidth"
    assert browser.execute_script(fits)
    assert browser.execute_script(TOO_WIDE, ".cell_output img") == []
    assert not browser.find_elements("css selector", "[data-exhibit]:not([data-live])")
    assert violations() == []


@pytest.mark.parametrize("name", ["01-Mixed_Precision", "02-Gradient_Accumulation"])
def test_a_wide_screen_has_room_for_the_code_and_a_figure_stands_above_its_own(
    name, address, visit, browser
):
    visit(f"{address}/{name}.html", 1400)
    assert browser.execute_script(f"{UNFOLD} {TOO_WIDE}", ".cell_input pre") == []
    figures = browser.find_elements("css selector", ".cell.tag_hide-input")
    assert len(figures) > 3
    for cell in figures:
        code, figure = (cell.find_element("css selector", it) for it in ("summary", "img"))
        assert code.text == "The code of this figure" and figure.rect["y"] < code.rect["y"]
    steps = browser.find_elements("css selector", ".step strong:first-child")
    told = {step.text.rstrip(".:") for step in steps}
    assert {"Guess", "Reconcile", "What you now know"} <= told
    assert browser.find_elements("css selector", "math") or name[:2] != "01"
    # each figure has its own words, not a file's name
    assert not browser.find_elements("css selector", '.cell_output img[alt^="_"]')


def test_every_link_of_the_site_leads_to_a_page_and_a_place_of_it(site):
    pages = {path.resolve(): path.read_text("utf-8") for path in site.rglob("*.html")}
    for path, text in pages.items():
        for link in re.findall(r'<a\s(?:[^>]*\s)?href="(?![a-z]+:)([^"]*)"', text):
            file, _, place = unescape(link).partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), (path, link)
            assert not place or f' id="{place}"' in pages[there], (path, link)
        # nothing is loaded from elsewhere
        assert not re.search(r'<(script|img|iframe)[^>]* src="http|<link [^>]*sheet[^>]*http', text)
    assert "/github/someone/lab" in pages[(site / "01-Mixed_Precision.html").resolve()]
    assert f'href="{ADDRESS}/tree/main/configs"' in pages[(site / "README.html").resolve()]
    assert sum(path.stat().st_size for path in site.rglob("*")) < 40_000_000


def test_a_notebook_leads_to_what_other_machines_printed_and_back(address, visit, browser):
    for path, other in (
        ("01-Mixed_Precision", "H100"),
        ("benchmarks/cards/h100/01-Mixed_Precision", "CPU"),
    ):
        visit(f"{address}/{path}.html")
        links = browser.find_elements("css selector", ".machines a")
        assert [link.text for link in links] == ["CPU", "H100"]
        (there,) = [link for link in links if link.text == other]
        assert there.get_dom_attribute("aria-current") is None
        there.click()
        assert browser.find_element("css selector", ".machines [aria-current]").text == other
    visit(f"{address}/02-Gradient_Accumulation.html")
    assert not browser.find_elements("css selector", ".machines")


def test_the_first_page_has_the_numbers_that_the_notebooks_printed(address, visit, browser):
    visit(f"{address}/index.html", 1400)
    numbers = [it.text for it in browser.find_elements("css selector", ".number")]
    for number, path in zip(numbers, sorted(REPO.glob("0*.ipynb")), strict=True):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        outputs = json.dumps([cell.get("outputs", []) for cell in notebook["cells"]])
        said = f"{number} {notebook['metadata']['of']}".partition(" not ")[0]
        for part in re.findall(r"\d+(?: %)?", said):
            assert re.search(rf"\b{part}\b" if part.isdigit() else part, outputs), part
    assert browser.find_element("css selector", "pre").text.startswith(f"git clone {ADDRESS}")


def test_each_exhibit_has_its_place_and_runs_can_be_shown(tmp_path, monkeypatch):
    conf = runpy.run_path(str(REPO / "docs" / "conf.py"))
    assert sorted(conf["PLAY"]) == conf["play"].NAMES
    (tmp_path / "01-Mixed_Precision.ipynb").write_text('{"cells": [], "executed": "here"}')
    monkeypatch.setenv("RUNS", str(tmp_path))
    source = ["committed"]
    conf["read_source"](None, "01-Mixed_Precision", source)
    assert source == ['{"cells": [], "executed": "here"}']
