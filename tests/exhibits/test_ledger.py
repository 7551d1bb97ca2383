"""The exhibit `ledger`: its table against predictions, and its page in a browser."""

from __future__ import annotations

import random
import shlex
from itertools import pairwise

import pytest

import labutils as lab
from benchmarks.ledger_table import grid_point, phases_of, sizes_of, standing
from labutils.config.reader import parse_overrides
from labutils.exhibits.ledger_data import peaks_at
from labutils.exhibits.ledger_switches import (
    BATCHES,
    GRID,
    SHAPE,
    SWITCHES,
    UNIT,
    experiment,
    key_of,
    read,
)
from labutils.memory.ledger import ROUNDING
from labutils.prediction import replay

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


def test_every_phase_is_that_of_the_prediction_at_any_batch_size(browser, show):
    """Four settings, four batch sizes each: 16 ledgers, as `predict_memory` makes them."""
    root = show(lab.play.ledger(ALL))
    rng = random.Random(2)
    same = 0
    for setting in some_settings(4, seed=1):
        sizes = sizes_of(setting)
        for batch in (1, 2, *rng.sample(range(3, BATCHES + 1), 2)):
            found = sizes.at(batch)
            ledger = replay.ledger(found.trace, 1, "predicted", found.settings)
            same += compare(browser, root, setting, batch, ledger)
    assert same >= 0.9 * 16 * 4  # categories; of the sums, all


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
    for setting in some_settings(1, seed=6, loss_chunk_tokens=0):
        recompute(setting)


@pytest.mark.slow
def test_more_of_the_table_is_up_to_date():
    for setting in some_settings(20, seed=7):
        recompute(setting)


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


def test_all_models_are_a_page_of_at_most_300_kb():
    assert len(lab.play.ledger(ALL).html.encode()) <= 300_000


def test_what_the_table_lacks_is_refused():
    for asked in (
        {"models": ("gpt3",)},
        {"seq_len": 300},
        {"dropout": 0.1},
        {"model": "gpt2-large"},
    ):
        with pytest.raises(ValueError, match="is not in the table"):
            lab.play.ledger(**asked)
