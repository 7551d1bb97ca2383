"""The capstone: its start file, trials of configs, and the twin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import labutils as lab
from labutils.training import capstone
from tests.helpers import CPU, said_by_cell, slow

SOLUTIONS = sorted((Path(__file__).parent.parent / "solutions").glob("capstone_*.yaml"))
SAVING = {"gradient_checkpointing": "block", "loss_chunk_tokens": 512, "activation": "gelu_tanh"}


def edited(path: Path, changes: dict[str, object]) -> Path:
    text = path.read_text(encoding="utf-8")
    for key, value in changes.items():
        text, n_found = re.subn(rf"(?m)^{key}: \S+", f"{key}: {value}", text)
        assert n_found == 1, key
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def without_twin(monkeypatch):
    """Trials as if every twin had reached the loss of the plain one."""

    class Done:
        held_out, outcome, reason = [(60, 7.0)], "completed", ""

    monkeypatch.setattr(capstone, "run_twin", lambda config, device: ("", Done))


def verdict(trial, capsys) -> str:
    return said_by_cell(capsys, "further/capstone.ipynb", "s3-check", trial=trial).strip()


def test_the_start_file_is_the_task_and_is_nothing_to_try(runs):
    path = capstone.write_start()
    config = lab.load_config(path)
    assert {key: getattr(config, key) for key in capstone.TASK} == capstone.TASK
    assert not config.when_cpu and "[*]" not in path.read_text(encoding="utf-8")
    assert capstone.try_config(path, CPU) is None


def test_a_file_that_a_reader_has_changed_is_kept(runs):
    path = edited(capstone.write_start(), {"micro_batch_size": 1})
    assert capstone.write_start() == path
    assert lab.load_config(path).micro_batch_size == 1


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_a_solution_is_right_as_predicted(path, without_twin, capsys):
    trial = capstone.try_config(path, CPU)
    assert trial.fits and trial.step_ms <= trial.limit_ms and not trial.stalled
    assert verdict(trial, capsys) == "Right."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch_size": 1}, "do not lower this floor"),
        ({"gradient_checkpointing": "block"}, "do not lower this floor"),
        ({"precision": "bf16", "micro_batch_size": 1}, "do not lower this floor"),
        ({"optimizer": "adamw_8bit"}, "backward phase activations take"),
        ({"optimizer": "adamw_8bit", "micro_batch_size": 1, **SAVING}, "second time"),
        (
            {"precision": "pure_bf16", "micro_batch_size": 1, "loss_chunk_tokens": 512},
            "rounds stochastically",
        ),
        ({"seq_len": 512, "micro_batch_size": 1}, "the task itself: seq_len"),
        ({"learning_rate": "1e-3"}, "the task itself: learning_rate"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_classic_wrong_answer_gets_its_misconception(changes, words, runs, without_twin, capsys):
    trial = capstone.try_config(edited(capstone.write_start(), changes), CPU)
    printed = verdict(trial, capsys)
    assert printed.startswith("Not yet: ") and words in printed


def test_kept_bytes_are_those_of_the_ledger():
    """The ledger counts them from the real model and the real optimizer."""
    for changes in ({}, {"optimizer": "adamw_8bit"}, {"precision": "pure_bf16"}):
        config = lab.load_config("fp32", model="gpt2", **changes)
        phases = lab.predict_memory(config, "rtx4060").phases["optimizer"]
        names = ("parameters", "gradients", "optimizer state")
        counted = sum(phases.get(name, 0) for name in names)
        assert capstone.kept_bytes(config) == pytest.approx(counted, rel=0.01)


def test_the_twin_keeps_techniques_and_the_share_of_the_batch():
    keys = {"optimizer": "adamw_8bit", "gradient_checkpointing": "block", "micro_batch_size": 2}
    config = lab.load_config(capstone.START, **capstone.TASK, **keys)
    twin, _ = capstone.twin_of(config, CPU)
    assert (twin.model, twin.tokens_per_step, twin.micro_batch_size) == ("gpt2-nano", 512, 1)
    for key in ("optimizer", "gradient_checkpointing", "learning_rate", "steps"):
        assert getattr(twin, key) == getattr(config, key)


def test_a_precision_that_is_emulated_is_not_what_the_twin_trains(monkeypatch):
    class Slow:
        ok, slow, reason = True, True, "emulated"

    monkeypatch.setattr(capstone.here, "support", lambda *_: Slow)
    twin, note = capstone.twin_of(lab.load_config("bf16"), CPU)
    assert twin.precision == "fp32" and "emulated" in note


def test_nothing_runs_on_a_card_where_there_is_none():
    assert capstone.run_on_card(None, CPU) is None


def test_weights_stall_only_in_16_bits_and_rounded_to_nearest():
    def share(**changes):
        config = lab.load_config("fp32", learning_rate=5e-5, **changes)
        return capstone.stalled_share(config)

    assert share() == 0.0
    assert share(precision="pure_bf16") > 0.2
    assert share(precision="pure_bf16", optimizer="adamw_8bit") == 0.0
    large = lab.load_config("fp32", precision="pure_bf16", learning_rate=0.01)
    assert capstone.stalled_share(large) < share(precision="pure_bf16")


@slow
def test_a_twin_with_16_bit_weights_learns_only_if_rounded_stochastically(runs, capsys):
    if not lab.support("pure_bf16", torch.device("cpu")).ok:
        pytest.skip("no BF16 here")
    start = capstone.write_start()
    keys = {"precision": "pure_bf16", "micro_batch_size": 1, "loss_chunk_tokens": 512}
    stalled = capstone.try_config(edited(start, keys), CPU)
    learns = capstone.try_config(edited(start, {"optimizer": "adamw_8bit"}), CPU)
    assert learns.loss <= learns.target_loss and verdict(learns, capsys) == "Right."
    if not stalled.twin_note:
        assert stalled.loss > stalled.target_loss
