"""The pages that `labs` and `make site` write: without a network, on any screen, light and dark."""

import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from selenium.webdriver.support.ui import WebDriverWait

from labutils import pages
from labutils.training.record import RunRecord
from tests.exhibits.conftest import NODE_MODULES, needed
from tests.helpers import REPO

LINKS = "[02](02-X.ipynb), [elsewhere](https://a.b/03-X.ipynb)"
TEXT = f"# 01 · A title\n\n## A & B\n$2^{{k-1}}$ and {LINKS}\n\n$$\\frac{{a}}{{b}}$$\n\n"
TEXT += "```\n# no heading\n```\n\n**What you now know.** It is so.\n\n"
FITS = "return document.documentElement.scrollWidth <= window.innerWidth"
PROSE = "return [...document.querySelectorAll('.text')].map((e) => e.innerText)"
AXE = """
const done = arguments[0];
for (const folded of document.querySelectorAll("details")) folded.open = true;
const told = ({ id, nodes }) => [id, nodes.map((node) => node.failureSummary)];
axe.run(document).then(({ violations }) => done(violations.map(told)));
"""
PNG = (  # one dot
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
LOG = """predicted: 68.4 MiB
fp32: on a CPU (when_cpu): model gpt2-nano
fp32: 100%|██████████| 60/60 [00:03<00:00, 15.00step/s, loss 6.236]
fp32: saved fp32-20261124-153304254248-c665.json
tf32: not on this device: it has none
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pages.write_site(folder)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "exhibits", "01-Mixed_Precision", "04-Memory_Profiling"])
def test_a_page_asks_for_nothing_fits_a_narrow_screen_and_axe_finds_no_violation(
    name, scheme, site, visit, browser
):
    axe = Path(needed(NODE_MODULES / "axe-core" / "axe.min.js", "npm ci --prefix tests/exhibits"))
    emulated = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    text = (site / f"{name}.html").read_text(encoding="utf-8")
    assert len(text.encode()) <= 800_000
    visit(text, 400)  # the fixture looks at requests and at the console
    assert browser.execute_script(FITS)
    assert "$$" not in "".join(browser.execute_script(PROSE))
    assert not browser.find_elements("css selector", "[data-exhibit]:not([data-live])")
    browser.execute_script(axe.read_text(encoding="utf-8"))
    assert browser.execute_async_script(AXE) == []


class Links(HTMLParser):
    """The ids of a page, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self.ids.add(facts.get("id"))
        if tag == "a" and not re.match(r"[a-z]+:", facts.get("href") or ""):
            self.links.add(facts.get("href"))


def test_every_link_of_the_site_leads_to_a_page_and_a_place_of_it(site):
    parsed = {path.name: Links(path.read_text(encoding="utf-8")) for path in site.glob("*.html")}
    assert len(parsed) == len(pages.all_notebooks()) + 2
    broken = []
    for name, page in parsed.items():
        for link in page.links - {None}:
            file, _, place = link.partition("#")
            there = parsed.get(file or name)
            if not (site / file).exists() or (place and place not in there.ids):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_formulas_takeaways_and_links_are_shown(visit, browser):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(TEXT)])
    visit(pages.page(notebook), 400)
    assert browser.title == "01 · A title"
    assert browser.find_elements("css selector", "math[display=block] mfrac")
    assert browser.find_element("css selector", "p.know strong").text == "What you now know."
    for link in ("02-X.html", "https://a.b/03-X.ipynb"):
        assert browser.find_elements("css selector", f'a[href="{link}"]')
    entry = browser.find_element("css selector", "nav li:nth-child(2) a")
    assert entry.text == "A & B"
    assert browser.find_elements("css selector", f'h2[id="{entry.get_attribute("hash")[1:]}"]')


