"""DeepSpeed's JSON, judged without DeepSpeed."""

from __future__ import annotations

import json

import pytest

from labutils.config.deepspeed import deepspeed_problems

RAM = {"device": "cpu", "pin_memory": True}


def file(stage: int = 2, *, more: dict | None = None, **zero) -> str:
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    return json.dumps(sizes | {"zero_optimization": {"stage": stage, **zero}} | (more or {}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_is_valid(stage):
    assert deepspeed_problems(file(stage)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (file(4), "zero_optimization.stage"),
        (file("3"), "zero_optimization.stage"),
        (file(2, offload_param=RAM), "offload_param needs stage 3, and this is stage 2"),
        (file(0, offload_optimizer=RAM), "offload_optimizer needs stage 1, 2 or 3"),
        (file(2, cpu_offload=True), "zero_optimization.cpu_offload: Extra inputs"),
        (file(3, offload_param={"device": "disk"}), "offload_param.device"),
        (file(more={"fp16": {"enabled": True, "opt_level": "O2"}}), "fp16.opt_level: Extra"),
        (file(more={"bf16": {"enabled": True}, "fp16": {"enabled": True}}), "cannot both"),
        (file(more={"train_batch_size": 100}), "100 is not 4 × 8 × 2"),
        (json.dumps({"zero_optimization": {"stage": 1}}), "give two of the three"),
        (file() + "  # a comment", "Invalid JSON"),
        ("", "Invalid JSON"),
    ],
)
def test_a_mistake_is_named(text, words):
    found = deepspeed_problems(text, n_gpus=2)
    assert len(found) == 1 and words in found[0]


def test_offload_and_a_batch_that_agrees_are_valid():
    both = file(3, offload_param=RAM, offload_optimizer=RAM, more={"train_batch_size": 64})
    assert deepspeed_problems(both, n_gpus=2) == []
    assert deepspeed_problems(both, n_gpus=3) != []
