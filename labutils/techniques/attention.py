"""How a Hugging Face model attends: its own kernels, or one of torch's.

Taught in where_time_goes, section 4.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from labutils.config.choices import ATTENTION


def use_attention(model: nn.Module, kind: str) -> None:
    """Choose how a Hugging Face model attends; without padding no causal mask exists as a tensor,
    but in `eager`.

    `eager` is Hugging Face's own, with (T, T) matrices and mask. The others call torch's
    scaled_dot_product_attention here: its `flash` kernel, which raises RuntimeError where it does
    not exist, or the one that torch prefers (`auto`). Under a tracer (torch.compile, or on fake
    tensors) transformers' own call builds the mask as a tensor, which rules flash attention out;
    and before every step it looks for packed sequences on the device, for which the CPU waits.
    """
    from transformers import AttentionInterface

    only_flash = ATTENTION[kind].name == "flash"

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if only_flash else nullcontext():
            out = F.scaled_dot_product_attention(
                query,  # (B, heads, T, width of a head)
                key,
                value,
                attention_mask,
                dropout_p=dropout,
                is_causal=attention_mask is None and query.shape[2] > 1,
                scale=scaling,
            )
        return out.transpose(1, 2).contiguous(), None

    def with_4d_mask(module, args, inputs):
        """Join padding (B, T) and causality as (B, 1, T, T), True where a position may be read;
        none without padding.

        transformers hands a 4-D mask on as it is, and for an attention without a mask function
        builds none of its own.
        """
        padding = inputs.get("attention_mask")
        if padding is not None and padding.ndim == 2 and module.config._attn_implementation == name:
            keys = padding.shape[1]
            tokens = args[0] if args else inputs["input_ids"]  # fewer than keys if there is a cache
            causal = torch.ones(keys, keys, dtype=torch.bool, device=padding.device).tril()
            allowed = causal[-tokens.shape[1] :] & padding.bool()[:, None, None, :]
            inputs["attention_mask"] = allowed
        return args, inputs

    name = "eager" if kind == "eager" else f"labutils_{kind}"
    if name != "eager":
        AttentionInterface.register(name, attend)
        model.base_model.register_forward_pre_hook(with_4d_mask, with_kwargs=True)
    model.config._attn_implementation = name
