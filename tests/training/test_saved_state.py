"""A run that was stopped and continued ends exactly where an undisturbed one does."""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch

import labutils as lab
from labutils.cli import main
from labutils.techniques.schedule import learning_rate_at
from labutils.training import distributed, planned
from labutils.training import saved_state as resuming
from labutils.training.records import RecordError, load_record, state_files
from tests.helpers import CPU

SMALL = {
    "seq_len": 16,
    "micro_batch_size": 2,
    "tokens_per_step": 64,
    "steps": 8,
    "lr_warmup_steps": 2,
}
SMALL |= {"dropout": 0.1, "eval_every": 3, "save_every": 2, "name": "short"}
TINY = {
    "seq_len": 8,
    "micro_batch_size": 1,
    "tokens_per_step": 16,
}  # 16-bit products are slow on most CPUs
IN_BACKWARD = {
    "optimizer_in_backward": True,
    "max_grad_norm": 0,
    "seq_len": 8,
    "micro_batch_size": 2,
    "tokens_per_step": 16,
}


def start(name="fp32", *, resume=False, **changes):
    config = lab.load_config(name, **(SMALL | changes))
    return lab.run_experiment(config, device=CPU, progress=False, rerun=True, resume=resume)


def stop_at(monkeypatch, step):
    real = learning_rate_at

    def stopping(now, **schedule):
        if now == step:
            raise KeyboardInterrupt
        return real(now, **schedule)

    monkeypatch.setattr(planned, "learning_rate_at", stopping)
    return lambda: monkeypatch.setattr(planned, "learning_rate_at", real)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", **TINY},
        {
            "precision": "fp16",
            "init_scale": 2.0**40,
            "growth_interval": 2,
            **TINY,
        },  # overflows at first, then grows
        {"precision": "pure_bf16", "optimizer": "adamw_bf16", **TINY},
        {"precision": "pure_bf16", "optimizer": "adamw_8bit", **TINY, **IN_BACKWARD},
        {"optimizer_impl": "for_loop", **IN_BACKWARD},
        {"optimizer": "sgd", "optimizer_impl": "foreach"},
        {"gradient_checkpointing": "block", "loss_chunk_tokens": 8},
    ],
    ids=[
        "fp32",
        "bf16",
        "fp16",
        "bf16 moments",
        "8-bit moments",
        "in backward",
        "sgd",
        "recomputed",
    ],
)
def test_a_continued_run_is_bit_identical(runs, monkeypatch, changes):
    whole = start(**changes)
    assert state_files() == [] and not list(runs.glob(".*"))
    go_on = stop_at(monkeypatch, 5)
    part = start(**changes)
    assert part.outcome == "interrupted" and len(part.series.loss) == 5
    assert len(state_files("short")) == 1
    go_on()
    torch.manual_seed(99)  # the new process is anywhere
    continued = start(resume=True, **changes)
    assert continued.environment["resumed"] == "after step 4"
    assert continued.experiment == whole.experiment
    for key in ("loss", "learning_rate", "loss_scale", "skipped"):
        assert getattr(continued.series, key) == getattr(whole.series, key)
    assert str(continued.series.grad_norm) == str(
        whole.series.grad_norm
    )  # NaN where nothing is clipped
    assert continued.held_out == whole.held_out and len(whole.held_out) == 3
    assert len(continued.series.step_ms) == 8
    assert continued.epochs == whole.epochs
    assert state_files() == []
    if changes.get("precision") == "fp16":
        assert any(whole.series.skipped) and len(set(whole.series.loss_scale)) > 2


def train_slowly(folder: str) -> None:
    os.environ["LABUTILS_RUNS"] = folder
    real = learning_rate_at
    planned.learning_rate_at = lambda step, **schedule: (
        time.sleep(0.05),
        real(step, **schedule),
    )[1]
    start()


def test_ctrl_c_while_a_state_is_written_ends_the_run(runs, monkeypatch):
    """torch makes a RuntimeError of what its file object raises."""

    class Interrupted(io.BytesIO):
        written = 0

        def write(self, content):
            self.written += 1
            if self.written == 3:  # later than the header: there torch hides it
                raise KeyboardInterrupt
            return super().write(content)

    real = torch.save
    monkeypatch.setattr(resuming.torch, "save", lambda state, _: real(state, Interrupted()))
    record = start()
    assert (record.outcome, len(record.series.loss)) == ("interrupted", 2)


