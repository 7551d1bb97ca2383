"""From a config to what is trained: what the device cannot run is refused before it is built."""

from __future__ import annotations

import pytest

import labutils as lab
from tests.helpers import CPU

SMALL = {"seq_len": 32, "micro_batch_size": 2, "tokens_per_step": 64, "steps": 2}


def test_a_workload_trains_one_step_as_its_config_says():
    config = lab.load_config("fp32", **SMALL, lr_warmup_steps=0, dropout=0.0)
    work = lab.build(config, CPU)
    batch = next(work.data.batches)
    assert batch["input_ids"].shape == (2, 32)
    assert work.model.training and not work.scaler.is_enabled()
    expected = work.loss_fn(work.model, batch).item() / (2 * 31)
    series = lab.train(work.model, iter([batch]), work.loss_fn, work.optimizer, steps=1)
    assert series.loss == pytest.approx([expected])