def test_the_contents_mark_where_one_reads(site, visit, browser):
    visit((site / "01-Mixed_Precision.html").read_text(encoding="utf-8"))
    headings = browser.find_elements("css selector", "main h2")
    for heading in (headings[6], headings[-1], headings[1]):
        browser.execute_script("arguments[0].scrollIntoView()", heading)
        WebDriverWait(browser, 10).until(
            lambda _, wanted=heading.text: (
                [a.text for a in browser.find_elements("css selector", "nav [data-current]")]
                == [wanted]
            )
        )


def test_the_log_of_runs_is_folded_and_a_figure_has_its_own_words():
    outputs = [nbformat.v4.new_output("stream", text=LOG)]
    told = {"image/png": {"alt": "It is < 3"}}
    figure = nbformat.v4.new_output("display_data", {"image/png": PNG}, metadata=told)
    cell = nbformat.v4.new_code_cell("lab.guess('x')", outputs=[*outputs, figure])
    first = nbformat.v4.new_markdown_cell("# 01 · A title")
    notebook = nbformat.v4.new_notebook(cells=[first, cell])
    notebook.metadata["executed"] = "Executed in 81 s on a CPU"
    text = pages.page(notebook, "02-Gradient_Accumulation")
    [details] = re.findall(r"<details>(.*?)</details>", text, re.S)
    assert "3 lines" in details and "100%" in details and "saved fp32" in details
    assert "predicted: 68.4 MiB" in text.replace(details, "") and "not on this device" in text
    assert 'alt="It is &lt; 3"' in text and '<div class="guess">' in text
    assert "Executed in 81 s on a CPU" in text
    for neighbour in ("01-Mixed_Precision", "03-Gradient_Checkpointing"):
        assert f'href="{neighbour}.html"' in text


@pytest.mark.parametrize("link", ["further/train_gpt2.py", "../README.md"])
def test_a_link_to_a_file_of_the_course_leads_there_from_runs(link, runs):
    cell = nbformat.v4.new_markdown_cell(f"[a file]({link})")
    text = pages.page(nbformat.v4.new_notebook(cells=[cell]))
    (href,) = re.findall(r'<a href="([^"]*)">a file</a>', text)
    assert (runs / href).resolve() == REPO / link.removeprefix("../")


def test_the_first_page_leads_to_runs_findings_and_what_is_not_executed(runs, visit, browser):
    runs.mkdir()
    RunRecord(id="20261122-000000000000-0000", created="", name="mine <b>").save()
    made_in = {"notebook": "01-A"}
    RunRecord(id="20261123-000000000000-0000", created="", name="fp32", environment=made_in).save()
    told = {"image/png": {"alt": "It saves 16 %. From left to right: x"}}
    figure = nbformat.v4.new_output("display_data", {"image/png": PNG}, metadata=told)
    cells = [nbformat.v4.new_markdown_cell("# 01 · A"), nbformat.v4.new_code_cell(outputs=[figure])]
    cells[1].metadata["tags"] = ["cover"]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"executed": "Executed here"})
    nbformat.write(notebook, runs / "01-Mixed_Precision.ipynb")
    (runs / "01-Mixed_Precision.html").write_text("executed")
    visit(pages.write_index().read_text(encoding="utf-8"), 400)
    assert browser.execute_script(FITS)
    first, second, *_ = browser.find_elements("css selector", ".card")
    assert "It saves 16 %\nExecuted here" in first.text and "Executed" not in second.text
    links = [link.get_dom_attribute("href") for link in browser.find_elements("css selector", "a")]
    shown = {link.text for link in browser.find_elements("css selector", "td a") if link.text}
    assert shown == {"mine <b>"}  # runs of a notebook are folded
    there = [link for link in links if not link.startswith("exhibits.html")]
    assert all((runs / link).is_file() for link in there) and any("fp32" in link for link in there)
    missing = (runs / "scaler.html").read_text(encoding="utf-8")
    assert "labutils labs scaler" in missing
    assert (runs / "01-Mixed_Precision.html").read_text() == "executed"
