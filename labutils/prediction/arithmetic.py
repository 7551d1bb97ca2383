"""The memory of a GPT-2 training step on the back of an envelope: bytes per parameter, per token
and per logit.

For teaching. Activations follow Korthikanti et al. 2022 (arXiv
2205.05198, equation 2), adapted to Hugging Face's GPT-2 with fused attention: per layer (their 34)
x tokens x width in pure 16 bit. Not counted: smaller temporaries.
"""

from __future__ import annotations

from labutils.config.choices import ACTIVATIONS as ACTIVATIONS_OF_MODEL
from labutils.config.choices import ATTENTION, CHECKPOINTING, MODELS, OPTIMIZERS, PRECISIONS
from labutils.config.schema import Config
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    MemoryLedger,
)

# What autograd keeps of one block, in bytes per token and unit of width: norm input, norm output,
# q k v, attention output, mask, norm input, norm output, 4× before and after GELU, mask.
KEPT_PER_BLOCK = {
    "float32": 4 + 4 + 12 + 4 + 1 + 4 + 4 + 16 + 16 + 1,  # 66
    "autocast": 4 + 2 + 6 + 2 + 1 + 4 + 2 + 8 + 8 + 1,  # 38: the residual stream stays float32
    "16 bits": 2 + 2 + 6 + 2 + 1 + 2 + 2 + 8 + 8 + 1,  # 34, as in the paper
}
# `gelu_new` is many operations: three more results of width 4h are kept, under autocast partly in
# float32.
GELU_NEW = {"float32": 3 * 16, "autocast": 48, "16 bits": 3 * 8}
# Bytes per parameter that stand whatever the batch: weights + gradients + optimizer state.
RECIPES = {
    "FP32 or autocast, AdamW": 4 + 4 + 8,
    "FP32 or autocast, SGD with momentum": 4 + 4 + 4,
    "pure BF16, AdamW": 2 + 2 + 4,
    "pure BF16, 8-bit AdamW": 2 + 2 + 2,
    "LoRA: frozen BF16 weights alone": 2,
    "QLoRA: frozen 4-bit weights alone": 4.127
    / 8,  # NF4, its scales quantised too (Dettmers et al. 2023)
}
MODEL_PARAMETERS = {
    "GPT-2 124M": 124_439_808,
    "GPT-2 355M": 354_823_168,
    "GPT-2 774M": 774_030_080,
    "GPT-2 1.5B": 1_557_611_200,
    "7B": 6_738_415_616,  # LLaMA's
    "13B": 13_015_864_320,
    "70B": 68_976_648_192,  # Llama 2's
}


def static_gib(n_parameters: float, recipe: str) -> float:
    """Return GiB for the weights, gradients and optimizer state of a recipe of RECIPES; no
    activation is counted.
    """
    return n_parameters * RECIPES[recipe] / 2**30


