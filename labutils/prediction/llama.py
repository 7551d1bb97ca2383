"""Bytes of a LLaMA that is too large to build: traced with few layers, no weights."""

from __future__ import annotations

from typing import Any

import torch
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
# Layers, and what else bytes depend on: width, inner width, heads, heads of keys and values.
# As published: TinyLlama (arXiv 2401.02385), LLaMA (2302.13971), Llama 2 (2307.09288).
SHAPES = {
    "1.1B": (22, 2048, 5632, 32, 4),
    "7B": (32, 4096, 11008, 32, 32),
    "13B": (40, 5120, 13824, 40, 40),
    "33B": (60, 6656, 17920, 52, 52),
    "65B": (80, 8192, 22016, 64, 64),
    "70B": (80, 8192, 28672, 64, 8),
}


def predict_large(size: str, **recipe: Any) -> MemoryLedger:
    """Return the predicted ledger of a step of a LLaMA: a key of SHAPES.

    `recipe` is that of `traced_ledger`. Two depths are traced. Bytes of a phase are affine in the
    depth while its peak falls at the same operation, and so they are carried on to all layers.
    Where the peak moves with depth this is too low: with `pure_bf16` and `adamw_8bit` 1.1B lacks
    0.5 % at the peak, and 19 % in the backward phase.
    Raises ValueError for an unknown size or kind of freezing.
    """
    if size not in SHAPES:
        raise ValueError(f"no shape {size!r}; there are: {', '.join(SHAPES)}")
    low, high = (traced_ledger(size, n_layer, **recipe) for n_layer in FEW_LAYERS)
    deeper = SHAPES[size][0] - FEW_LAYERS[0]
    phases = {}
    for phase, parts in low.phases.items():
        with_one_more = high.phases[phase]
        phases[phase] = {c: n + deeper * (with_one_more[c] - n) for c, n in parts.items()}
    return MemoryLedger(phases=phases, method=f"{low.method}, from few layers")


def traced_ledger(
    size: str,
    n_layer: int,
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

    The model is transformers' own; its output weights are not tied to the embedding.

    `frozen` is "lora" (rank 16, all linear layers of the blocks) or "qlora" (these in NF4 too);
    `checkpointing` keeps the inputs of blocks alone. AdamW is the fused one. What the allocator
    reserves is not counted.
    """
    if frozen not in FROZEN:
        raise ValueError(f"frozen is {' or '.join(FROZEN)}; got {frozen!r}")
    _, width, inner, n_head, n_kv_head = SHAPES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=n_layer,
        num_attention_heads=n_head,
        num_key_value_heads=n_kv_head,
        use_cache=False,
        attn_implementation="sdpa",
    )
    dtype = precisions.weights_dtype(precision)
    with torch.device("meta"):  # sizes without numbers
        model = LlamaForCausalLM(config).to(dtype)
        if frozen == "qlora":
            use_four_bits(model, LAYERS)
        if frozen != "none":
            add_lora(model, LAYERS, RANK, dtype=dtype)
    if checkpointing:
        new_name = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
        (new_name or model.gradient_checkpointing_enable)({"use_reentrant": False})
    ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
    has_fused = OPTIMIZERS[optimizer].has_implementations

    def updates(parameters: Any) -> torch.optim.Optimizer:
        chosen = [p for p in parameters if p.requires_grad]
        return torch.optim.AdamW(chosen, fused=True) if has_fused else LowBitAdamW(chosen)

    card = machine.card_of(device)
    batch = {"input_ids": ids, "labels": ids}
    loss_fn = lambda model, batch: model(**batch).loss  # noqa: E731
    trace = traced_module(model, [batch], loss_fn, updates, precision, card)
    return ledger_of(trace, f"predicted for {card.name}", DEFAULT)
