"""The exhibit `ledger`: its table against predictions, and its page in a browser."""

from __future__ import annotations

import json
import random
import shlex
from itertools import pairwise

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import labutils as lab
from labutils.config.reader import parse_overrides
from labutils.exhibits.ledger_data import START, peaks_at
from labutils.exhibits.ledger_switches import (
    BATCHES,
    CARDS,
    GRID,
    SHAPE,
    SWITCHES,
    UNIT,
    experiment,
    key_of,
    read,
    settings,
)
from labutils.exhibits.ledger_table import grid_point, phases_of, pieces, sizes_of, standing
from labutils.memory.ledger import ROUNDING
from labutils.prediction import replay
from labutils.tools import cli

ALL = SWITCHES["model"]
STALE = "the table is out of date: make exhibits AGAIN=--again"
CALL = "return arguments[0].exhibit[arguments[1]](...[...arguments].slice(2))"
NAMES = "return arguments[0].exhibit.names"


def some_settings(n: int, seed: int, **only) -> list[dict]:
    """Return random settings of all switches."""
    rng = random.Random(seed)
    values = {
        switch: (only.get(switch),) if switch in only else SWITCHES[switch] for switch in SWITCHES
    }
    found = []
    for _ in range(n):
        found.append({switch: rng.choice(options) for switch, options in values.items()})
    return found


def without_rounding(ledger) -> dict[str, dict[str, int]]:
    found = {}
    for phase, parts in ledger.phases.items():
        found[phase] = {name: n for name, n in parts.items() if name != ROUNDING}
    return found


def compare(browser, root, setting: dict, batch: int, ledger) -> int:
    """The page's bytes are the ledger's, in every phase and at the peak, to the byte.

    Left out is the ledger's category "rounding up". Returns in how many phases the categories are
    the ledger's too: where two moments of a phase have equally many bytes, either may be shown.
    """
    predicted = without_rounding(ledger)
    names = browser.execute_script(NAMES, root)
    shown = browser.execute_script(CALL, root, "phases", setting, batch)
    same = 0
    assert shown.keys() == predicted.keys()
    for phase, parts in predicted.items():
        found = dict(zip(names, shown[phase], strict=True))
        assert sum(found.values()) == sum(parts.values()), (setting, batch, phase)
        assert found == peaks_at(setting, batch)[phase]
        same += found == parts
    phase, peak = browser.execute_script(CALL, root, "peak", shown)
    assert peak == sum(predicted[phase].values())
    assert peak == max(sum(parts.values()) for parts in predicted.values()) <= ledger.peak_bytes
    assert peak % UNIT == 0
    return same


def test_the_page_reads_the_table_at_every_batch_size(browser, show):
    root = show(lab.play.ledger(ALL))
    script = "return arguments[2].map((n) => arguments[0].exhibit.phases(arguments[1], n))"
    batches = list(range(1, BATCHES + 1))
    for setting in some_settings(12, seed=12):
        shown = browser.execute_script(script, root, setting, batches)
        for batch, phases in zip(batches, shown, strict=True):
            wanted = {
                phase: list(parts.values()) for phase, parts in peaks_at(setting, batch).items()
            }
            assert phases == wanted, (setting, batch)


def test_every_phase_is_that_of_the_prediction_at_any_batch_size(browser, show):
    """Ten settings, four batch sizes each: 40 ledgers, as `predict_memory` makes them."""
    root = show(lab.play.ledger(ALL))
    rng = random.Random(2)
    same = 0
    for setting in some_settings(10, seed=1):
        sizes = sizes_of(setting)
        for batch in (1, 2, *rng.sample(range(3, BATCHES + 1), 2)):
            found = sizes.at(batch)
            ledger = replay.ledger(found.trace, 1, "predicted", found.settings)
            same += compare(browser, root, setting, batch, ledger)
    assert same >= 0.9 * 40 * 4  # categories; of the sums, all


def test_the_peak_is_that_of_predict_memory(browser, show):
    root = show(lab.play.ledger(ALL))
    for setting, batch in zip(some_settings(2, seed=3), (7, 24), strict=True):
        compare(browser, root, setting, batch, lab.predict_memory(experiment(setting, batch)))


@pytest.mark.slowest
def test_200_random_settings_are_those_of_predict_memory(browser, show, monkeypatch):
    monkeypatch.setattr(replay, "smallest_limit", lambda *_: 0)  # slow, and not compared here
    root = show(lab.play.ledger(ALL))
    rng = random.Random(4)
    same = 0
    for setting in some_settings(200, seed=5):
        batch = rng.randint(1, BATCHES)
        ledger = lab.predict_memory(experiment(setting, batch))
        same += compare(browser, root, setting, batch, ledger)
    assert same >= 0.9 * 200 * 4


