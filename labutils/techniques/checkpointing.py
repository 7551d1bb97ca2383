"""What autograd keeps of GPT-2's blocks: everything, some of it, or next to nothing.

Taught in 03, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from labutils.config.choices import CHECKPOINTING

aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default]
ATTENTION = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class CheckpointedBlocks(nn.ModuleList):
    """GPT-2's blocks, run in units of one or several, as a policy says.

    Iterating gives callables that follow the policy. Names of parameters, indexing and len() are
    those of the plain list. Wherever gradients are recorded the policy is active, in `eval()` too:
    Hugging Face's own switch is then silently off.
    """

    def __init__(self, blocks: nn.ModuleList, policy: str, attention_dropout: float) -> None:
        super().__init__(blocks)
        self.policy = CHECKPOINTING[policy]
        # Attention that draws a dropout mask is not kept: skipping its draw would give the masks
        # that follow it other random numbers when they are computed again.
        self.kept = MATMULS if attention_dropout else MATMULS + ATTENTION
        self.on_host = on_host  # how what is kept goes to the host and comes back

    def __iter__(self) -> Iterator[Callable]:
        blocks = list(super().__iter__())
        size = self.policy.blocks_per_unit
        for start in range(0, len(blocks), size):
            yield partial(self._run, blocks[start : start + size])

    def _run(
        self, blocks: list[nn.Module], hidden: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        def unit(hidden: torch.Tensor) -> Any:
            for block in blocks:
                out = block(hidden, *args, **options)
                hidden = out[0] if isinstance(out, tuple) else out  # older transformers: a tuple
            return out

        if not torch.is_grad_enabled():
            return unit(hidden)
        if self.policy.to_host:
            with saved_tensors_hooks(self.on_host, lambda bring_back: bring_back()):
                return unit(hidden)
        # left out where nothing is selected: torch.compile refuses the default's own function
        contexts: dict[str, Any] = {}
        if self.policy.keeps_products:
            contexts["context_fn"] = partial(create_selective_checkpoint_contexts, self.kept)
        return checkpoint(unit, hidden, use_reentrant=False, preserve_rng_state=True, **contexts)


def set_checkpointing(model: nn.Module, policy: str) -> None:
    """Switch a GPT-2 of `build_model` to another policy; weights and their names stay.

    `policy` is a name of CHECKPOINTING. So two policies can be compared on one model, step by step.
    Raises ValueError for an unknown name.
    """
    is_on = CHECKPOINTING[policy].is_on
    blocks = nn.ModuleList(model.transformer.h.children())
    if is_on:
        blocks = CheckpointedBlocks(blocks, policy, model.config.attn_pdrop)
    model.transformer.h = blocks


def on_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a tensor to host memory and return a function that brings it back to its device.

    As `torch.autograd.graph.save_on_cpu`, but parameters, which live on the device anyway, stay
    there (their 16-bit copies under autocast travel). On a CPU host and device are one memory: the
    copy is made, and saves nothing.
    """
    if isinstance(tensor, nn.Parameter):
        return lambda: tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=True)  # same stream: what comes after sees the copy complete
    return partial(copy.to, tensor.device, non_blocking=True)
