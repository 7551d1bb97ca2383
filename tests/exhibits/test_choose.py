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
from labutils import cli
from labutils.config.card import CPU
from labutils.config.reader import load_config
from labutils.config.resolve import resolve
from labutils.exhibits.choose_data import BASE, CHOSEN, MODELS_ON_CARDS, NO_CARD, read

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


def part(root, name: str):
    return root.find_element("css selector", f'[data-part="{name}"]')


def press(root, answer: str) -> None:
    root.find_element("css selector", f'[data-answer="{answer}"]').click()


def test_the_grid_is_complete_and_says_truly_what_fits():
    grid = read()
    assert list(grid) == [NO_CARD, *CHOSEN]
    for card in CHOSEN:
        assert list(grid[card]) == MODELS_ON_CARDS
        for found in grid[card].values():
            assert set(found) == {"base", *SYMPTOMS}
            for one in found.values():
                has_room = one["gib"] <= lab.CARDS[card].memory_gib * 1.01
                assert (
                    one["fits"] == has_room
                    or abs(one["gib"] / lab.CARDS[card].memory_gib - 1) < 0.02
                )
            assert found["slow"]["ms"] <= found["begin"]["ms"]
            if found["base"]["fits"]:
                assert found["memory"]["gib"] < found["base"]["gib"]


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
        assert found["changes"] == right["changes"]
        assert (found["gib"], found["ms"], found["fits"]) == (
            right["gib"],
            right["ms"],
            right["fits"],
        )
        assert run.model == model
        for key, value in right["changes"].items():
            assert getattr(run, key) == value, (card, model, symptom, key)
            assert found["why"][key]
        shipped = resolve(load_config("fp32", model=model), place).config
        same = run.model_copy(update={key: getattr(shipped, key) for key in right["changes"]})
        assert same.model_copy(update={"name": "", "note": ""}) == shipped.model_copy(
            update={"name": "", "note": "", "overrides": {}}
        )
        assert place.support(run.precision).ok


def some_rows(n: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    return rng.sample([(card, model) for card in CHOSEN for model in MODELS_ON_CARDS], n)


@pytest.mark.parametrize(("card", "model"), some_rows(3, seed=5))
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


def test_what_is_recommended_without_a_card_is_up_to_date():
    (row,) = read()[NO_CARD].values()
    assert row == recommended_on_cpu(), STALE


def test_a_recommendation_is_up_to_date():
    assert read()["t4"]["gpt2"] == recommended(lab.CARDS["t4"], "gpt2"), STALE


@pytest.mark.slow
def test_more_of_the_table_is_up_to_date():
    for card, model in some_rows(10, seed=2):
        assert read()[card][model] == recommended(lab.CARDS[card], model), (card, model, STALE)


def test_a_conversation_leads_to_a_config_and_back(exhibit, show, browser):
    root = show(exhibit)
    assert part(root, "question").text == "Question 1 of 3: Which GPU do you have?"
    assert not part(root, "result").is_displayed()
    press(root, "t4")
    assert browser.switch_to.active_element.text == "Question 2 of 3: Which model do you train?"
    press(root, "gpt2")
    press(root, "begin")
    assert part(root, "result").is_displayed()
    assert "Precision: fp16. The card has tensor cores for it." in part(root, "precision").text
    assert "Not bf16: compute capability 7.5 has no BF16 hardware" in part(root, "precision").text
    assert part(root, "run").text == "labutils run configs/my_choice.yaml"
    assert "precision: fp16 # [*]" in part(root, "yaml").get_property("value")
    part(root, "back").click()
    assert part(root, "question").text == "Question 3 of 3: What is wrong?"
    press(root, "nan")
    assert "--set precision=fp32 --set name=control" in part(root, "second").text
    assert "65504" in part(root, "more").text
    part(root, "again").click()
    assert part(root, "trail").text == ""


def test_keys_alone_lead_to_an_answer(exhibit, show, browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    root = show(exhibit)
    first = root.find_element("css selector", "[data-answer]")
    first.send_keys(Keys.ENTER)  # no GPU
    assert part(root, "question").text.startswith("Question 2 of 2")
    ActionChains(browser).send_keys(Keys.TAB, Keys.TAB, Keys.ENTER).perform()
    assert "A step needs about" in part(root, "verdict").text
    assert "--device cpu" in part(root, "second").text
    back = ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT)
    back.perform()
    assert browser.switch_to.active_element.text == "Start again"


def test_what_does_not_fit_is_said(exhibit, show):
    root = show(exhibit)
    grid = read()
    card = next(one for one in CHOSEN if not grid[one]["gpt2-xl"]["begin"]["fits"])
    for answer in (card, "gpt2-xl", "memory"):
        press(root, answer)
    assert part(root, "verdict").text.startswith("It does not fit.")
    assert "xl_config.yaml" in part(root, "verdict").text
    assert f"{grid[card]['gpt2-xl']['begin']['gib']:.3g} GiB" in part(root, "verdict").text


def test_the_command_line_accepts_every_config(exhibit, browser, show, tmp_path, capsys):
    paths = []
    for card, model, symptom, _, text in browser.execute_script(ALL, show(exhibit)):
        paths.append(tmp_path / f"{card}-{model}-{symptom}.yaml")
        paths[-1].write_text(text, encoding="utf-8")
    assert cli.main(["check", *map(str, paths)]) == 0
    assert capsys.readouterr().out.count(": ok") == len(paths)
    assert cli.main(["predict", str(tmp_path / "t4-gpt2-memory.yaml"), "--device", "t4"]) == 0
    needed = read()["t4"]["gpt2"]["memory"]["gib"]
    assert f"{needed:.2f} GiB" in capsys.readouterr().out


def test_a_control_that_may_not_fit_is_called_so(exhibit, show):
    root = show(exhibit)
    for answer in ("rtx4060", "gpt2-large", "nan"):
        press(root, answer)
    assert part(root, "more").text.endswith("compare both on a smaller model.")
    part(root, "again").click()
    for answer in ("p100", "gpt2", "nan"):  # no fast 16 bits, so nothing to control
        press(root, answer)
    assert "The precision is float32 already" in part(root, "more").text
    assert "predict" in part(root, "second").text
