"""The configs of the allocator's table: chosen by hand, or drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def shape(micro_batch_size: int, seq_len: int, accumulate: int = 1) -> dict[str, int]:
    """Return the overrides for a step of `accumulate` micro-batches."""
    tokens = micro_batch_size * seq_len * accumulate
    return {"micro_batch_size": micro_batch_size, "seq_len": seq_len, "tokens_per_step": tokens}


LEAN = {"optimizer": "adamw_8bit", "optimizer_in_backward": True, "max_grad_norm": 0}
BLOCK = {"gradient_checkpointing": "block"}
CHUNKS = {"loss_chunk_tokens": 512}
NO_DROPOUT = {"dropout": 0.0, "activation": "gelu_tanh"}
SMALL = {"model": "gpt2-nano"}
MEDIUM = {"model": "gpt2-medium"}


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of a shipped config, overrides)."""
    for name in ("fp32", "bf16", "fp16"):
        for sizes in ((1, 128), (1, 512), (4, 512), (4, 1024), (16, 1024)):
            yield name, shape(*sizes)
        yield name, shape(2, 512, 2)
        yield name, shape(1, 1024, 8)
    for sizes in ((1, 128), (4, 512), (16, 1024)):
        yield "bf16", shape(*sizes) | {"precision": "pure_bf16"}
    for name in ("fp32", "bf16"):
        for policy in ("block", "every_2", "every_3", "every_4", "selective", "offload"):
            yield name, shape(4, 1024) | {"gradient_checkpointing": policy}
        for changes in (
            CHUNKS,
            BLOCK | CHUNKS,
            NO_DROPOUT,
            {"optimizer_impl": "foreach"},
            {"attention": "eager"},
        ):
            yield name, shape(4, 1024) | changes
        yield name, shape(4, 512) | LEAN
        yield name, shape(4, 512) | LEAN | BLOCK | CHUNKS
    for changes in ({"optimizer": "sgd"}, {"optimizer": "adamw_bf16"}, {"optimizer": "adamw_8bit"}):
        yield "fp32", shape(4, 512) | changes
    yield "fp32", shape(4, 1024) | {"optimizer_impl": "for_loop"}
    yield "fp32", shape(4, 1024) | {"attention": "math"}
    yield "bf16", shape(4, 1024) | {"attention": "efficient"}
    yield "fp32", shape(8, 512, 4) | {"pad_vocab": True}
    yield "bf16", shape(1, 4096) | BLOCK
    for name in ("fp32", "bf16"):
        yield name, MEDIUM | shape(2, 1024)
        yield name, MEDIUM | shape(8, 512) | BLOCK
    yield "bf16", MEDIUM | shape(4, 1024) | LEAN | BLOCK | CHUNKS | {"precision": "pure_bf16"}
    yield "bf16", {"model": "gpt2-large"} | shape(1, 1024) | BLOCK
    for name in ("fp32", "bf16", "fp16"):
        yield name, SMALL | shape(16, 512)
    yield "optimized", {"compile": "off"}
    yield "checkpointing", {}
    yield "accumulation", {}
    yield "xl", {"memory_limit_gib": 0}


CHOICES = {
    "precision": ["fp32", "bf16", "fp16", "pure_bf16"],
    "micro_batch_size": [1, 2, 3, 4, 6, 8, 12],
    "seq_len": [128, 256, 384, 512, 768, 1024],
    "accumulate": [1, 1, 2, 3],
    "gradient_checkpointing": ["none", "none", "block", "every_2", "every_4", "selective"],
    "optimizer": ["adamw", "adamw", "adamw_8bit", "adamw_bf16", "sgd"],
    "optimizer_impl": ["fused", "fused", "foreach"],
    "attention": ["auto", "auto", "efficient", "eager"],
    "dropout": [0.0, 0.1],
    "activation": ["gelu_new", "gelu_tanh"],
    "loss_chunk_tokens": [0, 0, 256, 512],
    "pad_vocab": [False, True],
    "model": ["gpt2", "gpt2", "gpt2-medium", "gpt2-nano"],
}


def drawn(n: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `n` configs drawn at random, the same ones for a seed."""
    dice = random.Random(seed)
    for _ in range(n):
        values = {key: dice.choice(found) for key, found in CHOICES.items()}
        values |= shape(values["micro_batch_size"], values["seq_len"], values.pop("accumulate"))
        yield "fp32", values
