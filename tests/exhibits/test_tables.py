"""The tables of exhibits are what is predicted, on a sample; and the page `plan` is near it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import labutils as lab
from benchmarks.exhibit_tables import makers, prediction_of
from labutils.exhibits import plan_data as plan
from labutils.exhibits.exhibit import FOLDER, table_of
from labutils.prediction.time import predict_time
from tests.helpers import slow

STALE = "a table is out of date: make exhibits AGAIN=--again"
ANSWERS = """(data, cases) => cases.map(([setting, batch]) => {
  const peaks = phases(data, setting, batch);
  return [peak(peaks)[1], needed(data, setting, batch), times(data, setting, batch)];
})"""
SETTINGS = list(plan.settings(tuple(plan.SWITCHES)))
GPT2 = [setting for setting in SETTINGS if setting["model"] == "gpt2"]
FREE = {"name", "note", "overrides"}  # what a file says about itself


@pytest.mark.parametrize(
    ("settings", "batches"),
    [(GPT2, (1, 3, 20, 64)), pytest.param(SETTINGS, (2, 5, 8, 11, 31, 43, 60, 64), marks=slow)],
)
def test_the_page_is_near_the_predictions(node, settings, batches):
    """Prints by how much it is off at most: peak, smallest card, and times."""
    sample = random.Random(1).sample(settings, len(batches))
    cases = list(zip(sample, batches, strict=True))
    answers = node("plan", ANSWERS, plan.page_data(sample[0], 1), cases)
    ratios = {"peak": [], "needed": [], "ms": []}
    for (setting, batch), (peak, needed, times) in zip(cases, answers, strict=True):
        ledger = prediction_of(setting, batch).ledger
        ratios["peak"].append(peak / ledger.peak_bytes)
        ratios["needed"].append(2**30 * needed / ledger.needed_bytes)
        for card, shown in zip(plan.TIMED, times, strict=True):
            assert (shown is None) == (not lab.CARDS[card].support(setting["precision"]).ok)
            if shown:
                right = predict_time(plan.experiment(setting, batch), card)
                ratios["ms"].append(shown["ms"] / right.step_ms)
                if batch in plan.POINTS:
                    band = [right.step_ms, right.low_ms, right.high_ms]
                    in_ratio = ratios["ms"][-1] * np.array(band)
                    assert list(shown.values()) == pytest.approx(in_ratio), (setting, batch, card)
    errors = {name: np.abs(np.array(values) - 1).max() for name, values in ratios.items()}
    print(errors)
    # what the page says of itself
    assert errors["peak"] <= 0.06 and errors["needed"] <= 0.125 and errors["ms"] <= 0.08


@pytest.mark.parametrize(
    ("name", "part", "key"),
    [
        ("plan", "phases", "gpt2/pure_bf16/512/block"),
        ("plan", "update", "gpt2/fp32/adamw"),
        ("amdahl", "cards", "t4"),
        ("step", "runs", "fp16"),
        ("window", "step", "film"),
    ],
)
def test_a_table_is_up_to_date_and_small(name, part, key):
    rows, all_makers = table_of(name)[part], makers()[name, part]
    assert rows.keys() == all_makers.keys()
    assert rows[key] == json.loads(json.dumps(all_makers[key]())), STALE
    assert (FOLDER / f"{name}.json").stat().st_size <= 25_000


def test_the_file_is_the_setting(node, tmp_path):
    path = tmp_path / "my_plan.yaml"
    for setting in random.Random(10).sample(SETTINGS, 3):
        text = node("plan", "yaml", plan.page_data(setting, 1), setting, 12)
        path.write_text(text, encoding="utf-8")
        wanted = plan.experiment(setting, 12)
        assert lab.load_config(path).model_dump(exclude=FREE) == wanted.model_dump(exclude=FREE)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("plan", {"model": "gpt3"}),
        ("amdahl", {"share": 1.5, "speedup": 2.0}),
        ("amdahl", {"share": 0.5}),
    ],
)
def test_what_an_exhibit_cannot_show_is_refused(name, wrong):
    with pytest.raises(ValueError, match=r"is not in the table|a share is 0 to 1"):
        getattr(lab.play, name)(**wrong)
