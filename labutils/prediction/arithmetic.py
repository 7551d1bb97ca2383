"""The memory of a GPT-2 training step on the back of an envelope: bytes per parameter, per token
and per logit.

For teaching, and where steps cannot be traced. Activations follow Korthikanti et al. 2022 (arXiv
2205.05198, equation 2), adapted to Hugging Face's GPT-2 with fused attention: per layer (their 34)
x tokens x width in pure 16 bit. Not counted: smaller temporaries.
"""

from __future__ import annotations

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
from labutils.techniques.checkpointing import BLOCKS_PER_UNIT
from labutils.workload.gpt2 import SIZES

# What autograd keeps of one block, bytes per token and unit of width, the two dropout masks (1 + 1)
# included: norm input, norm output, q k v, attention output, mask, norm input, norm output, 4×
# before and after GELU, mask
KEPT_PER_BLOCK = {
    "fp32": 4 + 4 + 12 + 4 + 1 + 4 + 4 + 16 + 16 + 1,  # 66
    "autocast": 4 + 2 + 6 + 2 + 1 + 4 + 2 + 8 + 8 + 1,  # 38: the residual stream stays float32
    "pure_bf16": 2 + 2 + 6 + 2 + 1 + 2 + 2 + 8 + 8 + 1,  # 34, as in the paper
}
# `gelu_new` is many operations: three more results of width 4h are kept (under autocast partly in
# float32)
GELU_NEW = {"fp32": 3 * 16, "autocast": 48, "pure_bf16": 3 * 8}
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
    """Return the number of parameters of a GPT-2 by its shape:

    12·L·h² + 13·L·h + embeddings + last norm.
    """
    n_layer, _, width, vocab = SIZES[model]
    vocab = -(-vocab // 64) * 64 if pad_vocab else vocab
    return (
        12 * n_layer * width**2
        + 13 * n_layer * width
        + (vocab + max(seq_len, 1024)) * width
        + 2 * width
    )


def on_a_cpu(config: Config) -> Config:
    """Return a config with the attention that a CPU takes for it:

    None of its fused kernels drops out.
    """
    return config.model_copy(update={"attention": "math"}) if config.dropout else config


def closed_form(config: Config) -> MemoryLedger:
    """Return the closed form's ledger of a config on a CUDA card, with fused (flash or
    memory-efficient) attention.
    """
    n_layer, n_head, width, vocab = SIZES[config.model]
    n = n_parameters(config.model, config.seq_len, config.pad_vocab)
    tokens = config.micro_batch_size * config.seq_len
    arithmetic = {"fp16": "autocast", "bf16": "autocast", "pure_bf16": "pure_bf16"}.get(
        config.precision, "fp32"
    )
    wide = 2 if arithmetic == "pure_bf16" else 4  # bytes of a weight and of the residual stream
    narrow = 4 if arithmetic == "fp32" else 2  # bytes of a product

    block = KEPT_PER_BLOCK[arithmetic] - (2 if config.dropout == 0 else 0)
    block += GELU_NEW[arithmetic] if config.activation == "gelu_new" else 0
    per_block = block * tokens * width
    if config.attention in (
        "eager",
        "math",
    ):  # softmax, its dropout mask, and what is left: (T, T) each
        per_block += (2 * narrow + 1) * n_head * tokens * config.seq_len
    kept, again = n_layer * per_block, 0
    policy = config.gradient_checkpointing
    if policy == "offload":
        kept, again = 0, per_block
    elif (
        policy == "selective"
    ):  # a block's input and its products: q k v, attention, projection, 4×, projection
        kept = n_layer * (wide + narrow * (3 + 1 + 1 + 4 + 1)) * tokens * width
        again = per_block - kept // n_layer
    elif policy != "none":
        size = BLOCKS_PER_UNIT[policy]
        kept, again = -(-n_layer // size) * wide * tokens * width, size * per_block
    kept += (wide + narrow) * tokens * width  # the last norm

    rows = min(config.loss_chunk_tokens or tokens, tokens)
    logits = rows * vocab
    moments = {"adamw": 2 * wide, "adamw_bf16": 4, "adamw_8bit": 2 * (1 + 4 / 256), "sgd": wide}[
        config.optimizer
    ]
    standing = {
        PARAMETERS: wide * n,
        GRADIENTS: wide * n if config.grad_accum_steps > 1 else 0,
        OPTIMIZER: round(moments * n),
        ACTIVATIONS: kept,
        CAST_WEIGHTS: 2 * n if arithmetic == "autocast" else 0,
        LOGITS: 0,
        TEMPORARIES: 0,
    }
    # 16-bit logits, their float32 copy, the log-softmax; in backward two gradients beside the
    # log-softmax
    loss = (narrow if narrow < 4 else 0) + 4 + 4
    at_the_loss = standing | {LOGITS: 4 * logits, TEMPORARIES: max(8 * logits, again - 4 * logits)}
    if (
        config.loss_chunk_tokens
    ):  # a chunk's logits, and the gradients of all it has seen: see models.ChunkedLoss
        gradients = wide * vocab * width + narrow * tokens * width
        loss_phase = standing | {LOGITS: gradients + (2 * narrow + 4) * logits}
        at_the_loss = standing | {LOGITS: gradients, TEMPORARIES: again}
    else:
        loss_phase = standing | {LOGITS: loss * logits}
    embedding = wide * vocab * width
    together = (
        embedding if config.optimizer_in_backward else wide * n
    )  # or one at a time, the largest
    gradients_alone = standing | {GRADIENTS: together, ACTIVATIONS: 0, CAST_WEIGHTS: 0}
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