def test_the_table_has_every_setting():
    table = read()
    keys = [key_of(*setting.values()) for setting in settings()]
    assert list(table["phases"]) == list(table["grid"]) == keys
    for model in ALL:
        for precision in SWITCHES["precision"]:
            for optimizer in SWITCHES["optimizer"]:
                assert key_of(model, precision, optimizer) in table["standing"]


def recompute(setting: dict) -> None:
    """What the table has of a setting is computed again and compared."""
    table = read()
    shape = {switch: setting[switch] for switch in SHAPE}
    key = key_of(*shape.values())
    sizes = sizes_of(shape)
    assert table["phases"][key] == phases_of(sizes), STALE
    assert table["grid"][key] == [grid_point(sizes, batch) for batch in GRID], STALE
    name = key_of(setting["model"], setting["precision"], setting["optimizer"])
    assert table["standing"][name] == standing(setting), STALE


def test_the_table_is_up_to_date():
    for setting in some_settings(2, seed=6, loss_chunk_tokens=0):
        recompute(setting)


@pytest.mark.slow
def test_more_of_the_table_is_up_to_date():
    for setting in some_settings(20, seed=7):
        recompute(setting)


def test_times_and_what_a_card_must_have_are_those_of_the_predictions(browser, show):
    root = show(lab.play.ledger(ALL))
    cases = [("fp32", "t4", 4), ("bf16", "h100", 16), ("pure_bf16", "rtx4090", 1)]
    for (setting, _), (precision, card, batch) in zip(
        zip(some_settings(3, seed=8, optimizer="adamw"), cases, strict=True), cases, strict=True
    ):
        setting = setting | {"precision": precision}
        config = experiment(setting, batch)
        point = browser.execute_script(CALL, root, "known", setting, batch)
        time = lab.predict_time(config, card)
        shown = point["times"][CARDS.index(card)]
        assert shown["ms"] == pytest.approx(time.step_ms, rel=0.006)  # three digits
        assert shown["low"] == pytest.approx(time.low_ms, rel=0.006)
        assert shown["high"] == pytest.approx(time.high_ms, rel=0.006)
    needed = lab.predict_memory(config).needed_bytes
    assert point["needed"] == round(needed / 2**20)


def test_a_card_without_bf16_has_no_time_in_bf16(browser, show):
    root = show(lab.play.ledger())
    setting = some_settings(1, seed=9, model="gpt2", precision="bf16", optimizer="adamw")[0]
    point = browser.execute_script(CALL, root, "known", setting, 4)
    assert point["times"][CARDS.index("t4")] is None
    assert point["times"][CARDS.index("a100")]["ms"] > 0


def test_between_known_points_nothing_is_known(browser, show):
    root = show(lab.play.ledger())
    setting = some_settings(1, seed=9, model="gpt2", optimizer="adamw")[0]
    for other, batch in ((setting, 5), (setting | {"optimizer": "sgd"}, 4)):
        assert browser.execute_script(CALL, root, "known", other, batch) is None


@pytest.mark.parametrize("setting", some_settings(6, seed=10), ids=lambda s: key_of(*s.values()))
def test_the_file_and_the_command_are_the_same_config(browser, show, tmp_path, setting):
    root = show(lab.play.ledger(ALL))
    wanted = experiment(setting, 12).model_dump(exclude={"name", "note", "overrides"})
    path = tmp_path / "my_ledger.yaml"
    path.write_text(browser.execute_script(CALL, root, "yaml", setting, 12), encoding="utf-8")
    assert lab.load_config(path).model_dump(exclude={"name", "note", "overrides"}) == wanted
    command = shlex.split(browser.execute_script(CALL, root, "command", setting, 12))
    assert command[:2] == ["labutils", "predict"]
    pairs = [value for flag, value in pairwise(command) if flag == "--set"]
    again = lab.load_config(command[2], **parse_overrides(pairs))
    assert again.model_dump(exclude={"name", "note", "overrides"}) == wanted


