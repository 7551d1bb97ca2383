"""The memory of a GPT-2 training step on the back of an envelope: bytes per parameter and token.

For teaching. Activations follow Korthikanti et al. 2022 (arXiv
2205.05198, equation 2), adapted to Hugging Face's GPT-2 with fused attention: per layer (their 34)
x tokens x width in pure 16 bit. Not counted: smaller temporaries.
"""

from __future__ import annotations

from labutils.config.choices import MODELS, PRECISIONS
from labutils.memory.ledger import GRADIENTS, OPTIMIZER, PARAMETERS

# What autograd keeps of one block, in bytes per token and unit of width: norm input, norm output,
# q k v, attention output, mask, norm input, norm output, 4× before and after GELU, mask.
KEPT_PER_BLOCK = {
    "float32": 66,  # 4 + 4 + 12 + 4 + 1 + 4 + 4 + 16 + 16 + 1
    "autocast": 38,  # 4 + 2 + 6 + 2 + 1 + 4 + 2 + 8 + 8 + 1: the residual stream stays float32
    "16 bits": 34,  # 2 + 2 + 6 + 2 + 1 + 2 + 2 + 8 + 8 + 1, as in the paper
}
# Bytes per parameter that stand whatever the batch: weights + gradients + optimizer state.
RECIPES = {
    "FP32 or autocast, AdamW": 4 + 4 + 8,
    "FP32 or autocast, SGD with momentum": 4 + 4 + 4,
    "pure BF16, AdamW": 2 + 2 + 4,
    "pure BF16, 8-bit AdamW": 2 + 2 + 2,
    "LoRA: frozen BF16 weights alone": 2,
    "QLoRA: frozen 4-bit weights alone": 4.127 / 8,  # with its scales (Dettmers et al. 2023)
}
MODEL_PARAMETERS = {
    "BERT 110M": 109_514_298,  # base, with its head; large: 335 million
    "BERT 335M": 335_174_458,
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


def n_parameters(model: str) -> int:
    """Return the number of parameters of a GPT-2 by its shape.

    12·L·h² + 13·L·h + embeddings + last norm, for L layers of width h, with 1024 positions.
    """
    row = MODELS[model]
    embeddings = (row.vocabulary + 1024) * row.width
    blocks = row.n_layer * (12 * row.width**2 + 13 * row.width)
    return blocks + embeddings + 2 * row.width


def arithmetic_of(precision: str) -> str:
    """Return which column of KEPT_PER_BLOCK a precision is in."""
    row = PRECISIONS[precision]
    if row.autocast:
        return "autocast"
    return "16 bits" if row.is_16bit else "float32"


# From which stage of ZeRO on a category is cut into one part per process.
CUT_FROM_STAGE = {OPTIMIZER: 1, GRADIENTS: 2, PARAMETERS: 3}


def sharded(static: dict[str, float], n_processes: int, stage: int) -> dict[str, float]:
    """Return the bytes by category of one process under ZeRO of a stage (0: every one has all).

    `static` are the bytes of one process alone. Categories that no stage cuts stay as they are:
    activations, for example. Not counted: what is gathered for a moment.
    Source: Rajbhandari et al. 2020 (arXiv 1910.02054). Raises ValueError for an unknown stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has stages 1 to 3, and 0 for none; got {stage!r}")
    parts = {}
    for name, n_bytes in static.items():
        is_cut = stage >= CUT_FROM_STAGE.get(name, 4)
        parts[name] = n_bytes / n_processes if is_cut else n_bytes
    return parts
