"""What the benchmark compares: the same tokens, weights and precision in several ways to write the
training.

An arm is a function `arm(config, stream, where)`: it trains on the micro-batches of `stream`, one
optimizer step each, at most `config.steps`, and returns the loss of each step, a mean over targets.
The stream keeps the time (`worker`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from labutils.config.choices import MODELS
from labutils.config.schema import Config
from labutils.techniques import precision
from labutils.training.loop import to_device, train
from labutils.workload.build import (
    build_experiment_model,
    build_loss,
    build_optimizer,
    float32_model,
)

Batch = dict[str, torch.Tensor]
LOGGING_STEPS = 5
compiled_how = ""  # what the arm that ran in this process says of torch.compile


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    """Return the weights all arms start from, by Hugging Face's names; vocabulary padded if the
    config says so.
    """
    return float32_model(config.model_copy(update={"gradient_checkpointing": "none"})).state_dict()


def hugging_faces_model(config: Config, where: torch.device, **switches: Any) -> nn.Module:
    """Return GPT-2 as transformers makes it by default:

    Dropout 0.1, gelu_new, cache on, vocabulary as it is.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    row = MODELS[config.model]
    vocab = row.vocabulary
    shape = {"n_layer": row.n_layer, "n_head": row.n_head, "n_embd": row.width, "vocab_size": vocab}
    shape |= {"n_positions": max(1024, config.seq_len), "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **switches))
    model.loss_type = "ForCausalLM"
    weights = {
        name: value[:vocab] if len(value) > vocab else value
        for name, value in initial_weights(config).items()
    }
    model.load_state_dict(weights)
    return model.to(where).train()


def source(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """The loop of the source material as it stands, but for names torch has removed:

    A GradScaler for BF16 too.
    """
    model = hugging_faces_model(config, where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    use_amp = config.precision in ("fp16", "bf16")
    scaler = torch.amp.GradScaler(where.type) if use_amp else None
    losses = []
    for batch in stream:
        batch = {k: v.to(where) for k, v in batch.items()}
        optimizer.zero_grad()
        if use_amp:
            with precision.autocast(config.precision, where):
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
    return losses


def corrected(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """The same loop, mended where it is wrong:

    A scaler for FP16 only, clipping, no cache, no outputs kept.
    """
    model = hugging_faces_model(config, where, use_cache=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    scaler = precision.grad_scaler(config.precision, where)
    losses = []
    for batch in stream:
        batch = {k: v.to(where) for k, v in batch.items()}
        with precision.autocast(config.precision, where):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        del loss
    return losses


def trainer(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """Hugging Face's Trainer, its own optimizer and settings; needs accelerate (the `bench` extra)."""
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
            use_cpu=where.type == "cpu",
            logging_steps=LOGGING_STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        FromStream(hugging_faces_model(config, where), arguments, callbacks=[Keep()]).train()
    return losses


class _Batches(torch.utils.data.IterableDataset):
    def __init__(self, stream: Iterator[Batch]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Batch]:
        return self.stream


class Block(nn.Module):
    """A block of GPT-2, written plainly: fused attention, tanh GELU, no dropout."""

    def __init__(self, n_head: int, width: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, heads, T, width of a head) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 in 20 lines, in the style of nanoGPT, with the same weights; `forward` returns the mean
    loss.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        row = MODELS[config.model]
        n_layer, n_head, width = row.n_layer, row.n_head, row.width
        weights = initial_weights(config)
        vocab = len(weights["transformer.wte.weight"])
        self.tokens, self.positions = (
            nn.Embedding(vocab, width),
            nn.Embedding(max(1024, config.seq_len), width),
        )
        self.blocks = nn.ModuleList(Block(n_head, width) for _ in range(n_layer))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.load_state_dict(dict(_by_plain_names(weights)))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def _by_plain_names(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face's weights under PlainGPT's names; its Conv1D has the transposed matrix of
    a Linear.
    """
    names = {
        "wte": "tokens",
        "wpe": "positions",
        "ln_f": "norm",
        "lm_head": "head",
        "h": "blocks",
        "ln_1": "norm_1",
    }
    names |= {
        "ln_2": "norm_2",
        "attn.c_attn": "qkv",
        "attn.c_proj": "out",
        "mlp.c_fc": "up",
        "mlp.c_proj": "down",
    }
    for name, value in weights.items():
        plain = f".{name.removeprefix('transformer.')}"
        for old, new in names.items():
            plain = plain.replace(f".{old}.", f".{new}.")
        yield plain[1:], value.T if ".c_" in name and value.dim() == 2 else value


def _bare_loop(
    model: nn.Module, call: Any, config: Config, stream: Iterator[Batch], where: torch.device
) -> list[float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), fused=True
    )
    scaler = precision.grad_scaler(config.precision, where)
    losses = []
    for batch in stream:
        batch = to_device(batch, where)
        ids, targets = batch["input_ids"], F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        with precision.autocast(config.precision, where):
            loss = call(ids, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        del loss
    return torch.stack(losses).tolist() if losses else []


def plain(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """A strong user's own GPT and bare loop, eager."""
    model = PlainGPT(config).to(where)
    return _bare_loop(model, model, config, stream, where)


def plain_compiled(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """The same with torch.compile."""
    model = PlainGPT(config).to(where)
    losses = _bare_loop(model, torch.compile(model), config, stream, where)
    _note("default")
    return losses


def ours_bare(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """The course's model in the bare loop: what `labutils.train` costs over it."""
    model, loss_fn = (
        build_experiment_model(config, where),
        build_loss(config, where, config.grad_accum_steps > 1),
    )
    n_targets = config.micro_batch_size * (config.seq_len - 1)

    def call(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, {"input_ids": ids, "labels": ids}) / n_targets

    losses = _bare_loop(model, call, config, stream, where)
    _note(getattr(loss_fn, "report", ""))
    return losses


def ours(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """The course's model and `labutils.train`, with every switch of the config."""
    model, loss_fn = (
        build_experiment_model(config, where),
        build_loss(config, where, config.grad_accum_steps > 1),
    )
    record = train(
        model,
        stream,
        loss_fn,
        build_optimizer(model, config),
        steps=config.steps,
        precision=config.precision,
        scaler=precision.grad_scaler(
            config.precision, where, config.init_scale, config.growth_interval
        ),
        max_grad_norm=config.max_grad_norm,
        progress=False,
    )
    _note(getattr(loss_fn, "report", ""))
    return record.series.loss


def ours_waiting(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """The same, but the CPU waits for the GPU before each batch, as a loop does that reads every
    step's loss.
    """

    def waiting() -> Iterator[Batch]:
        for batch in stream:
            torch.cuda.synchronize()
            yield batch

    return ours(config, waiting(), where)


def ours_unpinned(config: Config, stream: Iterator[Batch], where: torch.device) -> list[float]:
    """The same, but batches go to the GPU from pageable memory first, and targets are counted
    there.
    """
    return ours(
        config, ({key: value.to(where) for key, value in batch.items()} for batch in stream), where
    )


def _note(report: str) -> None:
    global compiled_how
    compiled_how = report


OURS = (ours, ours_bare, ours_waiting, ours_unpinned)
ARMS = {arm.__name__: arm for arm in (source, corrected, trainer, plain, plain_compiled, *OURS)}
