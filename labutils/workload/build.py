"""From a config to what is trained: model, optimizer, loss and batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from labutils.config.schema import Config
from labutils.techniques import compiling
from labutils.techniques.loss import LossFn, lm_loss_sum
from labutils.techniques.optimizers import SmallAdamW, StepInBackward
from labutils.workload import data
from labutils.workload.gpt2 import build_model, pretrained_tokenizer, vocab_size

HELD_OUT_SEQUENCES = 16  # the same ones whatever the batch


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer | StepInBackward:
    """Return the config's optimizer; weight decay acts on matrices only, not on biases and layer
    norms.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    implementation = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "for_loop": {"foreach": False},
    }
    chosen = implementation[config.optimizer_impl]
    adamw = {"lr": config.learning_rate, "betas": (0.9, 0.95)}
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.learning_rate, momentum=0.9, **chosen)
    elif config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, **adamw, **chosen)
    else:
        optimizer = SmallAdamW(groups, **adamw, bits=8 if config.optimizer == "adamw_8bit" else 16)
    return StepInBackward(optimizer) if config.optimizer_in_backward else optimizer


def build_loss(config: Config, where: torch.device, accumulates: bool) -> LossFn:
    """Return the config's loss, summed over targets: in chunks, compiled, or neither."""
    loss_fn = partial(lm_loss_sum, chunk_tokens=config.loss_chunk_tokens)
    if config.compile == compiling.OFF:
        return loss_fn
    return compiling.CompiledLoss(loss_fn, config.compile, where, accumulates)


def build_corpus(config: Config) -> data.Corpus:
    """Return the config's text, with enough tokens for its steps if the source has them."""
    tokenizer = pretrained_tokenizer(config.model) if config.weights == "pretrained" else None
    return data.load_corpus(
        config.corpus,
        vocab_size=vocab_size(config.model),
        min_tokens=tokens_to_read(config),
        tokenizer=tokenizer,
    )


def tokens_to_read(config: Config) -> int:
    """Return how many tokens of text hold a config's steps, beside those held out."""
    trained = config.steps * config.tokens_per_step
    return (
        trained * data.HELD_OUT_EVERY // (data.HELD_OUT_EVERY - 1)
        + config.seq_len * data.HELD_OUT_EVERY
    )


def build_batches(config: Config) -> tuple[Iterator[dict], list[dict], data.Corpus, int]:
    """Return (endless training micro-batches, held-out micro-batches, corpus, micro-batches in an
    epoch).
    """
    corpus = build_corpus(config)
    blocks, held_out = corpus.split(config.seq_len)
    stream = data.batches(blocks, config.micro_batch_size, config.seed)
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[
        :HELD_OUT_SEQUENCES
    ]
    evaluation = [
        {"input_ids": ids, "labels": ids} for ids in held_out[order].split(config.micro_batch_size)
    ]
    return stream, evaluation, corpus, len(blocks) // config.micro_batch_size


def build_experiment_model(config: Config, where: torch.device) -> nn.Module:
    """Return the config's model on a device, in training mode; bfloat16 weights for `pure_bf16`,
    else float32.
    """
    model = float32_model(config)
    return model.to(
        where, dtype=torch.bfloat16 if config.precision == "pure_bf16" else torch.float32
    )


def float32_model(config: Config, n_layer: int | None = None) -> nn.Module:
    """Return the config's model, float32, on the CPU, in training mode; of another depth if
    `n_layer` says so.
    """
    return build_model(
        config.model,
        seq_len=config.seq_len,
        seed=config.seed,
        weights=config.weights,
        dropout=config.dropout,
        activation=config.activation,
        use_cache=config.use_cache,
        attention=config.attention,
        pad_vocab=config.pad_vocab,
        gradient_checkpointing=config.gradient_checkpointing,
        n_layer=n_layer,
    )
