"""The tables of exhibits are what is predicted, on a sample; and the page `plan` is near it."""

from __future__ import annotations

import random

import pytest

import labutils as lab
from benchmarks.exhibit_tables import (
    CARDS_SHOWN,
    card_speeds,
    phases_of,
    prediction_of,
    run_of,
    text_of,
    update_of,
)
from labutils.config.choices import PRECISIONS
from labutils.exhibits import plan_data as plan
from labutils.exhibits.exhibit import FOLDER, table_of
from labutils.prediction.time import predict_time
from tests.helpers import slow

STALE = "a table is out of date: make exhibits AGAIN=--again"
ANSWERS = """(data, cases) => cases.map(([setting, batch]) => {
  const peaks = phases(data, setting, batch);
  return [peak(peaks)[1], needed(data, setting, batch), times(data, setting, batch)];
})"""


def some_settings(n: int, seed: int, **only) -> list[dict]:
    settings = [one for one in plan.settings(tuple(plan.SWITCHES)) if one | only == one]
    return random.Random(seed).sample(settings, n)


def check_answers(node, cases: list[tuple[dict, int]]) -> None:
    """Print by how much the page is off at most, and judge it: peak, smallest card, and times."""
    errors = {"peak": 0.0, "needed": 0.0, "ms": 0.0}
    data = plan.page_data(cases[0][0], 1)
    for (setting, batch), answer in zip(cases, node("plan", ANSWERS, data, cases), strict=True):
        peak, needed, times = answer
        ledger = prediction_of(setting, batch).ledger
        ratios = [
            ("peak", peak / ledger.peak_bytes),
            ("needed", 2**30 * needed / ledger.needed_bytes),
        ]
        for card, shown in zip(plan.TIMED, times, strict=True):
            assert (shown is None) == (not lab.CARDS[card].support(setting["precision"]).ok)
            if shown:
                right = predict_time(plan.experiment(setting, batch), card)
                ratios.append(("ms", shown["ms"] / right.step_ms))
                if batch in plan.POINTS:
                    band = right.low_ms / right.step_ms, right.high_ms / right.step_ms
                    is_shown = shown["low"] / shown["ms"], shown["high"] / shown["ms"]
                    assert is_shown == pytest.approx(band), (setting, batch, card)
        for name, ratio in ratios:
            errors[name] = max(errors[name], abs(ratio - 1))
    print(errors)
    assert errors["peak"] <= 0.05 and errors["needed"] <= 0.12 and errors["ms"] <= 0.12


def test_the_page_is_near_the_predictions(node):
    settings = some_settings(4, seed=1, model="gpt2")
    check_answers(node, list(zip(settings, [1, 3, 20, 64], strict=True)))


@slow
def test_more_of_the_page_is_near_the_predictions(node):
    rng = random.Random(2)
    check_answers(node, [(setting, rng.randint(1, 64)) for setting in some_settings(12, seed=3)])


def test_the_table_of_plan_is_up_to_date_and_small():
    assert (FOLDER / "plan.json").stat().st_size <= 25_000
    (setting,) = some_settings(1, seed=6, model="gpt2", optimizer="adamw")
    phases, update = table_of("plan")["phases"], table_of("plan")["update"]
    assert phases[plan.key_of(setting, plan.SHAPE)] == phases_of(setting), STALE
    assert update[plan.key_of(setting, plan.STANDING)] == update_of(setting), STALE
    assert len(phases) == len(list(plan.settings(plan.SHAPE)))


def test_the_tables_of_amdahl_and_step_are_up_to_date():
    card, precision = CARDS_SHOWN[0], "fp16"
    assert table_of("amdahl")["cards"][card] == card_speeds(card), STALE
    shipped = table_of("step")["runs"][precision]
    assert text_of({"runs": shipped}) == text_of({"runs": run_of(PRECISIONS[precision])}), STALE


def test_the_file_is_the_setting(node, tmp_path):
    for setting in some_settings(3, seed=10):
        wanted = plan.experiment(setting, 12).model_dump(exclude={"name", "note", "overrides"})
        path = tmp_path / "my_plan.yaml"
        text = node("plan", "yaml", plan.page_data(setting, 1), setting, 12)
        path.write_text(text, encoding="utf-8")
        assert lab.load_config(path).model_dump(exclude={"name", "note", "overrides"}) == wanted


def test_what_the_table_lacks_is_refused():
    for asked in ({"model": "gpt3"}, {"seq_len": 300}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match="is not in the table"):
            lab.play.plan(**asked)
