"""Records: written whole, read back, found, and put side by side."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

import labutils as lab
from labutils.files import new_id, write_atomically
from labutils.training.records import RecordError, RunRecord, Timing, load_record
from labutils.training.train import Series
from tests.helpers import REPO


def record(name="fp32", ms=10.0, **changes):
    run_id, created = new_id()
    values = {
        "id": run_id,
        "created": created,
        "name": name,
        "config": {"precision": name, "steps": 2},
        "environment": {"device": "a", "torch": "1"},
        "corpus": "c",
        "tokens_per_step": 10,
        "series": Series(loss=[3.0, 2.0], step_ms=[ms, ms]),
        "timing": Timing(median_step_ms=ms, tokens_per_s=1e4 / ms),
    }
    return RunRecord(**(values | changes))


# ---- Files


def test_a_record_survives_its_file_with_inf_and_nan_and_is_not_overwritten(runs):
    saved = record(series=Series(loss=[math.nan, math.inf, 1.0], grad_norm=[-math.inf, 0.0, 1.0]))
    path = saved.save()
    loaded = load_record(path)
    assert math.isnan(loaded.series.loss[0])
    assert loaded.series.loss[1:] == [math.inf, 1.0]
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    with pytest.raises(FileExistsError):
        saved.save()


def test_killed_writer_leaves_no_half_file(tmp_path):
    target = tmp_path / "x.json"
    write_atomically(target, b"old")
    code = (
        "import os, labutils.files as r, pathlib\n"
        "os.fsync = lambda fd: os._exit(9)\n"
        f"r.write_atomically(pathlib.Path({str(target)!r}), b'new' * 1000)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 9
    assert target.read_bytes() == b"old"


def test_failed_write_keeps_the_old_file_and_cleans_up(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    write_atomically(target, b"old")

    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 1}', b"\x00\xff", b'{"id": 5}'])
def test_damaged_record_is_a_clear_error_and_hides_no_other(runs, content):
    good = record()
    good.save()
    bad = runs / "bad-20260101-000000-abcd.json"
    bad.write_bytes(content)
    with pytest.raises(RecordError, match="is not a version 2 record"):
        load_record(bad)
    records, damaged = lab.find_runs()
    assert [r.id for r in records] == [good.id]
    assert len(damaged) == 1


def test_record_is_found_by_name_id_and_path(runs):
    old, new = record("a"), record("a", id="29990101-000000-0000")
    paths = [r.save() for r in (old, new)]
    assert load_record("a").id == new.id
    assert load_record(old.id).id == old.id
    assert load_record(paths[0]).id == old.id
    with pytest.raises(RecordError, match="no run 'b'"):
        load_record("b")


# ---- Side by side


def test_the_first_record_is_the_baseline():
    table = lab.compare([record("fp32", 10.0), record("bf16", 5.0), record("slow", 30.0)])
    assert table.speedup.tolist() == pytest.approx([1.0, 2.0, 1 / 3])
    assert table.precision.tolist() == ["fp32", "bf16", "slow"]
    assert table.attrs["notes"] == []
    assert lab.readable(table).loc["slow", "speedup"] == "0.333"


def test_runs_of_one_name_stand_under_their_ids():
    again = record(id="29990101-000000-0000")
    assert lab.compare([record(), again, record("bf16")]).index[1:].tolist() == [
        "fp32-29990101-000000-0000",
        "bf16",
    ]


def test_losses_are_compared_at_equal_tokens():
    short = record("bf16", series=Series(loss=[4.0], step_ms=[1.0]))
    table = lab.compare([record("fp32"), short])
    assert (table.loc["fp32", "loss"], table.loc["bf16", "loss"]) == (3.0, 4.0)
    assert table.steps.tolist() == [2, 1]
    assert "after 10 tokens" in table.attrs["notes"][0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"corpus": "d"}, "corpus"),
        ({"environment": {"device": "b", "torch": "1"}}, "device"),
        ({"environment": {"device": "a", "torch": "2"}}, "torch version"),
        ({"code": "x"}, "code version"),
        ({"tokens_per_step": 20}, "tokens per step"),
    ],
)
def test_unequal_runs_are_pointed_out(change, word):
    notes = lab.compare([record("fp32"), record("bf16", **change)]).attrs["notes"]
    assert any(word in note for note in notes)
