"""From a config to a record: every key reaches the run, every end keeps what there is."""

import json
import math
import shutil
import subprocess
import sys
import weakref
from unittest.mock import Mock

import pytest
import torch

import labutils as lab
from labutils import machine
from labutils.config.card import PrecisionUnsupported
from labutils.config.schema import fewer_steps
from labutils.files import PACKAGE_DIR, code_version, new_id, write_atomically
from labutils.memory.ledger import MemoryLedger
from labutils.training import run as module
from labutils.training.record import RecordError, RunRecord, Timing, load_record, readable
from labutils.training.train import Series
from labutils.workload import build as workload_build
from labutils.workload import data
from labutils.workload.build import build_data, build_experiment_model
from tests.helpers import CPU, REPO, slow, without_onednn

TINY = {"name": "tiny", "steps": 3, "lr_warmup_steps": 1}
TINY |= {"seq_len": 16, "micro_batch_size": 2, "tokens_per_step": 64}


def tiny(name="fp32", **changes):
    return lab.load_config(name, **(TINY | changes))


def run(name="fp32", rerun=True, **changes):
    return lab.run_experiment(tiny(name, **changes), device=CPU, progress=False, rerun=rerun)


@pytest.fixture(autouse=True)
def own_folder(runs):
    """Every test begins without records."""


# ---- What is run


def test_values_of_the_config_reach_training_and_measurement():
    """The measured step has the bytes that are predicted for these values, and for no others."""
    values = {"init_scale": 512.0, "growth_interval": 2, "eval_every": 2, "dropout": 0.25}
    values |= {"loss_chunk_tokens": 10, "gradient_checkpointing": "block"}
    values |= {"seq_len": 128, "tokens_per_step": 512}
    with without_onednn():
        record = run("fp16", **values)
    assert record.series.loss_scale == [512.0, 512.0, 1024.0]
    assert [step for step, _ in record.series.held_out] == [2, 3]
    predicted = lab.predict_memory(tiny("fp16", **values), "cpu")
    assert record.memory.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.005)


def test_held_out_text_does_not_depend_on_the_batch():
    held_out = []
    for size in (2, 4):
        text = build_data(tiny(micro_batch_size=size).on("cpu"))
        held_out.append(torch.cat([batch["input_ids"] for batch in text.held_out]).tolist())
    assert held_out[0] == held_out[1]


def test_slow_precision_runs_fewer_steps_and_the_record_says_so(monkeypatch):
    monkeypatch.setattr(machine, "cpu_slowdown", lambda dtype: 100.0)
    record = run("bf16", steps=9)
    assert (record.steps_planned, len(record.series.loss), record.config["steps"]) == (8, 8, 9)
    assert [fewer_steps(n) for n in (4, 60, 800)] == [4, 8, 100]  # never more
    monkeypatch.setattr(machine, "cpu_slowdown", lambda dtype: 1.0)
    assert len(run("bf16", steps=9, rerun=False).series.loss) == 9


# ---- What is kept of it


def test_a_run_saves_what_it_was_and_what_it_gave(runs):
    record = run(steps=6)
    assert load_record(runs / f"tiny-{record.id}.json") == record
    series, timing = record.series, record.timing
    assert len(series.grad_norm) == 6 and series.held_out[-1][0] == 6 and 0 < record.epochs < 1
    assert record.config["model"] == "gpt2-nano" and record.memory.peak_bytes > 16e6
    assert {"device", "torch", "transformers", "python", "commit"} <= record.environment.keys()
    timed = sorted(series.step_ms[2:])  # the first two are left out
    assert timing.median_step_ms == pytest.approx((timed[1] + timed[2]) / 2)
    assert timing.tokens_per_s == pytest.approx(64 / timing.median_step_ms * 1000)
    rate, timing_from = module.peak_rate("fp32", CPU)
    per_token = module.flops_per_token(lab.build_model("gpt2-nano"), 16)
    assert timing.mfu == pytest.approx(per_token * timing.tokens_per_s / rate)
    assert timing.mfu_denominator == timing_from


def test_an_equal_run_is_reused_and_says_so_and_rerun_forces(monkeypatch, capsys):
    first = run()
    assert capsys.readouterr().out == ""  # without progress
    (lab.runs_dir() / "other-1-2-3.json").write_text("no record of another name is read")
    assert lab.run_experiment(tiny(), device=CPU).id == first.id
    assert f"tiny: reusing run {first.id} (equal config, code" in capsys.readouterr().out
    again = lab.run_experiment(tiny(), device=CPU, rerun=True)
    assert again.id != first.id and again.series.loss == first.series.loss
    printed = capsys.readouterr().out
    assert "tiny: override: " in printed and f"tiny: saved tiny-{again.id}.json" in printed
    monkeypatch.setattr(module, "code_version", lambda: "another")
    assert run(rerun=False).id not in (first.id, again.id)


