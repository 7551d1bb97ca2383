"""A run that was stopped and continued ends exactly where an undisturbed one does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import labutils as lab
from labutils.cli import main
from labutils.techniques.schedule import learning_rate_at
from labutils.training import runs as module
from labutils.training.resume import StateError
from tests.helpers import CPU

SMALL = {"seq_len": 16, "micro_batch_size": 2, "tokens_per_step": 64, "steps": 8}
SMALL |= {"dropout": 0.1, "lr_warmup_steps": 2, "eval_every": 3, "save_every": 2, "name": "short"}
TINY = {"seq_len": 8, "micro_batch_size": 1, "tokens_per_step": 16}  # 16 bits are slow on most CPUs
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0, "tokens_per_step": 32}
# overflows at first, then grows
SCALED = {"precision": "fp16", "init_scale": 2.0**40, "growth_interval": 2, **TINY}


def start(*, resume=False, when_cpu=(), **changes):
    config = lab.load_config("fp32", **(SMALL | changes))
    config = config.model_copy(update={"when_cpu": config.when_cpu | dict(when_cpu)})
    return lab.run_experiment(config, device=CPU, progress=False, rerun=True, resume=resume)


def stopped(step, **changes):
    """Return the record of a run that was stopped before a step."""

    def stopping(now, **schedule):
        if now == step:
            raise KeyboardInterrupt
        return learning_rate_at(now, **schedule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "learning_rate_at", stopping)
        return start(**changes)


@pytest.fixture
def state(runs) -> Path:
    """The file of a run that was stopped after step 5; its last state is that of step 4."""
    stopped(5)
    return runs / "short.state"


@pytest.mark.parametrize(
    "changes",
    [{}, SCALED, {"optimizer": "adamw_8bit", **IN_BACKWARD}, {"gradient_checkpointing": "block"}],
    ids=["fp32", "fp16", "8-bit moments in backward", "recomputed"],
)
def test_a_continued_run_is_bit_identical(runs, changes):
    whole, part = start(**changes), stopped(5, **changes)
    assert part.outcome == "interrupted" and len(part.series.loss) == 5
    torch.manual_seed(99)  # the new process is anywhere
    continued = start(resume=True, **changes)
    assert continued.environment["resumed"] == "after step 4"
    assert continued.identity == whole.identity and continued.epochs == whole.epochs
    series = [record.series.model_dump(exclude={"step_ms"}) for record in (continued, whole)]
    assert str(series[0]) == str(series[1])  # grad_norm is NaN without clipping
    assert len(continued.series.step_ms) == 8 and len(whole.series.held_out) == 3
    assert not list(runs.glob("*.state"))
    if changes == SCALED:
        assert any(whole.series.skipped) and len(set(whole.series.loss_scale)) > 2


def test_a_run_with_nan_keeps_its_last_good_state(runs, monkeypatch):
    def rate(step, **schedule):
        return learning_rate_at(step, **schedule) if step < 2 else math.nan

    monkeypatch.setattr(module, "learning_rate_at", rate)
    assert start().outcome == "non_finite"
    assert torch.load(runs / "short.state", weights_only=True)["done"] == 2


def test_a_state_of_another_experiment_or_code_version_is_refused(state, monkeypatch, capsys):
    assert main(["runs"]) == 0
    assert "unfinished, or still running: short" in capsys.readouterr().out
    what = r"is of another experiment: learning_rate was 0.002, now 0.0001\. Put"
    with pytest.raises(StateError, match=what):
        start(resume=True, learning_rate=1e-4)
    monkeypatch.setattr(module, "code_version", lambda: "other")
    with pytest.raises(StateError, match=r"code was .*, now other"):
        start(resume=True, save_every=0)  # which alone would change no result


def test_a_value_under_when_cpu_decides_when_a_state_is_saved(runs):
    stopped(3, save_every=0, when_cpu={"save_every": 2})
    assert torch.load(runs / "short.state", weights_only=True)["done"] == 2


def test_a_damaged_state_is_refused_and_runs_no_code(runs):
    """What is no tensor and no number stands for code."""
    runs.mkdir()
    torch.save({"done": print}, runs / "short.state")
    with pytest.raises(StateError, match=r"short\.state cannot be read; delete it"):
        start(resume=True)


def test_a_full_disk_keeps_the_older_state_and_the_run(runs, monkeypatch, capsys):
    save = torch.save

    def full(state, file):
        if state["done"] > 2:
            raise RuntimeError("No space left on device")
        save(state, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert len(stopped(7).series.loss) == 7
    assert "short.state: step 4 NOT SAVED, the run goes on: No space" in capsys.readouterr().out
    assert start(resume=True).environment["resumed"] == "after step 2"
