"""What a precision means for torch: autocast, a GradScaler, the TF32 switch.

Taught in 01, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from labutils.config.choices import PRECISIONS


def products_dtype(precision: str) -> torch.dtype:
    """Return the dtype whose numbers a precision multiplies."""
    return getattr(torch, PRECISIONS[precision].products)


def weights_dtype(precision: str) -> torch.dtype:
    """Return the dtype in which a precision keeps weights and gradients."""
    return getattr(torch, PRECISIONS[precision].weights)


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Return the context for forward pass and loss: `torch.autocast`, or one that does nothing.

    Like all functions here, it raises ValueError for a name that is no precision.
    """
    if PRECISIONS[precision].autocast:
        return torch.autocast(device.type, dtype=products_dtype(precision))
    return nullcontext()


def grad_scaler(
    precision: str,
    device: torch.device,
    init_scale: float = 65536.0,
    growth_interval: int = 2000,
) -> torch.amp.GradScaler:
    """Return a GradScaler. It passes everything through where the precision needs no loss scale."""
    return torch.amp.GradScaler(
        device.type,
        init_scale=init_scale,
        growth_interval=growth_interval,
        enabled=PRECISIONS[precision].loss_scale,
    )


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Let CUDA's float32 products round their inputs to TF32 inside the block, or not.

    The setting is put back after. No effect on the CPU.
    """
    # once `fp32_precision` is set, torch refuses to read the older `allow_tf32`
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if enabled else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
