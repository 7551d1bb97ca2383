"""Bytes of a LLaMA-shaped model that is too large to build: traced with few layers, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from labutils.config.choices import OPTIMIZERS
from labutils.machine import here
from labutils.memory.ledger import MemoryLedger
from labutils.prediction import replay
from labutils.prediction.allocator import DEFAULT
from labutils.prediction.module import traced_module
from labutils.techniques import precision as precisions
from labutils.techniques.adapters import add_lora, trained, use_four_bits
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

    @property
    def n_parameters(self) -> int:
        """The number of parameters: two embeddings, attention, three matrices, norms."""
        kv = self.width // self.n_head * self.n_kv_head
        block = 2 * self.width * (self.width + kv) + 3 * self.width * self.inner + 2 * self.width
        return 2 * self.vocabulary * self.width + self.n_layer * block + self.width


# As published: TinyLlama (arXiv 2401.02385), LLaMA (2302.13971), Llama 2 (2307.09288).
SHAPES = {
    "1.1B": Shape(2048, 5632, 22, 32, 4),
    "7B": Shape(4096, 11008, 32, 32, 32),
    "13B": Shape(5120, 13824, 40, 40, 40),
    "33B": Shape(6656, 17920, 60, 52, 52),
    "65B": Shape(8192, 22016, 80, 64, 64),
    "70B": Shape(8192, 28672, 80, 64, 8),
}


def predict_large(
    shape: str | Shape,
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
    `checkpointing` keeps the inputs of blocks alone. Two depths are traced. Bytes of a phase are
    affine in the depth, so they are carried on to all layers; the peak of a phase must fall at the
    same operation at each depth, as it does in these shapes. AdamW is the fused one. What the
    allocator reserves is not counted.
    Raises ValueError for an unknown size or kind of freezing.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"no shape {shape!r}; there are: {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if frozen not in FROZEN:
        raise ValueError(f"frozen is {' or '.join(FROZEN)}; got {frozen!r}")
    what = (shape, precision, optimizer, frozen, checkpointing, micro_batch_size, seq_len, device)
    low, high = (_few_layers(*what, n) for n in FEW_LAYERS)
    return _carried_on(low, high, shape.n_layer - FEW_LAYERS[0])


def _carried_on(low: MemoryLedger, high: MemoryLedger, layers: int) -> MemoryLedger:
    """Return a ledger that lies `layers` deeper than `low`, if `high` is one layer deeper."""
    phases = {}
    for phase, parts in low.phases.items():
        deeper = high.phases[phase]
        phases[phase] = {c: n + layers * (deeper[c] - n) for c, n in parts.items()}
    return MemoryLedger(phases=phases, method=f"{low.method}, from few layers")


@lru_cache(maxsize=256)
def _few_layers(
    shape: Shape,
    precision: str,
    optimizer: str,
    frozen: str,
    checkpointing: bool,
    micro_batch_size: int,
    seq_len: int,
    device: str,
    n_layer: int,
) -> MemoryLedger:
    model = llama(shape, n_layer, precisions.weights_dtype(precision), frozen, checkpointing)
    ids = torch.zeros((micro_batch_size, seq_len), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    card = here.card_of(device)
    trace = traced_module(model, batch, _own_loss, _maker(optimizer), precision, card)
    return replay.ledger(trace, 1, f"predicted for {card.name}", DEFAULT)


def llama(
    shape: Shape, n_layer: int, dtype: torch.dtype, frozen: str = "none", checkpointing: bool = True
) -> nn.Module:
    """Return transformers' LLaMA of that shape on the meta device: sizes without numbers."""
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=n_layer,
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


def _own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def _maker(name: str):
    row = OPTIMIZERS[name]

    def make(parameters) -> torch.optim.Optimizer:
        chosen = trained(parameters)
        return (
            torch.optim.AdamW(chosen, fused=True)
            if row.has_implementations
            else LowBitAdamW(chosen)
        )

    return make
