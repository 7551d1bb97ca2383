"""Kinds of operations, by what bounds their time.

Taught in where_time_goes, section 1.
"""

from __future__ import annotations

PRODUCT, BATCHED = "product", "batched product"
FLASH, EFFICIENT = "flash attention", "efficient attention"
ELEMENTS, FUNCTIONS = "elementwise", "elementwise function"
ROWS, RANDOM, UPDATE = "norm or softmax", "random numbers", "optimizer update"
# Matrix products are these two; attention is computed by fused kernels.
PRODUCT_KINDS, ATTENTION_KINDS = (PRODUCT, BATCHED), (FLASH, EFFICIENT)

# By an operation's name. All others are elementwise.
_KINDS = {
    PRODUCT: ("mm", "addmm"),
    BATCHED: ("bmm", "baddbmm"),
    FUNCTIONS: ("tanh", "exp", "gelu", "gelu_backward", "silu", "silu_backward", "erf", "log"),
    ROWS: (
        "native_layer_norm",
        "native_layer_norm_backward",
        "_softmax",
        "_safe_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "native_group_norm",
        "native_group_norm_backward",
    ),
    RANDOM: ("native_dropout", "bernoulli_"),
    UPDATE: ("_fused_adamw_", "_fused_adam_", "_fused_sgd_"),
}


def kind_of(name: str) -> str:
    """Return the kind of an operation by its name, without `aten::`."""
    if "attention" in name:
        return EFFICIENT if "efficient" in name else FLASH
    for kind, words in _KINDS.items():
        if name in words:
            return kind
    return ELEMENTS
