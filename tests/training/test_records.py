from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

import labutils as lab
from labutils.files import new_id, write_atomically
from labutils.training import experiment
from labutils.training.experiments import run_experiments
from labutils.training.records import RecordError, RunRecord, Series, Timing, load_record
from labutils.workload import data
from tests.helpers import REPO

TINY = {
    "name": "fp32",
    "steps": 3,
    "seq_len": 16,
    "micro_batch_size": 2,
    "tokens_per_step": 32,
    "lr_warmup_steps": 1,
}


def record(name="fp32", ms=10.0, spread=0.01, **changes):
    run_id, created = new_id()
    values = {
        "id": run_id,
        "created": created,
        "name": name,
        "config": {"precision": name},
        "environment": {"device": "a", "torch": "1"},
        "corpus": "c",
        "tokens_per_step": 10,
        "series": Series(loss=[3.0, 2.0], step_ms=[ms, ms]),
        "timing": Timing(median_step_ms=ms, spread=spread, tokens_per_s=1e4 / ms),
    }
    return RunRecord(**(values | changes))


def tiny_run(**options):
    config = lab.load_config("fp32", **TINY)
    return lab.run_experiment(config, device=torch.device("cpu"), progress=False, **options)


def test_record_survives_the_file_with_inf_and_nan(runs):
    saved = record(series=Series(loss=[math.nan, math.inf, 1.0], grad_norm=[-math.inf, 0.0, 1.0]))
    path = saved.save()
    loaded = load_record(path)
    assert math.isnan(loaded.series.loss[0])
    assert loaded.series.loss[1:] == [math.inf, 1.0]
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_run_saves_what_it_was_and_what_it_gave(runs):
    run = tiny_run()
    loaded = load_record(runs / f"fp32-{run.id}.json")
    assert loaded == run
    assert loaded.config["steps"] == 3
    assert loaded.config["model"] == "gpt2-nano"
    assert (
        len(loaded.series.loss) == len(loaded.series.grad_norm) == len(loaded.series.step_ms) == 3
    )
    assert loaded.held_out[-1][0] == 3
    assert loaded.memory.peak_bytes > 16e6
    assert loaded.timing.mfu > 0 and loaded.timing.mfu_denominator
    assert 0 < loaded.epochs < 1
    assert {"device", "torch", "transformers", "python", "commit"} <= set(loaded.environment)


def test_equal_run_is_reused_and_rerun_forces(runs, capsys):
    config = lab.load_config("fp32", **TINY)
    first = lab.run_experiment(config)
    assert lab.run_experiment(config).id == first.id
    assert "reusing" in capsys.readouterr().out
    again = lab.run_experiment(config, rerun=True)
    assert again.id != first.id
    assert again.series.loss == first.series.loss
    assert len(list(runs.glob("fp32-*.json"))) == 2


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": 1e-5}, {"seed": 1}, {"steps": 4}, {"dropout": 0.0}, {"weight_decay": 0.0}],
)
def test_different_run_is_not_reused(runs, change):
    first = tiny_run()
    second = lab.run_experiment(lab.load_config("fp32", **(TINY | change)), progress=False)
    assert second.id != first.id


def test_repeat_is_a_run_of_its_own(runs):
    assert tiny_run().id != tiny_run(repeat=1).id


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


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 2}', b"\x00\xff", b'{"version": 1, "id": 5}']
)
def test_damaged_record_is_a_clear_error_and_hides_no_other(runs, content):
    good = record()
    good.save()
    bad = runs / "bad-20260101-000000-abcd.json"
    bad.write_bytes(content)
    with pytest.raises(RecordError, match="is not a version 1 record"):
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


# ---- comparing


def test_speedup_and_verdict():
    table = lab.compare([record("fp32", 10.0), record("bf16", 5.0), record("slow", 30.0)])
    assert table.loc["bf16", "speedup"] == pytest.approx(2.0)
    assert table.loc["bf16", "verdict"] == "2.00 times as fast"
    assert table.loc["slow", "verdict"] == "takes 3 times as long"
    assert table.loc["bf16", "precision"] == "bf16"


def test_difference_within_the_baselines_spread_is_no_difference():
    repeats = [record("fp32", 10.0), record("fp32", 11.0)]
    table = lab.compare([*repeats, record("bf16", 10.2), record("fp16", 9.0)])
    assert table.loc["bf16", "verdict"] == "time: no measurable difference"
    assert "times as fast" in table.loc["fp16", "verdict"]
    assert "within 10.0 %" in table.loc["fp32", "verdict"]


def test_losses_are_compared_at_equal_tokens():
    short = record("bf16", series=Series(loss=[4.0], step_ms=[1.0]))
    table = lab.compare([record("fp32"), short])
    assert (table.loc["fp32", "loss"], table.loc["bf16", "loss"]) == (3.0, 4.0)
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
    assert lab.compare([record("fp32"), record("bf16")]).attrs["notes"] == []
    notes = lab.compare([record("fp32"), record("bf16", **change)]).attrs["notes"]
    assert any(word in note for note in notes)


def test_unsupported_row_stays_in_the_table_with_its_reason(monkeypatch):
    rows = run_experiments(["tf32"], baseline_repeats=1, progress=False)
    table = lab.compare([record("fp32"), *rows])
    assert table.loc["tf32", "verdict"].startswith("not on this device: TF32")
    assert lab.readable(table).loc["tf32", "step_ms"] == "–"


def test_no_record_is_overwritten(runs):
    saved = record()
    saved.save()
    with pytest.raises(FileExistsError):
        saved.save()


def test_missing_baseline_is_an_error():
    with pytest.raises(RecordError, match="no run is named 'fp32'"):
        lab.compare([record("bf16")])


def test_reference_records_are_readable():
    for path in (REPO / "labutils" / "reference").glob("*.json"):
        assert lab.load_record(path).environment["device"]


def test_out_of_memory_is_an_outcome_not_a_crash(runs, monkeypatch):
    def fail(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(experiment, "train", fail)
    run = tiny_run()
    assert run.outcome == "out_of_memory"
    assert run.reason.startswith("asked for 20.00 GiB more. Alone fp32 needs ")
    assert load_record(run.id).outcome == "out_of_memory"


def test_ctrl_c_saves_a_partial_record(runs, monkeypatch):
    real = data.batches

    def few(blocks, micro_batch_size, seed):
        for i, batch in enumerate(real(blocks, micro_batch_size, seed)):
            if i == 2 and seed == 7:  # the training batches; the held-out ones have another seed
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(data, "batches", few)
    run = lab.run_experiment(lab.load_config("fp32", **TINY, seed=7), progress=False)
    assert (run.outcome, len(run.series.loss), run.memory) == ("interrupted", 2, None)
    assert load_record(run.id).series.loss == run.series.loss


def test_ctrl_c_in_a_notebook_saves_the_record_and_stops_run_all(runs, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "measure_step", interrupt)
    monkeypatch.setattr(experiment, "in_notebook", lambda: True)
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        tiny_run()
    (saved,), _ = lab.find_runs()
    assert saved.outcome == "interrupted" and len(saved.series.loss) == 3
