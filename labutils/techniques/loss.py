"""The next-token loss, summed over targets: of all logits at once, or chunk by chunk.

Taught in 02, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LossFn = Callable[[nn.Module, Any], torch.Tensor]  # (model, batch) → a scalar
IGNORED = -100  # the label that `cross_entropy` skips
FP16_ENLARGED = 64.0


def lm_loss_sum(
    model: nn.Module, batch: dict[str, torch.Tensor], chunk_tokens: int = 0
) -> torch.Tensor:
    """Return the next-token cross-entropy, *summed* over the targets of a `(B, T)` batch: a float32
    scalar.

    Labels are shifted here: position t is scored on token t + 1. A sum, not a mean, so that
    micro-batches of unequal lengths can be added and divided once by the total number of targets
    (transformers pull request 34191). With `chunk_tokens`, at most so many rows of logits exist at
    a time: see `ChunkedLoss`.
    """
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch.get("attention_mask")}
    # (B·T,); the last position has none
    targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()
    if not chunk_tokens:
        return _loss_of_logits(model(**inputs).logits.flatten(0, 1), targets)
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)  # (B·T, width)

    if torch.is_grad_enabled():
        return ChunkedLoss.apply(hidden, model.lm_head.weight, targets, chunk_tokens)
    pieces = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return sum(_loss_of_logits(model.lm_head(rows), some_targets) for rows, some_targets in pieces)


class ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of `hidden @ weight.T`, in chunks of rows whose logits die before the
    next are computed.

    The derivative of a row's loss by its logits is softmax minus one-hot: known as soon as the
    logits are. So each chunk's gradients are computed at once, in the forward pass, and nothing is
    computed twice; backward multiplies them by the derivative of what became of the loss. Kept in
    between are (N, width) and (vocabulary, width) numbers, not (N, vocabulary). In FP16 the
    gradients by logits are enlarged by a constant, or small ones would be lost before any loss
    scale comes. The idea is that of Liger Kernel's fused linear cross-entropy (Hsu et al. 2024,
    2410.10989).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_tokens):
        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        ctx.enlarged = FP16_ENLARGED if dtype == torch.float16 else 1.0
        with torch.autocast(device, enabled=False):
            x, w = hidden.to(dtype), weight.to(dtype)
            d_hidden, d_weight = torch.empty_like(x), torch.zeros_like(weight)
            loss = torch.zeros((), device=hidden.device)
            pieces = (tensor.split(chunk_tokens) for tensor in (x, targets, d_hidden))
            for rows, some_targets, d_rows in zip(*pieces, strict=True):
                valid = some_targets != IGNORED
                at = some_targets.clamp(min=0)[:, None]
                logits = (rows @ w.T).float()  # (rows, vocabulary)
                picked, largest = logits.gather(1, at), logits.amax(dim=1, keepdim=True)
                exponentials = logits.sub_(largest).exp_()  # in place: one such buffer is enough
                total = exponentials.sum(dim=1, keepdim=True)
                # not in place: torch.compile of 2.11 would lose the gradient, without a word
                loss = loss + ((total.log() + largest - picked)[:, 0] * valid).sum()
                softmax = exponentials.div_(total)
                d_logits = softmax.scatter_add_(1, at, torch.full_like(total, -1.0)).mul_(
                    ctx.enlarged * valid[:, None]
                )
                d_logits = d_logits.to(dtype)
                del logits, exponentials, softmax
                d_rows.copy_(d_logits @ w)
                d_weight += (d_logits.T @ rows).to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.hidden_dtype = hidden.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        d_hidden, d_weight = ctx.saved_tensors
        gradient = gradient / ctx.enlarged
        return d_hidden.to(ctx.hidden_dtype).mul_(gradient), d_weight.mul_(gradient), None, None


def _loss_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def count_targets(batch: dict[str, torch.Tensor]) -> int:
    """Return the number of targets in a `(B, T)` batch: what `lm_loss_sum` sums over."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
