"""What an operation has to do: arithmetic, and bytes that it reads and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from labutils.memory.kinds import ATTENTION_KINDS, BATCHED, PRODUCT, kind_of
from labutils.memory.ledger import OPTIMIZER

# Tensors that one launch of a kernel over lists takes, about (multi_tensor_apply.cuh).
TENSORS_PER_LAUNCH = 30
# Causal attention computes whole tiles of so many rows along the diagonal.
DIAGONAL = 128
SIXTEEN_BIT = torch.float16, torch.bfloat16
# What a call takes its host beside one by Python: autograd and autocast issue theirs without it.
# Beside 32 µs (see prediction.time.CALL_SECONDS) 1,248 calls of a backward pass took 20.9 ms there,
# and a cast 6 to 11 µs.
AUTOGRAD_SHARE, CAST_SHARE = 0.55, 0.3


@register_flop_formula(torch.ops.aten._grouped_mm)  # torch has none
def _grouped_mm_flops(a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of experts' matrix multiplications, of all rows of `a` together."""
    return 2 * math.prod(a_shape) * b_shape[-1]


@dataclass(slots=True, eq=False)
class Work:
    """One operation's work. `shape` is of a product's result: (batch, rows, columns).

    `reads` and `writes` are (storage or None, bytes).
    """

    kind: str
    n_bytes: int
    dtype: str = "float32"  # of what is multiplied
    flops: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)
    calls: float = 1  # launches
    host_share: float = 1.0  # of what a launch takes its host
    is_backward: bool = False
    has_16bit: bool = False  # among the numbers that it reads or writes
    reads: list[tuple[Any, int]] = field(default_factory=list)
    writes: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def only_once(self) -> bool:
        """Whether it makes the optimizer's state: later steps do without it."""
        categories = {storage.category for storage, _ in self.writes if storage}
        return not self.reads and categories == {OPTIMIZER}

    @property
    def host_calls(self) -> float:
        """What it takes its host, in calls that Python makes."""
        return self.calls * self.host_share

    @property
    def inner(self) -> float:
        """The length of the sums in a product."""
        outputs = math.prod(self.shape)
        return self.flops / (2 * outputs) if outputs else 0.0


def work_of(
    operation: Any, args: tuple, kwargs: dict[str, Any], out: Any, storage_of: Any
) -> Work | None:
    """Return an operation's work; None if it only looks at memory anew, or reserves it.

    `storage_of` takes a tensor and returns what stands for its storage, or None.
    """
    outputs, inputs = _tensors(out), _tensors((args, kwargs))
    parameters = operation._schema.arguments
    given = {part.name: value for part, value in zip(parameters, args, strict=False)} | kwargs
    in_place = [part.name for part in parameters if part.alias_info and part.alias_info.is_write]
    changed = _tensors([given.get(name) for name in in_place])
    known = {storage_of(tensor) for tensor in inputs}
    fresh = [tensor for tensor in outputs if storage_of(tensor) not in known]
    name = str(operation).removeprefix("aten.").partition(".")[0]
    if not changed and (not fresh or name.startswith(("empty", "new_empty"))):
        return None
    reads = _accesses(_read(name, inputs, outputs), storage_of)
    writes = _accesses([*fresh, *changed] if changed else outputs, storage_of)
    lists = [_tensors(argument) for argument in args if isinstance(argument, (list, tuple))]
    multiplied = given.get("query", given.get("mat2", inputs[-1] if inputs else None))
    kind = kind_of(name)
    # attention is counted here: torch 2.11's formula refuses queries that share keys
    formula = None if kind in ATTENTION_KINDS else flop_registry.get(operation.overloadpacket)
    work = Work(
        kind=kind,
        n_bytes=sum(n_bytes for _, n_bytes in reads + writes),
        dtype=str(getattr(multiplied, "dtype", torch.float32)).removeprefix("torch."),
        flops=int(formula(*args, **kwargs, out_val=out)) if formula else 0,
        calls=1 + max(map(len, lists), default=0) / TENSORS_PER_LAUNCH,
        host_share=_host_share(name),
        is_backward="backward" in name,
        has_16bit=any(tensor.dtype in SIXTEEN_BIT for tensor in (*inputs, *outputs)),
        reads=reads,
        writes=writes,
    )
    if work.kind in ATTENTION_KINDS:
        work.flops = _attention_flops(work, given)
    elif formula:
        *batch, rows, columns = outputs[0].shape
        # a layer written with einsum is a batch of one
        is_batched = math.prod(batch) > 1 and name != "_grouped_mm"
        work.kind = BATCHED if is_batched else PRODUCT
        work.shape = math.prod(batch), rows, columns
    return work


def _host_share(name: str) -> float:
    if name == "_to_copy":  # also those that Python issues
        return CAST_SHARE
    # autograd computes without gradients; what a checkpoint computes again, Python issues with them
    is_autograds = torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()
    return AUTOGRAD_SHARE if is_autograds else 1.0


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _read(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that are read whole: of a table only the rows that are looked up are."""
    if name == "embedding":
        return [outputs[0]]  # as many bytes as its result
    if name in ("nll_loss_forward", "nll_loss_backward"):
        return [tensor for tensor in inputs if tensor.ndim < 2]  # one entry of each row, or none
    if name in ("zeros_like", "ones_like", "full_like", "zero_", "fill_", "rand_like"):
        return []
    return inputs


def _accesses(tensors: list[torch.Tensor], storage_of: Any) -> list[tuple[Any, int]]:
    """Return (storage, bytes) of distinct tensors. What is broadcast counts as it is stored."""
    accesses = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        n_bytes = min(tensor.nbytes, storage.nbytes())
        place = storage._cdata, tensor.storage_offset()
        if place not in accesses or accesses[place][1] < n_bytes:
            accesses[place] = storage_of(tensor), n_bytes
    return list(accesses.values())


def _attention_flops(work: Work, given: dict[str, Any]) -> int:
    """Return its FLOPs. Of causal attention half is computed, and the diagonal's tiles."""
    n_keys, width = given["key"].shape[-2:]
    value_width = given["value"].shape[-1]
    widths = 3 * width + 2 * value_width if work.is_backward else width + value_width
    flops = 2 * given["query"].numel() // width * n_keys * widths
    if given.get("is_causal") and n_keys > 2 * DIAGONAL:
        flops = int(flops * (0.5 + DIAGONAL / n_keys))
    return flops
