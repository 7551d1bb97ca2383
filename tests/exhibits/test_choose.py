"""Every recommendation is a config that loads, runs on its card, and is what labutils predicts."""

from __future__ import annotations

import random

import pytest

import labutils as lab
from benchmarks.choose_table import (
    SYMPTOMS,
    facts,
    fastest_precision,
    recommended,
    recommended_on_cpu,
)
from labutils.config.card import CPU
from labutils.config.reader import load_config
from labutils.config.resolve import resolve
from labutils.exhibits.choose_data import BASE, CHOSEN, MODELS_ON_CARDS, NO_CARD, base_on_cpu, read

STALE = "the table is out of date: make exhibits AGAIN=--again"
ALL = """
const { grid, symptoms, answer, yaml } = arguments[0].exhibit;
const found = [];
for (const card of Object.keys(grid)) for (const model of Object.keys(grid[card])) for (const one of symptoms) {
  found.push([card, model, one, answer(card, model, one), yaml(card, model, one)]);
}
return found;
"""


@pytest.fixture(scope="module")
def exhibit():
    return lab.play.choose()


def test_every_answer_has_a_config_that_loads_and_runs_on_its_card(
    exhibit, browser, show, tmp_path
):
    answers = browser.execute_script(ALL, show(exhibit))
    assert len(answers) == 4 * (1 + len(CHOSEN) * len(MODELS_ON_CARDS))
    grid = read()
    for card, model, symptom, found, text in answers:
        path = tmp_path / "my_choice.yaml"
        path.write_text(text, encoding="utf-8")
        config = load_config(path)
        place = CPU if card == NO_CARD else lab.CARDS[card]
        run = resolve(config, place).config
        right = grid[card][model][symptom]
        for fact in ("changes", "gib", "ms", "fits"):
            assert found[fact] == right[fact]
        assert run.model == model
        for key, value in right["changes"].items():
            assert getattr(run, key) == value, (card, model, symptom, key)
            assert found["why"][key]
        assert place.support(run.precision).ok


def some_rows(n: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    return rng.sample([(card, model) for card in CHOSEN for model in MODELS_ON_CARDS], n)


@pytest.mark.parametrize(("card", "model"), some_rows(1, seed=5))
def test_the_table_is_up_to_date(card, model):
    """Random numbers of it are predicted again; which changes are best, in the slow test."""
    base, row = load_config(BASE, model=model), read()[card][model]
    for symptom in ("base", random.Random(card + model).choice(SYMPTOMS)):
        again = facts(base, row[symptom]["changes"], lab.CARDS[card])
        assert row[symptom] == again, STALE
    changes = row["begin"]["changes"]
    if changes.get("precision") != "pure_bf16":
        precision = fastest_precision(base, lab.CARDS[card])
        assert changes.get("precision", BASE) == precision, STALE


@pytest.mark.slow
def test_recommendations_are_up_to_date():
    assert read()[NO_CARD] == {base_on_cpu().model: recommended_on_cpu()}, STALE
    assert read()["t4"]["gpt2"] == recommended(lab.CARDS["t4"], "gpt2"), STALE
