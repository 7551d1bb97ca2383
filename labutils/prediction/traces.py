"""Traces of one config at any batch size: few layers and few sequences are traced for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labutils.config.schema import Config
from labutils.machine.gpu import card_named
from labutils.memory.device_memory import without_expandable_segments
from labutils.prediction.allocator import Settings
from labutils.prediction.cuda_rules import cuda_rules
from labutils.prediction.storage_log import StorageLog, each_slab_size_once
from labutils.prediction.trace import Trace, trace_step
from labutils.techniques import precision
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.build import build_optimizer, float32_model

FEW_LAYERS = (
    2,
    3,
)  # traced in place of more: a first and a last one; of units if blocks are checkpointed together
FEW_SEQUENCES = 2, 3  # likewise; a batch of one has views where larger ones have copies
CPU = torch.device("cpu")
DEFAULT, EXPANDABLE = Settings(), Settings(expandable_segments=True)


def _settings(config: Config, device: str) -> Settings:
    """Return how a config's run sets the allocator:

    On the GPU here the environment counts, and what the system has.
    """
    if device != "this":
        return EXPANDABLE if config.expandable_segments else DEFAULT
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    found = Settings.parse(text)
    wanted = found.expandable_segments or config.expandable_segments
    return found._replace(expandable_segments=wanted and not without_expandable_segments())


def _step_only(config: Config) -> Config:
    """Return the config with one value in all keys that leave the bytes of a step alone:

    Equal steps, traced once.
    """
    same = {
        "name": "x",
        "note": "",
        "seed": 0,
        "corpus": "stdlib",
        "steps": 1,
        "learning_rate": 1e-3,
    }
    same |= {
        "lr_schedule": "constant",
        "lr_warmup_steps": 0,
        "eval_every": 0,
        "micro_batch_size": 1,
    }
    same |= {"tokens_per_step": config.seq_len, "memory_limit_gib": 0, "weights": "random"}
    same |= {"compile": "off", "expandable_segments": False}
    return config.model_copy(update=same)


@lru_cache(maxsize=128)
def _trace(
    config_json: str,
    device: str,
    micro_batch_size: int,
    n_micro_batches: int,
    keep_outputs: bool,
    n_layer: int,
) -> Trace:
    config = Config.model_validate_json(config_json)
    with _fake_world(device) as (log, _):
        with _default_dtype(torch.bfloat16 if config.precision == "pure_bf16" else torch.float32):
            model = float32_model(
                config, n_layer
            )  # random: the shapes of pretrained ones, no download
        ids = [
            torch.zeros((micro_batch_size, config.seq_len), dtype=torch.int64)
            for _ in range(n_micro_batches)
        ]
        return trace_step(
            model,
            [{"input_ids": i, "labels": i} for i in ids],
            lambda model, batch: (
                lm_loss_sum(model, batch, config.loss_chunk_tokens) / config.seq_len
            ),
            build_optimizer(model, config),
            log,
            autocast=partial(precision.autocast, config.precision, CPU),
            loss_scale=config.init_scale if config.precision == "fp16" else None,
            max_grad_norm=config.max_grad_norm,
            keep_outputs=keep_outputs,
        )


@contextmanager
def _fake_world(device: str) -> Iterator[tuple[StorageLog, FakeTensorMode]]:
    """Inside, tensors are fake, operations allocate what those of `device` would, and the log sees
    them.
    """
    gpu = None if device == "cpu" else card_named(device).gpu
    log = StorageLog(gpu)
    with ExitStack() as stack:
        if gpu:
            stack.enter_context(cuda_rules(flash=gpu.flash))
        fake = stack.enter_context(FakeTensorMode())
        stack.enter_context(each_slab_size_once(log))
        yield stack.enter_context(log), fake


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    twin = torch.empty(tensor.shape, dtype=tensor.dtype)
    return (
        nn.Parameter(twin, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else twin
    )
