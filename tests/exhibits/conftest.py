"""One Chromium for all exhibits, and node for their models. Without one of them its tests are
skipped, or fail if they are required.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labutils.course.exhibits.play import FOLDER, script_of

NODE_MODULES = Path(__file__).parent / "node_modules"
# Numbers that JSON lacks come back as Python's json reads them: NaN, Infinity.
RESULT = """
const marked = (key, x) => typeof x === "number" && !Number.isFinite(x) ? `$${x}` : x;
const text = JSON.stringify(({call})(...{arguments}), marked);
process.stdout.write(text.replace(/"\\$(.*?)"/g, "$1"));
"""
UNFOLD = "for (const folded of document.querySelectorAll('details')) folded.open = true;"
# myst-nb's unfolded code fades in for 0.3 s, in which it has less contrast
STILL = "for (const all of document.querySelectorAll('*')) all.style.animation = 'none';"
AXE = """
const done = arguments[0];
for (const button of document.querySelectorAll("button")) { // tensors to look at
  if (button.textContent.startsWith("▶ story")) button.click();
}
const told = ({ id, nodes }) => [id, nodes.map((node) => node.failureSummary)];
axe.run(document).then(({ violations }) => done(violations.map(told)));
"""


def stored(name: str) -> dict[str, Any]:
    """Return what an exhibit's file holds."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def needed(path: str | Path | None, package: str) -> str:
    """Return where a program or file is, as text; without it the test is skipped, or fails."""
    if path and Path(path).exists():
        return str(path)
    is_required = os.environ.get("EXHIBITS_REQUIRED") == "1"
    (pytest.fail if is_required else pytest.skip)(f"missing: {package}")


@pytest.fixture(scope="session")
def node() -> Callable:
    """Return a function that calls JavaScript in the program of an exhibit, without a page."""
    command = [needed(shutil.which("node"), "apt-get install nodejs"), "-"]

    def call(name: str, function: str, *arguments: object) -> object:
        text = RESULT.replace("{call}", function).replace("{arguments}", json.dumps(arguments))
        script = script_of(name) + text
        answer = subprocess.run(
            command, input=script, stdout=subprocess.PIPE, text=True, check=True
        )
        return json.loads(answer.stdout, parse_int=float)  # whole numbers as node has them

    return call


@pytest.fixture(scope="session")
def browser() -> Iterator:
    package = "apt-get install chromium chromium-driver"
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = needed(chromium, package)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=needed(chromedriver, package))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def visit(browser, tmp_path):
    """Return a function that opens a page, a text or an address; afterwards nothing may have been asked of a network."""

    def open_page(page: str, width: int = 1200) -> None:
        address = page
        if not page.startswith("http"):
            path = tmp_path / "page.html"
            path.write_text(page, encoding="utf-8")
            address = path.as_uri()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(address)

    yield open_page
    # neither errors nor warnings, but for what the site's theme says of its mode
    told = [entry["message"] for entry in browser.get_log("browser")]
    assert [message for message in told if not re.search("invalid theme mode|PST", message)] == []
    log = [entry["message"] for entry in browser.get_log("performance")]
    assert not [message for message in log if re.search(r'"url":"http(?!://127\.0\.0\.1)', message)]


@pytest.fixture(params=["light", "dark"])
def violations(browser, request) -> Callable:
    """Return a function that says what axe finds in an open page, all of it unfolded."""
    axe = Path(needed(NODE_MODULES / "axe-core" / "axe.min.js", "npm ci --prefix tests/exhibits"))
    emulated = {"features": [{"name": "prefers-color-scheme", "value": request.param}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)

    def found() -> list:
        browser.execute_script(axe.read_text(encoding="utf-8") + STILL + UNFOLD)
        return browser.execute_async_script(AXE)

    return found
