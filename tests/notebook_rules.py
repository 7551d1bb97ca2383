"""A pytest plugin that makes nbval strict where it is lax: `pytest 0*.ipynb`.

After a failed cell the rest of that notebook is skipped, instead of failing for the same reason
again. A cell tagged `raises-exception` that raises nothing fails. `--nbval` compares every cell, as
it says, and not only those tagged for it. Runs go to a temporary folder, so nothing is reused or
left behind.
"""

import os
import tempfile

import pytest

_failed_notebooks: set[str] = set()


def pytest_configure(config):
    # somebody has typed --nbval: pyproject.toml has only --nbval-lax, which would win
    if config.option.nbval:
        config.option.nbval_lax = False
    folder = tempfile.TemporaryDirectory(prefix="labutils-runs-")
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault("LABUTILS_RUNS", folder.name)


def _is_cell(item) -> bool:
    return type(item).__name__ == "IPyNbCell"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if _is_cell(item) and str(item.path) in _failed_notebooks:
        pytest.skip("an earlier cell of this notebook failed")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if not _is_cell(item) or call.when != "call":
        return
    report = outcome.get_result()
    tags = item.cell.metadata.get("tags", [])
    if report.passed and "raises-exception" in tags and not _raised(item):
        report.outcome = "failed"
        report.longrepr = "this cell is tagged raises-exception, but raised nothing"
    if report.failed:
        _failed_notebooks.add(str(item.path))


def _raised(item) -> bool:
    return any(output.get("output_type") == "error" for output in item.test_outputs or [])