def test_a_changed_exercise_leaves_records_as_they_are_and_a_changed_kit_does_not(tmp_path):
    package, versions = shutil.copytree(PACKAGE_DIR, tmp_path / "labutils"), []
    for file in ("course/cli.py", "course/exercises/loops.py", "prediction/time.py", "machine.py"):
        (package / file).write_text("another = 1")
        versions.append(code_version.__wrapped__(package))
    assert len(set(versions[:3])) == 1 and versions[3] != versions[0] == code_version()


@pytest.mark.parametrize("change", [{"seed": 1}, {"steps": 4}, {"weight_decay": 0.0}], ids=str)
def test_a_different_run_is_not_reused_and_gives_other_losses(change):
    first, other = run(), run(rerun=False, **change)
    assert first.id != other.id and first.series.loss != other.series.loss


def test_a_precision_that_the_device_lacks_is_a_row_with_its_reason():
    table = lab.compare(lab.run_experiments([tiny(), "tf32"], progress=False))
    assert table.loc["tiny", "outcome"] == "completed"
    outcome = table.loc["tf32", "outcome"]
    assert outcome.startswith("unsupported: TF32") and "use fp32" in outcome
    assert readable(table).loc["tf32", "step_ms"] == "–"
    with pytest.raises(PrecisionUnsupported, match="tf32 cannot run here"):
        lab.run_experiment("tf32", device=CPU)


# ---- How it can end


ENDS = {
    "out_of_memory": (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory."),
    "interrupted": (KeyboardInterrupt(), "stopped (Ctrl-C or SIGTERM)"),
    "non_finite": (FloatingPointError("the loss"), "the loss"),
}


@pytest.mark.parametrize("place", ["while training", "while measuring"])
@pytest.mark.parametrize("outcome", ENDS)
def test_what_ends_a_run_keeps_its_record(outcome, place, monkeypatch):
    error, reason = ENDS[outcome]
    real, n_done = data.batches, 3 if place == "while measuring" else 2

    def few(*args):
        for i, batch in enumerate(real(*args)):
            if i == 2 * n_done:
                raise error
            yield batch

    monkeypatch.setattr(data, "batches", few)
    record = run()
    assert (record.outcome, len(record.series.loss), record.memory) == (outcome, n_done, None)
    assert record.reason.startswith(f"after {n_done} of 3 steps: {reason}")
    assert record.timing and load_record(record.id) == record


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (KeyboardInterrupt(), "interrupted: after 3 of 3 steps: stopped"),  # Run All ends, too
        (RuntimeError("a bug"), "failed: after 3 of 3 steps: RuntimeError: a bug"),
    ],
    ids=str,
)
def test_what_stops_a_notebook_is_raised_when_the_record_is_saved(monkeypatch, error, ending):
    with monkeypatch.context() as patch, pytest.raises(type(error), match=r"stopped|a bug"):
        patch.setattr(module, "measure_step", Mock(side_effect=error))
        patch.setattr(module, "in_notebook", lambda: True)
        run()
    left = load_record("tiny")
    assert left.ending.startswith(ending) and len(left.series.loss) == 3
    assert run(rerun=False).outcome == "completed"


# Whatever registers hooks, keeps tensors aside or replaces parts of the model.
# One micro-batch and no clipping: a step in backward allows it.
ALONE = {"tokens_per_step": 32, "max_grad_norm": 0.0}
LEAN = {"gradient_checkpointing": "block", "loss_chunk_tokens": 8, "optimizer_in_backward": True}
SWITCHES = [
    {"precision": "fp16", "eval_every": 1, "max_grad_norm": 1.0},
    {"optimizer": "adamw_8bit", **LEAN},
    {"gradient_checkpointing": "offload"},
    pytest.param({"compile": "default"}, marks=slow),
]


@pytest.mark.parametrize("changes", SWITCHES, ids=str)
def test_nothing_of_the_model_outlives_its_run(changes, monkeypatch):
    references = []

    def build(*args):
        model = build_experiment_model(*args)
        references.extend(weakref.ref(p) for p in model.parameters())
        return model

    monkeypatch.setattr(workload_build, "build_experiment_model", build)
    run(**(ALONE | changes))
    lab.free_memory()
    assert len(references) > 20
    assert not [reference for reference in references if reference() is not None]


# ---- Files


