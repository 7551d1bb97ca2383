from __future__ import annotations

from collections import Counter

import pytest

import labutils as lab
from labutils.config.choices import PRECISIONS
from labutils.exhibits import step_data

RUNS = [row.name for row in PRECISIONS.values() if row.name in ("fp32", "fp16", "bf16")]

SCALARS = 64  # bytes: the ledger is of a later step, which meets a few scalars of the one before


@pytest.fixture(scope="module")
def exhibit():
    return lab.play.step()


@pytest.fixture(scope="module")
def steps() -> dict[str, list[step_data.Moment]]:
    return {name: step_data.moments(lab.load_config(name)) for name in RUNS}


def by_category(moment: step_data.Moment) -> dict[str, int]:
    found: Counter = Counter()
    for (category, _), n_bytes in moment.alive.items():
        found[category] += n_bytes
    return dict(found)


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_is_that_of_the_memory_ledger(steps, name):
    ledger = lab.predict_memory(lab.load_config(name), "cpu")
    peak = max(steps[name], key=lambda moment: moment.alive.total())
    assert peak.phase == ledger.peak_phase
    for category, n_bytes in ledger.categories.items():
        assert by_category(peak).get(category, 0) == pytest.approx(n_bytes, abs=SCALARS), category
    for phase in ("forward", "loss", "backward"):
        largest = max(one.alive.total() for one in steps[name] if one.phase == phase)
        right = sum(ledger.phases[phase].values())
        assert largest == pytest.approx(right, abs=SCALARS), phase


def test_the_page_adds_up_what_is_alive(exhibit, steps, show, browser):
    root = show(exhibit)
    groups = [tuple(group) for group in step_data.data()["groups"]]
    for name in RUNS:
        script = "return arguments[0].exhibit.alive(arguments[1])"
        found = browser.execute_script(script, root, name)
        right = [[moment.alive[group] for group in groups] for moment in steps[name]]
        assert found == right, name
