"""What the benchmark compares: the same tokens, weights and precision, trained in several ways.

An arm is a function `arm(config, stream, device)`. It trains on the micro-batches of `stream`, one
optimizer step each, at most `config.steps`; the stream keeps the time. It returns the loss of each
step, a mean over targets, and how it was compiled. To add one, write the function here and name
it in ARMS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.plain_gpt import PlainGPT
from labutils.config.schema import Config
from labutils.techniques import precision
from labutils.training.train import to_device, train
from labutils.workload.build import build_experiment_model, build_loss, build_optimizer
from labutils.workload.gpt2 import build_model

Batch = dict[str, torch.Tensor]
Result = tuple[list[float], str]


def transformers_model(config: Config, device: torch.device, use_cache: bool = True) -> nn.Module:
    """Return GPT-2 as transformers makes it by default, with weights from the config's seed.

    That is: dropout 0.1, gelu_new, a key-value cache, and the vocabulary as it is.
    """
    sizes = {"seq_len": config.seq_len, "seed": config.seed}
    model = build_model(config.model, **sizes, use_cache=use_cache, attention="eager")
    model.set_attn_implementation("sdpa")  # which is transformers' default
    return model.to(device)


def tutorial(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The loop as tutorials write it, with a GradScaler for BF16 too."""
    model = transformers_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    use_amp = config.precision in ("fp16", "bf16")
    scaler = torch.amp.GradScaler(device.type, enabled=use_amp)
    losses = []
    for batch in stream:
        batch = {k: v.to(device) for k, v in batch.items()}
        optimizer.zero_grad()
        with precision.autocast(config.precision, device):
            outputs = model(**batch)
            loss = outputs.loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        loss.item()  # for its progress bar
    return losses, ""


def corrected(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The same loop without its mistakes: a scaler for FP16 only, clipping, no cache."""
    model = transformers_model(config, device, use_cache=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    scaler = precision.grad_scaler(config.precision, device)
    losses = []
    for batch in stream:
        batch = {k: v.to(device) for k, v in batch.items()}
        with precision.autocast(config.precision, device):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        del loss
    return losses, ""


def plain(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """A strong user's own GPT and bare loop, eager."""
    model = PlainGPT(config).to(device)
    return _bare_loop(model, model, config, stream, device), ""


def plain_compiled(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The same with torch.compile."""
    model = PlainGPT(config).to(device)
    losses = _bare_loop(model, torch.compile(model), config, stream, device)
    return losses, "default"


def _bare_loop(
    model: nn.Module,
    mean_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    config: Config,
    stream: Iterator[Batch],
    device: torch.device,
) -> list[float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), fused=True
    )
    scaler = precision.grad_scaler(config.precision, device)
    losses = []
    for batch in stream:
        batch = to_device(batch, device)
        ids, targets = batch["input_ids"], F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        with precision.autocast(config.precision, device):
            loss = mean_loss(ids, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        del loss
    return torch.stack(losses).tolist() if losses else []


def ours(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The course's model and `labutils.train`, with every switch of the config."""
    model = build_experiment_model(config, device)
    loss_fn = build_loss(config, device, config.grad_accum_steps > 1)
    scaler = precision.grad_scaler(
        config.precision, device, config.init_scale, config.growth_interval
    )
    series = train(
        model,
        stream,
        loss_fn,
        build_optimizer(model, config),
        steps=config.steps,
        precision=config.precision,
        scaler=scaler,
        max_grad_norm=config.max_grad_norm,
        progress=False,
    )
    return series.loss, getattr(loss_fn, "report", "")


ARMS = {arm.__name__: arm for arm in (tutorial, corrected, plain, plain_compiled, ours)}
