"""Bytes of a LLaMA-shaped model that is too large to build: traced with few layers, no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from labutils import machine
from labutils.config.choices import OPTIMIZERS
from labutils.memory.ledger import MemoryLedger
from labutils.prediction.allocator import DEFAULT
from labutils.prediction.memory import ledger_of
from labutils.prediction.trace import traced_module
from labutils.techniques import precision as precisions
from labutils.techniques.adapters import add_lora, use_four_bits
from labutils.techniques.optimizers import LowBitAdamW

FROZEN = ("none", "lora", "qlora")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16
FEW_LAYERS = 2, 3  # of which bytes are carried on to all: a first, a last, and one between


@dataclass(frozen=True)
class Shape:
    """What the bytes of a LLaMA depend on. The output weights are not tied to the embedding."""

    width: int
    inner: int
    n_layer: int
    n_head: int
    n_kv_head: int
    vocabulary: int = 32_000


# As published: TinyLlama (arXiv 2401.02385), LLaMA (2302.13971), Llama 2 (2307.09288).
SHAPES = {
    "1.1B": Shape(2048, 5632, 22, 32, 4),
    "7B": Shape(4096, 11008, 32, 32, 32),
    "13B": Shape(5120, 13824, 40, 40, 40),
    "33B": Shape(6656, 17920, 60, 52, 52),
    "65B": Shape(8192, 22016, 80, 64, 64),
    "70B": Shape(8192, 28672, 80, 64, 8),
}


def predict_large(shape: str | Shape, **recipe: Any) -> MemoryLedger:
    """Return the predicted ledger of a step of a LLaMA: a key of SHAPES, or a Shape.

    `recipe` is that of `traced_ledger`. Two depths are traced. Bytes of a phase are affine
    in the depth, so they are carried on to all layers; the peak of a phase must fall at the same
    operation at each depth, as it does in these shapes.
    Raises ValueError for an unknown size or kind of freezing.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"no shape {shape!r}; there are: {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    low, high = (traced_ledger(replace(shape, n_layer=n), **recipe) for n in FEW_LAYERS)
    deeper = shape.n_layer - FEW_LAYERS[0]
    phases = {}
    for phase, parts in low.phases.items():
        with_one_more = high.phases[phase]
        phases[phase] = {c: n + deeper * (with_one_more[c] - n) for c, n in parts.items()}
    return MemoryLedger(phases=phases, method=f"{low.method}, from few layers")


def traced_ledger(
    shape: Shape,
    *,
    precision: str,
    optimizer: str = "adamw",
    frozen: str = "none",
    checkpointing: bool = True,
    micro_batch_size: int = 1,
    seq_len: int = 2048,
    device: str = "a100",
) -> MemoryLedger:
    """Return the predicted ledger of a step with one micro-batch of `(micro_batch_size, seq_len)`.

    `frozen` is "lora" (rank 16, all linear layers of the blocks) or "qlora" (these in NF4 too);
    `checkpointing` keeps the inputs of blocks alone. AdamW is the fused one. What the allocator
    reserves is not counted.
    """
    model = llama(shape, precisions.weights_dtype(precision), frozen, checkpointing)
    ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    has_fused = OPTIMIZERS[optimizer].has_implementations

    def updates(parameters: Any) -> torch.optim.Optimizer:
        chosen = [p for p in parameters if p.requires_grad]
        return torch.optim.AdamW(chosen, fused=True) if has_fused else LowBitAdamW(chosen)

    card = machine.card_of(device)
    loss_fn = lambda model, batch: model(**batch).loss  # noqa: E731
    trace = traced_module(model, batch, loss_fn, updates, precision, card)
    return ledger_of(trace, f"predicted for {card.name}", DEFAULT)


def llama(
    shape: Shape, dtype: torch.dtype, frozen: str = "none", checkpointing: bool = True
) -> nn.Module:
    """Return transformers' LLaMA of that shape on the meta device: sizes without numbers.

    Raises ValueError for an unknown kind of freezing.
    """
    if frozen not in FROZEN:
        raise ValueError(f"frozen is {' or '.join(FROZEN)}; got {frozen!r}")
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head,
        num_key_value_heads=shape.n_kv_head,
        vocab_size=shape.vocabulary,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
        if frozen == "qlora":
            use_four_bits(model, LAYERS)
        if frozen != "none":
            add_lora(model, LAYERS, RANK, dtype=dtype)
    if checkpointing:
        new_name = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
        (new_name or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model.train()
