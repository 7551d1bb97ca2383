"""What benchmarks/ makes: arms that train the same, a comparison in turns, a slim history."""

import json
import pickle
from itertools import islice

import pytest

import labutils as lab
from benchmarks import arms, bench, snapshot_record
from labutils.files import REFERENCE_DIR
from tests.helpers import CPU, TINY, slow

SHIPPED = "snapshot-gpt2-nano-without-a-card.pickle"


def stream(config):
    """A micro-batch for each step, then the end."""
    blocks = lab.sequences(config.seq_len)
    return islice(lab.batches(blocks, config.micro_batch_size, 0), config.steps)


def test_arms_train_alike():
    changes = {"precision": "fp32", "lr_schedule": "constant"}
    changes["weight_decay"] = 0.01  # torch's default, as the other arms have it
    config = lab.load_config("optimized", **TINY, **changes).on("cpu")
    expected, _ = arms.ours(config, stream(config), CPU)
    untrained, _ = arms.ours(config.changed(learning_rate=1e-12), stream(config), CPU)
    assert len(expected) == config.steps and expected[-1] < untrained[-1]
    losses, _ = arms.plain(config, stream(config), CPU)
    assert losses == pytest.approx(expected, rel=2e-6)  # the same function and gradients
    for arm in (arms.tutorial, arms.corrected):  # Hugging Face's defaults drop out a tenth
        losses, _ = arm(config, stream(config), CPU)
        assert losses[0] == pytest.approx(expected[0], abs=0.05)


@slow
def test_two_arms_are_compared_in_turns(runs, capsys):
    small = ["seq_len=32", "micro_batch_size=2", "compile=off"]
    few = ["--warmup", "2", "--blocks", "2", "--steps", "4"]
    assert bench.main(["--arms", "plain", "--set", *small, *few]) == 0
    printed = capsys.readouterr().out
    assert "ours, compile off" in printed and "MFU is of" in printed
    (path,) = runs.glob("bench-arms-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["plain", "ours"]
    for row in rows:
        assert len(row["tokens_per_s"]) == 2 and min(row["tokens_per_s"]) > 0
        assert len(row["losses"]) == 2 + 2 * 4 + bench.PEAK_STEPS


def test_to_slim_a_history_takes_the_machines_paths_and_nothing_else():
    shipped = pickle.loads((REFERENCE_DIR / SHIPPED).read_bytes())
    del shipped["facts"]
    text = json.dumps(shipped)
    recorded = text.replace('"filename": "', '"filename": "/me/site-packages/')
    assert json.dumps(snapshot_record.slim(json.loads(recorded))) == text
