"""What an operation has to do: arithmetic, and bytes that it reads and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from labutils.memory.kinds import ATTENTION_KINDS, BATCHED, PRODUCT, kind_of

# Tensors that one launch of a kernel over lists takes, about (multi_tensor_apply.cuh).
TENSORS_PER_LAUNCH = 30
# Causal attention computes whole tiles of so many rows along the diagonal.
DIAGONAL = 128


@dataclass(slots=True)
class Work:
    """One operation's work. `shape` is of a product's result: (batch, rows, columns).

    `fused_bytes` and `fused_calls` are what is left where neighbours become one kernel: see
    `prediction.fusion`. `reads` and `writes` are (storage or None, bytes).
    """

    kind: str
    n_bytes: int
    dtype: str = "float32"  # of what is multiplied
    flops: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)
    calls: float = 1  # launches
    is_backward: bool = False
    only_once: bool = False  # it makes what lasts: later steps do without it
    fused_bytes: int = 0
    fused_calls: float = 1
    reads: list[tuple[Any, int]] = field(default_factory=list)
    writes: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def inner(self) -> float:
        """The length of the sums in a product."""
        outputs = math.prod(self.shape)
        return self.flops / (2 * outputs) if outputs else 0.0


def between(low: Work | None, high: Work | None, ratio: int) -> Work | None:
    """Return the work that lies `ratio` times as far from `low` as `high` does: all is affine."""
    if high is None:
        return None
    low = low or high

    def at(a: float, b: float) -> float:
        return a + ratio * (b - a)

    batch, rows, columns = map(at, low.shape, high.shape)
    return Work(
        high.kind,
        at(low.n_bytes, high.n_bytes),
        high.dtype,
        at(low.flops, high.flops),
        (batch, rows, columns),
        at(low.calls, high.calls),
        high.is_backward,
        high.only_once,
        at(low.fused_bytes, high.fused_bytes),
        at(low.fused_calls, high.fused_calls),
    )


def work_of(
    operation: Any, args: tuple, kwargs: dict[str, Any], out: Any, storage_of: Any
) -> Work | None:
    """Return an operation's work; None if it only looks at memory anew, or reserves it.

    `storage_of` takes a tensor and returns what stands for its storage, or None.
    """
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    changed = _changed(operation, args, kwargs)
    name = str(operation).removeprefix("aten.").partition(".")[0]
    if not outputs and not changed:
        return None
    if not changed and (name.startswith(("empty", "new_empty")) or _are_views(outputs, inputs)):
        return None
    reads = _accesses(_read(name, inputs, outputs), storage_of)
    fresh = outputs if not changed else [one for one in outputs if _is_new(one, inputs)]
    writes = _accesses([*fresh, *changed], storage_of)
    work = Work(
        kind=kind_of(name),
        n_bytes=sum(n for _, n in reads) + sum(n for _, n in writes),
        dtype=str(inputs[-1].dtype).removeprefix("torch.") if inputs else "float32",
        is_backward="backward" in name,
        calls=1 + _longest_list(args) / TENSORS_PER_LAUNCH,
        reads=reads,
        writes=writes,
    )
    formula = flop_registry.get(operation.overloadpacket)
    if formula:
        work.flops = int(formula(*args, **kwargs, out_val=out))
    if work.kind in ATTENTION_KINDS:
        _describe_attention(work, name, operation, args, kwargs, outputs)
    elif formula:
        work.kind = PRODUCT
        if outputs[0].ndim >= 2:
            *batch, rows, columns = outputs[0].shape
            work.shape = (math.prod(batch), rows, columns)
            work.kind = BATCHED if batch else PRODUCT
    return work


def _longest_list(args: tuple) -> int:
    """Return the length of the longest list of tensors, 0 if there is none."""
    longest = 0
    for argument in args:
        if isinstance(argument, (list, tuple)):
            longest = max(longest, sum(isinstance(one, torch.Tensor) for one in argument))
    return longest


def _changed(operation: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place."""
    found = []
    for i, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _is_new(output: torch.Tensor, inputs: list[torch.Tensor]) -> bool:
    key = output.untyped_storage()._cdata
    return all(one.untyped_storage()._cdata != key for one in inputs)


def _are_views(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    return not any(_is_new(one, inputs) for one in outputs)


def _read(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that are read whole: of a table only the rows that are looked up are."""
    if name == "embedding":
        return [outputs[0]]  # as many bytes as its result
    if name in ("nll_loss_forward", "nll_loss_backward"):
        return [one for one in inputs if one.ndim < 2]  # one entry of each row, or none
    if name in ("zeros_like", "ones_like", "full_like", "zero_", "fill_", "rand_like"):
        return []
    return inputs


def _accesses(tensors: list[torch.Tensor], storage_of: Any) -> list[tuple[Any, int]]:
    """Return (storage, bytes) of distinct tensors. What is broadcast counts as it is stored."""
    found = {}
    for tensor in tensors:
        stored = tensor.untyped_storage().nbytes()
        n_bytes = min(tensor.numel() * tensor.element_size(), stored)
        key = tensor.untyped_storage()._cdata, tensor.storage_offset()
        if key not in found or found[key][1] < n_bytes:
            found[key] = storage_of(tensor), n_bytes
    return list(found.values())


def _describe_attention(
    work: Work, name: str, operation: Any, args: tuple, kwargs: dict[str, Any], outputs: Any
) -> None:
    """Say which kernel it is. Of causal attention half is computed, and the diagonal's tiles."""
    query, key = args[1:3] if work.is_backward else args[:2]
    batch, heads, n_queries, width = query.shape
    n_keys = key.shape[-2]
    if not work.flops:  # the CPU's kernel has no formula
        products = 5 if work.is_backward else 2
        work.flops = products * 2 * batch * heads * n_queries * n_keys * width
    if _argument(operation, "is_causal", args, kwargs):
        share = 0.5 + DIAGONAL / n_keys if n_keys > 2 * DIAGONAL else 1.0
        work.flops = int(work.flops * share)
    work.shape = (batch * heads, n_queries, width)
    work.dtype = str(query.dtype).removeprefix("torch.")


def _argument(operation: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    for i, argument in enumerate(operation._schema.arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    return None