def n_parameters(model: str, seq_len: int = 1024, pad_vocab: bool = False) -> int:
    """Return the number of parameters of a GPT-2 by its shape.

    12·L·h² + 13·L·h + embeddings + last norm, for L layers of width h.
    """
    row = MODELS[model]
    vocabulary = -(-row.vocabulary // 64) * 64 if pad_vocab else row.vocabulary
    embeddings = (vocabulary + max(seq_len, 1024)) * row.width
    blocks = row.n_layer * (12 * row.width**2 + 13 * row.width)
    return blocks + embeddings + 2 * row.width


def least_bytes(config: Config) -> int:
    """Return bytes below which no step of a config goes: what is alive at the optimizer's step.

    Weights and optimizer state, and all gradients, if they are not freed one by one.
    """
    n = n_parameters(config.model, config.seq_len, config.pad_vocab)
    wide, _ = _bytes_per_number(config)
    gradients = 0 if config.optimizer_in_backward else wide * n
    return wide * n + gradients + _standing_bytes(config)[OPTIMIZER]


def arithmetic_of(precision: str) -> str:
    """Return which column of KEPT_PER_BLOCK a precision is in."""
    row = PRECISIONS[precision]
    if row.autocast:
        return "autocast"
    return "16 bits" if row.is_16bit else "float32"


def closed_form(config: Config) -> MemoryLedger:
    """Return a ledger by hand: of a config on a CUDA card, with fused attention.

    For teaching. Predictions trace the step instead: see `prediction.memory`.
    """
    standing = _standing_bytes(config)
    wide, narrow = _bytes_per_number(config)
    row = MODELS[config.model]
    kept, again = _kept_by_blocks(config)
    tokens = config.micro_batch_size * config.seq_len
    # the last norm
    standing[ACTIVATIONS] = kept + (wide + narrow) * tokens * row.width
    logits = min(config.loss_chunk_tokens or tokens, tokens) * row.vocabulary
    if config.loss_chunk_tokens:
        # a chunk's logits, and the gradients of all it has seen: see `loss.ChunkedLoss`
        gradients = wide * row.vocabulary * row.width + narrow * tokens * row.width
        loss_phase = standing | {LOGITS: gradients + (2 * narrow + 4) * logits}
        at_the_loss = standing | {LOGITS: gradients, TEMPORARIES: again}
    else:
        # 16-bit logits, their float32 copy, the log-softmax
        copies = (narrow if narrow < 4 else 0) + 4 + 4
        loss_phase = standing | {LOGITS: copies * logits}
        # two gradients beside the log-softmax
        temporaries = max(8 * logits, again - 4 * logits)
        at_the_loss = standing | {LOGITS: 4 * logits, TEMPORARIES: temporaries}
    n = n_parameters(config.model, config.seq_len, config.pad_vocab)
    embedding = wide * row.vocabulary * row.width
    # in backward, one gradient at a time: the largest
    gradients = embedding if config.optimizer_in_backward else wide * n
    gradients_alone = standing | {GRADIENTS: gradients, ACTIVATIONS: 0, CAST_WEIGHTS: 0}
    # the tied embedding's gradient comes in two parts, through a third
    at_the_embedding = gradients_alone | {TEMPORARIES: 2 * embedding}
    foreach = wide * n if config.optimizer_impl == "foreach" else 0
    phases = {
        "forward": standing,
        "loss": loss_phase,
        "backward": max(at_the_loss, at_the_embedding, key=lambda parts: sum(parts.values())),
        "optimizer": gradients_alone | {TEMPORARIES: foreach},
    }
    return MemoryLedger(phases=phases, method="closed form: bytes per parameter, token and logit")


def _bytes_per_number(config: Config) -> tuple[int, int]:
    """Return the bytes of a weight (and of the residual stream), and of a product."""
    row = PRECISIONS[config.precision]
    return 4 if row.weights == "float32" else 2, 2 if row.is_16bit else 4


def _standing_bytes(config: Config) -> dict[str, int]:
    """Return bytes by category that stand through the forward and the backward pass."""
    n = n_parameters(config.model, config.seq_len, config.pad_vocab)
    wide, _ = _bytes_per_number(config)
    optimizer = OPTIMIZERS[config.optimizer]
    # torch's own optimizers keep numbers as wide as the weights
    scale = wide / 4 if optimizer.has_implementations else 1
    return {
        PARAMETERS: wide * n,
        GRADIENTS: wide * n if config.grad_accum_steps > 1 else 0,
        OPTIMIZER: round(optimizer.state_bytes * scale * n),
        ACTIVATIONS: 0,
        CAST_WEIGHTS: 2 * n if PRECISIONS[config.precision].autocast else 0,
        LOGITS: 0,
        TEMPORARIES: 0,
    }


def _kept_by_blocks(config: Config) -> tuple[int, int]:
    """Return the bytes that autograd keeps of the blocks, and those computed again at once."""
    row, policy = MODELS[config.model], CHECKPOINTING[config.gradient_checkpointing]
    wide, narrow = _bytes_per_number(config)
    tokens = config.micro_batch_size * config.seq_len
    arithmetic = arithmetic_of(config.precision)
    per_width = KEPT_PER_BLOCK[arithmetic] - (2 if config.dropout == 0 else 0)
    if not ACTIVATIONS_OF_MODEL[config.activation].is_fused:
        per_width += GELU_NEW[arithmetic]
    per_block = per_width * tokens * row.width
    if ATTENTION[config.attention].keeps_matrices:
        # softmax, its dropout mask, and what is left: (T, T) each
        per_block += (2 * narrow + 1) * row.n_head * tokens * config.seq_len
    if not policy.is_on:
        return row.n_layer * per_block, 0
    if policy.to_host:
        return 0, per_block
    if policy.keeps_products:
        # a block's input and its products: q k v, attention, projection, 4×, projection
        kept_per_block = (wide + narrow * (3 + 1 + 1 + 4 + 1)) * tokens * row.width
        return row.n_layer * kept_per_block, per_block - kept_per_block
    size = policy.blocks_per_unit
    return -(-row.n_layer // size) * wide * tokens * row.width, size * per_block
