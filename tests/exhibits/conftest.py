"""One Chromium for all exhibits. Without one these tests are skipped, or fail if it is required."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator:
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if None in found:
        why = "no chromium and chromedriver here: apt-get install chromium chromium-driver"
        if os.environ.get("EXHIBITS_REQUIRED") == "1":
            pytest.fail(why)
        pytest.skip(why)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=found[1])
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def visit(browser):
    """Return a function that opens a file; afterwards nothing may have been asked of a network."""

    def open_file(path: Path, width: int = 1200):
        browser.get_log("browser")
        browser.get_log("performance")
        browser.set_window_size(width, 900)
        browser.get(path.as_uri())

    yield open_file
    assert browser.get_log("browser") == []  # neither errors nor warnings
    asked = [entry["message"] for entry in browser.get_log("performance")]
    sent = [message for message in asked if '"Network.requestWillBeSent"' in message]
    assert not [message for message in sent if '"url":"http' in message]


@pytest.fixture
def show(browser, visit, tmp_path):
    """Return a function that opens an exhibit's page and gives its root element."""

    def open_page(exhibit, width: int = 1200):
        visit(exhibit.save(tmp_path / "page.html"), width)
        return browser.find_element("css selector", "[data-exhibit]")

    return open_page
