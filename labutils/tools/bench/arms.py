"""What the benchmark compares: the same tokens, weights and precision, trained in several ways.

An arm is a function `arm(config, stream, device)`. It trains on the micro-batches of `stream`, one
optimizer step each, at most `config.steps`. The stream keeps the time (`worker`). To add one, write
the function here and a line in the tables at the end of this file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from labutils.config.schema import Config
from labutils.techniques import precision
from labutils.tools.bench.models import PlainGPT, hugging_face_model
from labutils.training.loop import to_device, train
from labutils.workload.build import build_experiment_model, build_loss, build_optimizer

Batch = dict[str, torch.Tensor]
LOGGING_STEPS = 5


@dataclass(frozen=True)
class Result:
    """The loss of each step, a mean over targets, and how the arm was compiled."""

    losses: list[float]
    compiled: str = ""


def tutorial(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The loop as tutorials write it, with a GradScaler for BF16 too."""
    model = hugging_face_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    use_amp = config.precision in ("fp16", "bf16")
    scaler = torch.amp.GradScaler(device.type) if use_amp else None
    losses = []
    for batch in stream:
        batch = {k: v.to(device) for k, v in batch.items()}
        optimizer.zero_grad()
        if use_amp:
            with precision.autocast(config.precision, device):
                outputs = model(**batch)
                loss = outputs.loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        loss.item()  # for its progress bar
    return Result(losses)


def corrected(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The same loop without its mistakes: a scaler for FP16 only, clipping, no cache."""
    model = hugging_face_model(config, device, use_cache=False)
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
    return Result(losses)


def trainer(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """Hugging Face's Trainer, with its own optimizer and settings."""
    # Takes seconds, and needs accelerate, which only the `bench` extra installs.
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class FromStream(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(_Batches(stream), batch_size=None)

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if logs and "loss" in logs:  # the mean of the last LOGGING_STEPS steps
                losses.extend([logs["loss"]] * LOGGING_STEPS)

    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=config.steps,
            learning_rate=config.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=config.max_grad_norm,
            bf16=config.precision == "bf16",
            fp16=config.precision == "fp16",
            use_cpu=device.type == "cpu",
            logging_steps=LOGGING_STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        FromStream(hugging_face_model(config, device), arguments, callbacks=[Keep()]).train()
    return Result(losses)


class _Batches(torch.utils.data.IterableDataset):
    def __init__(self, stream: Iterator[Batch]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Batch]:
        return self.stream


def plain(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """A strong user's own GPT and bare loop, eager."""
    model = PlainGPT(config).to(device)
    return Result(_bare_loop(model, model, config, stream, device))


def plain_compiled(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The same with torch.compile."""
    model = PlainGPT(config).to(device)
    losses = _bare_loop(model, torch.compile(model), config, stream, device)
    return Result(losses, compiled="default")


def ours_bare(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The course's model in the bare loop: what `labutils.train` costs over it."""
    model = build_experiment_model(config, device)
    loss_fn = build_loss(config, device, config.grad_accum_steps > 1)
    n_targets = config.micro_batch_size * (config.seq_len - 1)

    def call(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, {"input_ids": ids, "labels": ids}) / n_targets

    losses = _bare_loop(model, call, config, stream, device)
    return Result(losses, getattr(loss_fn, "report", ""))


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
    record = train(
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
    return Result(record.series.loss, getattr(loss_fn, "report", ""))


def ours_synced(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The same, but the CPU waits for the GPU before each batch, as if it read every loss."""

    def synced() -> Iterator[Batch]:
        for batch in stream:
            torch.cuda.synchronize()
            yield batch

    return ours(config, synced(), device)


def ours_unpinned(config: Config, stream: Iterator[Batch], device: torch.device) -> Result:
    """The same, but batches come to the GPU from pageable memory, and targets are counted there."""

    def unpinned() -> Iterator[Batch]:
        for batch in stream:
            yield {key: value.to(device) for key, value in batch.items()}

    return ours(config, unpinned(), device)


@dataclass(frozen=True)
class Arm:
    """A function above, the title of its row in tables, and a package that only it needs."""

    train: Callable[[Config, Iterator[Batch], torch.device], Result]
    title: str
    needs: str = ""

    @property
    def name(self) -> str:
        """Its name on the command line and in saved results."""
        return self.train.__name__


COMPETITORS = (  # what the optimized config is compared with
    Arm(tutorial, "tutorial loop, as written"),
    Arm(corrected, "tutorial loop, corrected"),
    Arm(trainer, "Hugging Face Trainer", needs="accelerate"),
    Arm(plain, "plain GPT, bare loop"),
    Arm(plain_compiled, "plain GPT, bare loop, compiled"),
    Arm(ours_bare, "our model, bare loop"),
)
LOOP_ABLATIONS = (  # what `labutils.train` does on a GPU and no switch takes back
    Arm(ours_synced, "CPU and GPU wait each step"),
    Arm(ours_unpinned, "copies not pinned"),
)
OURS = Arm(ours, "optimized config")
ARMS = {arm.name: arm for arm in (*COMPETITORS, *LOOP_ABLATIONS, OURS)}
