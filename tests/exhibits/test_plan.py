"""The exhibit `plan`: its table against predictions, and its page in a browser."""

from __future__ import annotations

import random

import pytest

import labutils as lab
from benchmarks.plan_table import phases_of, prediction_of, update_of
from labutils.exhibits.plan_data import (
    POINTS,
    SHAPE,
    STANDING,
    SWITCHES,
    TABLE,
    TIMED,
    experiment,
    key_of,
    peaks_at,
    read,
    settings,
)
from labutils.prediction.time import predict_time
from tests.helpers import slow

STALE = "the table is out of date: make exhibits AGAIN=--again"
CALL = "return arguments[0].exhibit[arguments[1]](...[...arguments].slice(2))"


def some_settings(n: int, seed: int, **only) -> list[dict]:
    possible = []
    for setting in settings(tuple(SWITCHES)):
        if setting | only == setting:
            possible.append(setting)
    return random.Random(seed).sample(possible, n)


def largest_errors(browser, root, cases: list[tuple[dict, int]]) -> dict[str, float]:
    """Return by how much the page is off at most: peak, smallest card, and times on all cards."""
    errors = {"peak": 0.0, "needed": 0.0, "ms": 0.0}
    for setting, batch in cases:
        ledger = prediction_of(setting, batch).ledger
        found = browser.execute_script(CALL, root, "phases", setting, batch)
        for phase, parts in peaks_at(setting, batch).items():
            assert found[phase] == pytest.approx(list(parts.values())), (setting, phase)
        _, peak = browser.execute_script(CALL, root, "peak", found)
        needed = browser.execute_script(CALL, root, "needed", setting, batch)
        off = {"peak": [peak / ledger.peak_bytes], "ms": []}
        off["needed"] = [2**30 * needed / ledger.needed_bytes]
        times = browser.execute_script(CALL, root, "times", setting, batch)
        for card, shown in zip(TIMED, times, strict=True):
            assert (shown is None) == (not lab.CARDS[card].support(setting["precision"]).ok)
            if shown:
                right = predict_time(experiment(setting, batch), card)
                off["ms"].append(shown["ms"] / right.step_ms)
                if batch in POINTS:
                    band = right.low_ms / right.step_ms, right.high_ms / right.step_ms
                    is_shown = shown["low"] / shown["ms"], shown["high"] / shown["ms"]
                    assert is_shown == pytest.approx(band), (setting, batch, card)
        for name, ratios in off.items():
            errors[name] = max(errors[name], *(abs(ratio - 1) for ratio in ratios))
    return errors


def test_the_page_is_near_the_predictions(browser, show):
    root = show(lab.play.plan())
    chosen = some_settings(4, seed=1, model="gpt2")
    batches = [1, 3, 20, 64]
    errors = largest_errors(browser, root, list(zip(chosen, batches, strict=True)))
    print(errors)
    assert errors["peak"] <= 0.05 and errors["needed"] <= 0.12 and errors["ms"] <= 0.12


@slow
def test_more_of_the_page_is_near_the_predictions(browser, show):
    root = show(lab.play.plan())
    rng = random.Random(2)
    cases = [(setting, rng.randint(1, 64)) for setting in some_settings(12, seed=3)]
    errors = largest_errors(browser, root, cases)
    print(errors)
    assert errors["peak"] <= 0.05 and errors["needed"] <= 0.12 and errors["ms"] <= 0.12


def test_the_table_is_up_to_date_and_small():
    assert TABLE.stat().st_size <= 25_000
    (setting,) = some_settings(1, seed=6, model="gpt2", optimizer="adamw")
    assert read()["phases"][key_of(setting, SHAPE)] == phases_of(setting), STALE
    assert read()["update"][key_of(setting, STANDING)] == update_of(setting), STALE
    assert len(read()["phases"]) == len(list(settings(SHAPE)))


def test_the_file_is_the_setting(browser, show, tmp_path):
    root = show(lab.play.plan())
    for setting in some_settings(3, seed=10):
        wanted = experiment(setting, 12).model_dump(exclude={"name", "note", "overrides"})
        path = tmp_path / "my_plan.yaml"
        path.write_text(browser.execute_script(CALL, root, "yaml", setting, 12), encoding="utf-8")
        assert lab.load_config(path).model_dump(exclude={"name", "note", "overrides"}) == wanted


def test_what_the_table_lacks_is_refused():
    for asked in ({"model": "gpt3"}, {"seq_len": 300}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match="is not in the table"):
            lab.play.plan(**asked)