def record(name="fp32", ms=10.0, **changes):
    run_id, created = new_id()
    values = {"id": run_id, "created": created, "name": name, "corpus": "c", "tokens_per_step": 10}
    values |= {"environment": {"device": "a"}, "config": {"precision": name, "steps": 2}}
    values["series"] = Series(loss=[3.0, 2.0], step_ms=[ms, ms])
    timing = {"mfu": 0.5, "mfu_denominator": "", "tokens_per_s": 1e4 / ms}
    return RunRecord(timing=Timing(median_step_ms=ms, **timing), **(values | changes))


def test_a_record_survives_its_file_with_inf_and_nan():
    path = record(series=Series(loss=[math.nan, math.inf], grad_norm=[-math.inf, 0.0])).save()
    loaded = load_record(path).series
    assert math.isnan(loaded.loss[0]) and loaded.loss[1] == -loaded.grad_norm[0] == math.inf
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path):
    target = tmp_path / "x.json"
    write_atomically(target, b"old")
    code = "import os, labutils.files as files, pathlib\n"
    code += "pathlib.Path.replace = lambda *paths: os._exit(9)\n"
    code += f"files.write_atomically(pathlib.Path({str(target)!r}), b'new' * 1000)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 9
    assert target.read_bytes() == b"old"


def test_a_run_that_is_not_over_hides_none_that_is(monkeypatch):
    whole, seen, train = run(), [], module.train

    def looks(*args, **options):
        seen.extend([lab.find_runs()[0][-1], load_record("tiny")])
        return train(*args, **options)

    monkeypatch.setattr(module, "train", looks)
    after = run()
    planned, by_name = seen
    assert (planned.id, planned.reason) == (after.id, "killed, or still running")
    assert by_name == whole
    planned.save()
    assert load_record("tiny") == whole and load_record(planned.id) == planned


@pytest.mark.parametrize("content", [b"", b'{"version": 1}', b"\x00\xff"])
def test_damaged_record_is_a_clear_error_and_hides_no_other(runs, content):
    good, newer = record(), record(id="29990101-000000-0000")
    good.save(), newer.save()
    bad = runs / "bad-20260101-000000-abcd.json"
    bad.write_bytes(content)
    with pytest.raises(RecordError, match="is no record of a run"):
        load_record(bad)
    records, (damaged,) = lab.find_runs()
    assert records == [good, newer] and "bad-2026" in damaged
    assert (load_record("fp32"), load_record(good.id)) == (newer, good)
    with pytest.raises(RecordError, match=r"no run 'fp3' in .* Did you mean `fp32`"):
        load_record("fp3")


# ---- Side by side


def test_the_first_record_is_the_baseline():
    memory = [MemoryLedger(method="", phases={"loss": {"": mib * 2**20}}) for mib in (8, 2)]
    first, second = record("fp32", 10.0, memory=memory[0]), record("bf16", 5.0, memory=memory[1])
    table = lab.compare([first, second, record("slow", 30.0)])
    assert table.tokens_per_s.tolist() == pytest.approx([1e3, 2e3, 1e3 / 3])
    assert table.peak_mib.tolist()[:2] == [8.0, 2.0] and math.isnan(table.peak_mib["slow"])
    assert table.saving_percent.tolist()[:2] == [0.0, 75.0]
    assert table.speedup.tolist() == pytest.approx([1.0, 2.0, 1 / 3])
    assert table.precision.tolist() == ["fp32", "bf16", "slow"]
    assert table.attrs["notes"] == []
    assert readable(table).loc["slow", "speedup"] == "0.333"
    names = lab.compare([record(id="a"), record(id="b"), record("bf16")]).index
    assert names.tolist() == ["fp32-a", "fp32-b", "bf16"]


def test_losses_are_compared_at_equal_tokens():
    short = record("bf16", series=Series(loss=[4.0], step_ms=[1.0]))
    table = lab.compare([record("fp32"), short, record("large", tokens_per_step=20)])
    assert table.loss.tolist()[:2] == [3.0, 4.0] and math.isnan(table.loss["large"])
    assert table.steps.tolist() == [2, 1, 2]
    assert "after 10 tokens" in table.attrs["notes"][-1]


UNEQUAL = {
    "corpus: c, d": {"corpus": "d"},
    "device: a, b": {"environment": {"device": "b"}},
    "code version": {"code": "x"},
    "tokens per step: 10, 20": {"tokens_per_step": 20},
}


@pytest.mark.parametrize("words", UNEQUAL)
def test_unequal_runs_are_pointed_out(words):
    notes = lab.compare([record("fp32"), record("bf16", **UNEQUAL[words])]).attrs["notes"]
    assert f"Unequal {words}" in notes[0]
