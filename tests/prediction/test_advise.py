from __future__ import annotations

import pytest

import labutils as lab
from labutils import machine
from labutils.cli import main
from labutils.prediction.search import advise
from tests.helpers import REPO, slow

NAMES = sorted(
    path.name.removesuffix("_config.yaml") for path in REPO.glob("configs/*_config.yaml")
)


@pytest.mark.parametrize(
    "name", [n if n == "optimized" else pytest.param(n, marks=slow) for n in NAMES]
)
def test_the_first_suggestion_lowers_the_ledger_in_every_shipped_config(name):
    device = "rtx4060" if name == "xl" else "cpu"  # on a CPU nothing is left that would help xl
    found = advise(lab.load_config(name), device)
    first = found.helpful[0]
    config = found.config.model_copy(update=first.changes)
    again = lab.predict_memory(config, device)
    assert again.peak_bytes == found.peak_bytes - first.saved_bytes < found.peak_bytes
    assert found.best_three_peak_bytes <= again.peak_bytes
    assert not {one.name for one in found.helpful} & {one.name for one in found.useless}


@slow
@pytest.mark.parametrize("name", NAMES)
def test_on_a_card_too(name):
    assert advise(lab.load_config(name), "a100").helpful[0].saved_bytes > 0


def test_what_does_nothing_here_is_said_and_so_is_what_cannot_be():
    """With one short sequence the peak is what stands; what accumulates cannot update within
    backward.
    """
    small = {"seq_len": 32, "micro_batch_size": 1, "tokens_per_step": 64, "activation": "gelu_tanh"}
    found = advise(lab.load_config("fp32", **small), "cpu")
    assert found.helpful[0].changes == {"optimizer": "adamw_8bit"}
    assert {"gradient_checkpointing": "block"} in [one.changes for one in found.useless]
    assert any("optimizer_in_backward" in name for name in found.impossible)
    assert {next(iter(one.changes)) for one in [*found.helpful, *found.useless]} >= {
        *("gradient_checkpointing", "loss_chunk_tokens", "optimizer"),
    }
    text = str(found)
    assert (
        "1. optimizer: adamw_8bit" in text
        and "would do nothing here: " in text
        and "not possible here: " in text
    )


def test_a_record_can_be_advised_from_the_command_line(runs, capsys):
    small = [
        "--set=activation=gelu_tanh",
        "--set=seq_len=32",
        "--set=micro_batch_size=2",
        "--set=tokens_per_step=64",
        "--set=steps=9",
    ]
    assert main(["run", "fp32", *small, "--set=name=mine"]) == 0
    capsys.readouterr()
    assert main(["predict", "mine", "--advise", "--device", "cpu"]) == 0
    from_record = capsys.readouterr().out
    assert from_record.startswith("mine: predicted peak") and "measured" in from_record
    assert main(["predict", "fp32", "--advise", "--device", "t4", "--set=precision=tf32"]) == 1
    assert "use fp16" in capsys.readouterr().err


def test_several_together_save_more_than_each_and_leave_out_what_excludes_another():
    shape = {"seq_len": 128, "micro_batch_size": 4, "tokens_per_step": 512, "precision": "fp32"}
    found = advise(
        lab.load_config("fp32", **shape, dropout=0.0, activation="gelu_tanh", max_grad_norm=0.0),
        "cpu",
    )
    by_key = {next(iter(one.changes)): one for one in found.helpful}
    assert {"gradient_checkpointing", "micro_batch_size", "loss_chunk_tokens"} <= set(by_key)
    assert "forward pass twice" in by_key["gradient_checkpointing"].cost
    assert by_key["gradient_checkpointing"].time_cost > 0.1
    assert found.best_three_peak_bytes < found.peak_bytes - found.helpful[0].saved_bytes


def test_a_precision_that_is_slow_here_is_not_advised(monkeypatch):
    monkeypatch.setattr(machine, "cpu_slowdown", lambda dtype: 99.0)
    small = {"seq_len": 32, "micro_batch_size": 1, "tokens_per_step": 32, "activation": "gelu_tanh"}
    found = advise(lab.load_config("fp32", **small, optimizer="sgd"), "cpu")
    assert not any(
        "adamw_8bit" in one.name for one in [*found.helpful, *found.useless]
    )  # another algorithm
    assert list(found.impossible) == ["precision: bf16"]
    assert "takes about 100 times as long" in found.impossible["precision: bf16"]
