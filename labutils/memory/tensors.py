"""Which bytes tensors take, what autograd keeps of them, and where the loss begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from labutils.techniques.loss import lm_loss_sum
from labutils.techniques.precision import autocast

TOKENS, ATTENTION_MATRICES = "token ids, masks", "attention matrices (length × length)"
COPIES, LOGITS, OTHERS = "16-bit copies of weights", "logits", "all other activations"


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each storage once."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps. For Adam: two moments per parameter."""
    return [
        t
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    ]


def flat_gradient(module: nn.Module) -> torch.Tensor:
    """Return the gradients of all parameters one behind the other: `(n_parameters,)`, a copy.

    Raises ValueError if a parameter has none.
    """
    parts = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient: call backward() first")
        parts.append(parameter.grad.flatten())
    return torch.cat(parts)


@contextmanager
def saved_for_backward(
    module: nn.Module, label: Callable[[torch.Tensor], Hashable] = lambda tensor: "kept"
) -> Iterator[Counter]:
    """Count the bytes that autograd keeps for the backward pass of what is computed inside.

    Yields a Counter, `{label(tensor): bytes}`; its `total()` is the sum. Each storage counts once,
    under the first tensor that is saved of it. Weights of `module` do not count: they stand
    anyway. Keep the result of the forward pass until the block ends: if its graph is freed
    earlier, another tensor can take the place of a counted one and is missed.
    """
    seen = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: Counter = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[label(tensor)] += storage.nbytes()
        return tensor.detach()  # the tensor itself would be held by its own graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def kept_by_kind(
    model: nn.Module, batch: dict[str, torch.Tensor], precision: str
) -> dict[tuple[str, str], int]:
    """Return {(kind, dtype): bytes} that autograd keeps of a forward pass and loss of GPT-2.

    `batch["input_ids"]` is `(B, T)`, on the model's device. Weights themselves do not count, their
    16-bit copies do. A kind is recognised by shape, so B·T must not be a side of a weight matrix.
    Raises ValueError if it is.
    """
    n_tokens, seq_len = batch["input_ids"].numel(), batch["input_ids"].shape[1]
    shapes = {tuple(sorted(p.shape)) for p in model.parameters()}
    if any(n_tokens in shape for shape in shapes):
        raise ValueError(f"{n_tokens} tokens: as many as a weight has rows; take another batch")
    label = partial(_kind_and_dtype, weight_shapes=shapes, seq_len=seq_len, model=model)
    with saved_for_backward(model, label) as kept, autocast(precision, batch["input_ids"].device):
        # alive until the count is done: its graph holds the tensors
        loss = lm_loss_sum(model, batch)
    del loss
    return dict(kept)


def _kind_and_dtype(
    tensor: torch.Tensor, weight_shapes: set[tuple[int, ...]], seq_len: int, model: nn.Module
) -> tuple[str, str]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point():
        return TOKENS, dtype
    # before the logits: a transposed copy of the output weights ends in the vocabulary, too
    if tensor.dim() == 2 and tuple(sorted(tensor.shape)) in weight_shapes:
        return COPIES, dtype
    if tensor.dim() >= 3 and tensor.shape[-2:] == (seq_len, seq_len):
        return ATTENTION_MATRICES, dtype
    if tensor.dim() and tensor.shape[-1] == model.config.vocab_size:
        return LOGITS, dtype
    return OTHERS, dtype


def on_loss_begin(model: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call back where the forward phase ends: behind the last block of a Hugging Face model (its
    head makes logits), behind a whole module that has no `base_model`.
    """
    return getattr(model, "base_model", model).register_forward_hook(lambda *_: call())