def test_a_run_with_nan_keeps_its_last_good_state(runs, monkeypatch):
    real = learning_rate_at
    monkeypatch.setattr(
        planned,
        "learning_rate_at",
        lambda step, **schedule: real(step, **schedule) if step < 2 else math.nan,
    )
    assert start().outcome == "non_finite"
    assert resuming.read_header(state_files()[0]).step == 2


def test_too_little_memory_does_not_make_a_state_a_damaged_one(state, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", full)
    record = start(resume=True)
    assert record.outcome == "out_of_memory" and record.reason.startswith("asked for 2.00 GiB more")
    assert state.exists()


def test_a_killed_run_continues(runs):
    whole = start()
    child = multiprocessing.get_context("spawn").Process(target=train_slowly, args=(str(runs),))
    child.start()
    deadline = time.monotonic() + 120
    while not state_files() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.join()
    assert len(state_files()) == 1
    continued = start(resume=True)
    assert continued.environment["resumed"].startswith("after step ")
    assert continued.series.loss == whole.series.loss and continued.held_out == whole.held_out
    assert state_files() == [] and not list(runs.glob(".*"))  # nor what was half written


def test_the_furthest_of_several_states_is_taken(runs, monkeypatch, capsys):
    for step in (7, 3):
        stop_at(monkeypatch, step)
        start()
        monkeypatch.undo()
        monkeypatch.setenv("LABUTILS_RUNS", str(runs))
    printed = capsys.readouterr().out
    assert all(
        f"continue with: python -m labutils run {path.name}\n" in printed for path in state_files()
    )
    assert "state after step 6 is saved" in printed and "state after step 2 is saved" in printed
    assert len(state_files()) == 2
    stop_at(monkeypatch, 7)
    start(resume=True, save_every=1)
    assert sorted(resuming.read_header(path).step for path in state_files()) == [
        2,
        7,
    ]  # 7 in place of 6
    monkeypatch.undo()
    monkeypatch.setenv("LABUTILS_RUNS", str(runs))
    assert start(resume=True).environment["resumed"] == "after step 7"
    assert state_files() == []  # the experiment is complete


def test_an_unfinished_run_is_listed_with_the_command_that_continues_it(
    state, capsys, monkeypatch, tmp_path
):
    assert main(["runs"]) == 0
    *_, about, line = capsys.readouterr().out.splitlines()
    assert about == "unfinished, or still running: 4 of 8 steps; continue with:"
    monkeypatch.chdir(tmp_path)  # from any folder
    assert main(line.partition("labutils ")[2].split()) == 0
    assert load_record("short").environment["resumed"] == "after step 4"
    assert state_files() == []


@pytest.mark.parametrize("more", [["--set", "steps=9"], ["--repeat", "2"], ["--rerun"]])
def test_a_state_is_continued_as_it_is(state, capsys, more):
    assert main(["run", state.name, *more]) == 2
    assert "a state continues its own run" in capsys.readouterr().err
    assert state.exists()


def test_a_state_that_is_not_there_or_renamed_is_named(state, capsys):
    assert main(["run", "other.state"]) == 1
    told = f"no state {state.parent / 'other.state'}; `python -m labutils runs`"
    assert told in capsys.readouterr().err
    renamed = state.rename(state.with_name(state.name.replace("short-", "long-")))
    assert main(["run", renamed.name]) == main(["runs"]) == 1
    assert capsys.readouterr().err.count("renamed: it is another run's") == 2


def test_a_damaged_state_does_not_hide_a_whole_one(state, capsys):
    later = state.with_name(state.name[:-9] + "zzzz.state")
    later.write_bytes(state.read_bytes()[:-100])
    (state.parent / "a folder.state").mkdir()
    assert start(resume=True).environment["resumed"] == "after step 4"
    assert f"{later.name} is damaged" in capsys.readouterr().out


def test_nothing_to_continue_begins(runs):
    record = start(resume=True)
    assert record.outcome == "completed" and "resumed" not in record.environment


@pytest.fixture
def state(runs, monkeypatch):
    go_on = stop_at(monkeypatch, 5)
    start()
    go_on()
    return state_files()[0]


def test_a_state_of_another_experiment_is_refused(state):
    with pytest.raises(
        RecordError, match=r"is of another experiment: learning_rate was 0.002, now 0.0001\. Put"
    ):
        start(resume=True, learning_rate=1e-4)
    assert state.exists()
    assert (
        start(resume=True, save_every=0).environment["resumed"] == "after step 4"
    )  # which changes no result


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def rewrite(path: Path, content: dict, header: resuming.Header) -> None:
    with path.open("w+b") as file:
        torch.save(content, file)
        with ZipFile(file, "a") as archive:
            archive.writestr(resuming.HEADER, header.model_dump_json())


DAMAGE = {
    "empty": "BadZipFile",
    "cut": "BadZipFile",
    "text": "BadZipFile",
    "pickle": "BadZipFile",
    "no header": "KeyError",
    "torch pickle": "UnpicklingError: Weights only load failed",
    "version": "ValidationError",
    "a flipped byte": "ValueError: wrong checksum",
    "parts": r"RuntimeError: Error\(s\) in loading",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_or_foreign_state_is_refused_and_runs_no_code(state, tmp_path, how):
    good, marker = state.read_bytes(), tmp_path / "executed"
    content, header = torch.load(state, weights_only=True), resuming.read_header(state)
    middle = len(good) // 2
    if how == "pickle":
        state.write_bytes(pickle.dumps(Payload(marker), protocol=2))
    elif how == "no header":
        torch.save(content, state)
    elif how == "torch pickle":
        rewrite(state, content | {"random": Payload(marker)}, header)
    elif how == "version":
        rewrite(state, content, header.model_copy(update={"version": 1}))
    elif how == "parts":
        rewrite(state, content | {"parts": content["parts"] | {"model": {}}}, header)
    else:
        flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
        state.write_bytes(
            {"empty": b"", "cut": good[:middle], "text": b'{"step": 3}'}.get(how, flipped)
        )
    with pytest.raises(
        RecordError,
        match=rf"^{state.name} is damaged, or no saved state \({DAMAGE[how]}.*; delete it",
    ):
        start(resume=True)
    assert not marker.exists()


def test_a_state_whose_config_is_none_is_refused(state):
    header = resuming.read_header(state)
    empty = header.planned.model_copy(update={"config": header.planned.config | {"steps": 0}})
    path = state.with_name(f"short-{empty.experiment}-0-1.state")
    rewrite(path, {}, header.model_copy(update={"planned": empty}))
    with pytest.raises(
        RecordError, match="cannot be continued: short: `steps`: Input should be greater than"
    ):
        resuming.read_header(path)


def test_a_full_disk_keeps_the_older_state_and_the_run(runs, monkeypatch, capsys):
    resource = pytest.importorskip("resource")  # not on Windows
    limits, real = resource.getrlimit(resource.RLIMIT_FSIZE), learning_rate_at
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(step, **schedule):
        if step == 7:
            raise KeyboardInterrupt
        full = 2 < step < 7
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if full else limits[0], limits[1]))
        return real(step, **schedule)

    monkeypatch.setattr(planned, "learning_rate_at", fill)
    try:
        record = start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert len(record.series.loss) == 7
    out = capsys.readouterr().out
    assert "state of step 4 NOT SAVED" in out and "the run goes on" in out
    assert not list(runs.glob(".*"))
    monkeypatch.setattr(planned, "learning_rate_at", real)
    assert start(resume=True).environment["resumed"] == "after step 2"


def test_too_small_a_disk_is_noticed_before_training(runs, monkeypatch):
    runs.mkdir()
    monkeypatch.setattr(resuming.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(OSError, match=r"save_every: 2 needs 0\.0 GiB .* Make room"):
        start()
    assert list(runs.glob("*.json")) == []
    assert start(save_every=0).outcome == "completed"


def test_several_processes_save_no_state(runs, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(
        lab.ConfigError, match="`save_every`: states are saved in a single process only"
    ):
        start()
