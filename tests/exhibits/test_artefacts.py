"""The files of exhibits are what `make exhibits` makes; and the page `plan` is near predictions."""

import json
import random
import re
from functools import reduce
from operator import getitem

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import labutils as lab
from benchmarks import exhibit_tables as tables
from benchmarks.exhibits import EXHIBITS, made, reserved_mib
from labutils.course.exhibits.play import FOLDER
from labutils.prediction.allocator import DEFAULT
from labutils.prediction.time import predict_time
from tests.exhibits.conftest import stored
from tests.helpers import REPO, slow, slowest

STALE = "an exhibit is out of date: make exhibits, or for what is predicted AGAIN=--again"
ANSWERS = """(data, cases) => cases.map(([setting, batch]) => {
  const peaks = phases(data, setting, batch);
  return [peak(peaks)[1], needed(data, setting, batch), times(data, setting, batch)];
})"""
SETTINGS = list(tables.settings(tuple(tables.SWITCHES)))
ROWS = [("plan", part, key) for part, rows in tables.TABLES["plan"].items() for key in rows]
FREE = {"name", "note", "overrides"}  # what a file says about itself


@pytest.mark.parametrize("name", EXHIBITS)
def test_words_arguments_and_data_are_up_to_date_and_small(name):
    if name == "number" and torch.__version__ < "2.12":  # pytorch/pytorch#178817
        pytest.skip("this torch makes NaN of numbers beyond E4M3's largest, later ones the largest")
    file = stored(name)
    exhibit, ax = made(name, file["data"])
    plt.close(ax.figure)
    assert (FOLDER / f"{name}.json").stat().st_size <= 60_000
    # as text: NaN is not equal to itself
    assert json.dumps(file) == json.dumps(exhibit | {"still": file["still"]}), STALE


def test_allocator_tells_the_story_of_notebook_04():
    notebook = (REPO / "04-Memory_Profiling.ipynb").read_text(encoding="utf-8")
    printed = re.findall(r"allocated +\d+ MiB, reserved +(\d+)", notebook)
    assert list(map(int, printed)) == reserved_mib(DEFAULT)


@pytest.mark.parametrize(
    "place",
    [
        ("plan", "phases", "gpt2/pure_bf16/512/block"),
        ("plan", "update", "gpt2/fp32/adamw"),
        ("step", "runs", "fp32"),
        ("step", "runs", "fp16"),
        ("step", "runs", "bf16"),
        ("window", "film"),
        pytest.param(("amdahl", "cards"), marks=slow),
        *[pytest.param(place, marks=slowest) for place in ROWS],
    ],
    ids="/".join,
)
def test_a_table_is_up_to_date(place):
    maker, table = reduce(getitem, place, tables.TABLES), stored(place[0])["data"]
    assert reduce(getitem, place[1:], table) == json.loads(json.dumps(maker())), STALE


@slow
def test_the_page_is_near_the_predictions(node):
    """What the page says of itself: how far it is off at most. A band moves with its time."""
    batches = (2, 5, 8, 11, 31, 43, 60, 64)
    cases = list(zip(random.Random(1).sample(SETTINGS, len(batches)), batches, strict=True))
    ratios = []
    answers = node("plan", ANSWERS, stored("plan")["data"], cases)
    for case, (peak, needed, times) in zip(cases, answers, strict=True):
        ledger, config = tables.prediction_of(*case).ledger, tables.experiment(*case)
        of_bytes = [peak / ledger.peak_bytes, 2**30 * needed / ledger.needed_bytes]
        for card, shown in zip(tables.TIMED, times, strict=True):
            assert bool(shown) != lab.CARDS[card].support(config.precision).slow
            if shown:
                time = predict_time(config, card)
                of_time = shown["ms"] / time.step_ms, shown["low"] / time.low_ms
                ratios.append([*of_bytes, *of_time, shown["high"] / time.high_ms])
    errors = np.abs(np.array(ratios) - 1).max(axis=0)
    assert (errors <= [0.06, 0.125, 0.08, 0.08, 0.08]).all(), errors


def test_the_file_is_the_setting(node, tmp_path):
    path = tmp_path / "my_plan.yaml"
    for setting in SETTINGS[::80]:
        path.write_text(node("plan", "yaml", stored("plan")["data"], setting, 12))
        wanted = tables.experiment(setting, 12)
        assert lab.load_config(path).model_dump(exclude=FREE) == wanted.model_dump(exclude=FREE)