def test_the_command_predicts_what_the_page_shows(browser, show, capsys):
    root = show(lab.play.ledger())
    setting = some_settings(1, seed=11, model="gpt2", seq_len=256, loss_chunk_tokens=0)[0]
    command = shlex.split(browser.execute_script(CALL, root, "command", setting, 3))
    assert cli.main([*command[1:], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    for phase, parts in said["phases"].items():
        parts.pop(ROUNDING)
        assert sum(parts.values()) == sum(peaks_at(setting, 3)[phase].values())


def text_of(root, part: str) -> str:
    return root.find_element("css selector", f'[data-part="{part}"]').text


def cells(root, category: str) -> list[str]:
    found = root.find_elements("css selector", f'tr[data-category="{category}"] td')
    return [cell.text for cell in found]


def choose(root, switch: str, value: object) -> None:
    Select(root.find_element("css selector", f'[data-switch="{switch}"]')).select_by_value(
        str(value)
    )


def test_the_page_begins_with_the_setting_that_is_asked_for(show):
    root = show(lab.play.ledger(micro_batch_size=9, seq_len=256, optimizer="sgd"))
    peaks = peaks_at({**START, "seq_len": 256, "optimizer": "sgd"}, 9)
    phase, parts = max(peaks.items(), key=lambda item: sum(item[1].values()))
    assert f"in the {phase} phase ({sum(parts.values()):,} bytes)" in text_of(root, "sentence")
    assert cells(root, "sum")[1:] == [f"{sum(p.values()) / 2**30:.2f}" for p in peaks.values()]
    assert cells(root, "optimizer state")[1] == f"{parts['optimizer state'] / 2**30:.2f}"


def test_a_switch_and_a_key_change_everything_that_is_shown(show):
    root = show(lab.play.ledger())
    before = text_of(root, "sentence")
    choose(root, "gradient_checkpointing", "block")
    blocks = text_of(root, "sentence")
    assert blocks != before
    assert "gradient_checkpointing=block" in text_of(root, "command")
    slider = root.find_element("css selector", "input[type=range]")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert text_of(root, "size") == "5"
    peaks = peaks_at({**START, "gradient_checkpointing": "block"}, 5)
    highest = max(sum(parts.values()) for parts in peaks.values())
    assert f"({highest:,} bytes)" in text_of(root, "sentence")
    assert "tokens_per_step=5120" in text_of(root, "command")
    slider.send_keys(Keys.END)
    assert text_of(root, "size") == str(BATCHES)


def test_times_stand_at_known_points_only(show):
    root = show(lab.play.ledger())
    times = root.find_element("css selector", '[data-part="times"]')
    assert times.is_displayed()
    assert "no bf16 hardware" in times.text
    choose(root, "optimizer", "adamw_8bit")
    assert not times.is_displayed()
    assert text_of(root, "verdict").startswith("Allocated only.")
    root.find_element("css selector", 'button[data-point="16"]').send_keys(Keys.ENTER)
    assert times.is_displayed()
    assert text_of(root, "size") == "16"
    assert "The run needs" in text_of(root, "verdict")


def test_the_bars_are_as_long_as_their_bytes_and_the_next_card_is_drawn(browser, show):
    root = show(lab.play.ledger())
    widths = {}
    for rect in root.find_elements("css selector", '[data-part="bars"] > rect'):
        top = rect.get_attribute("y")
        widths[top] = widths.get(top, 0) + float(rect.get_attribute("width"))
    totals = [sum(parts.values()) for parts in peaks_at(START, 4).values()]
    ratios = [width / total for width, total in zip(widths.values(), totals, strict=True)]
    assert max(ratios) == pytest.approx(min(ratios))
    label = root.find_element("css selector", '[data-part="bars"]').get_attribute("aria-label")
    assert "forward" in label and "optimizer" in label

    def lines() -> list[str]:
        texts = root.find_elements("css selector", '[data-part="bars"] > text')
        return [text.text for text in texts if text.text.endswith("GB")]

    assert lines() == ["8 GB"]
    choose(root, "attention", "eager")
    root.find_element("css selector", "input[type=range]").send_keys(Keys.END)
    assert lines() == ["8 GB", "16 GB", "24 GB", "80 GB"]  # and the peak is beyond them


def test_all_models_are_a_page_of_at_most_300_kb():
    assert len(lab.play.ledger(ALL).html.encode()) <= 300_000


def test_the_page_names_the_models_that_it_leaves_out(show):
    others = [name for name in ALL if name not in ("gpt2", "gpt2-medium")]
    said = text_of(show(lab.play.ledger()), "others")
    assert all(f'"{name}"' in said for name in others)
    assert bool(said) == bool(others)
    assert text_of(show(lab.play.ledger(ALL)), "others") == ""


def test_what_the_table_lacks_is_refused():
    for asked in (
        {"models": ("gpt3",)},
        {"seq_len": 300},
        {"dropout": 0.1},
        {"model": "gpt2-large"},
    ):
        with pytest.raises(ValueError, match="is not in the table"):
            lab.play.ledger(**asked)


def test_pieces_are_the_ranges_of_a_highest_line():
    def at(batch: int) -> list[int]:
        if batch == 1:
            return [8, 0]  # one sequence may be different
        return max([7, 5 * batch], [-20, 9 * batch], [-221, 20 * batch], key=sum)

    found = pieces(at, last=64)
    assert [piece[0] for piece in found] == [1, 2, 7, 19]
    assert found[1:] == [[2, 7, 0, 0, 5], [7, -20, 0, 0, 9], [19, -221, 0, 0, 20]]
    for batch in range(1, 65):
        piece = [one for one in found if one[0] <= batch][-1]
        assert [piece[1] + batch * piece[3], piece[2] + batch * piece[4]] == at(batch)
