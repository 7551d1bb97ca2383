"""The exchange of gradients between workers: its bytes, its order of additions, its rounding.

Many workers are simulated in one process. `processes.py` checks this with real ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ORDERS = ("ring", "tree")
# Root mean square of the error when a tensor is rounded, relative to its norm, in units of eps / 2.
# An error is uniform within half a spacing; sizes are taken as uniform on a logarithmic scale.
ONE_ROUNDING_OF_NORM = 2 / math.sqrt(12) / math.sqrt(3 / (2 * math.log(2)))


def ring_bytes(n_bytes: float, n_workers: int) -> float:
    """Return the bytes that each worker of a ring sends to sum buffers of `n_bytes`."""
    return 2 * (n_workers - 1) / n_workers * n_bytes


def summed(parts: torch.Tensor, order: str) -> torch.Tensor:
    """Return the sum over workers of `parts`, `(n_workers, n)`: `(n,)`, in the dtype of `parts`.

    Each addition is rounded to this dtype. In a "ring", part c of n begins at worker c and visits
    the others in turn. In a "tree", neighbours are added, then their sums, and so on. Raises
    ValueError for another order.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; choose from {', '.join(ORDERS)}")
    return _by_ring(parts) if order == "ring" else _by_tree(parts)


def _by_ring(parts: torch.Tensor) -> torch.Tensor:
    n_workers, done = len(parts), []
    for c, chunk in enumerate(parts.tensor_split(n_workers, dim=1)):
        total = chunk[c]
        for hop in range(1, n_workers):
            total = total + chunk[(c + hop) % n_workers]
        done.append(total)
    return torch.cat(done)


def _by_tree(parts: torch.Tensor) -> torch.Tensor:
    while len(parts) > 1:
        pairs = parts[0:-1:2] + parts[1::2]
        parts = torch.cat([pairs, parts[2 * len(pairs) :]])  # an odd one waits for the next level
    return parts[0]


def exchanged_mean(
    gradients: torch.Tensor, dtype: torch.dtype, order: str = "ring", scale: float = 1.0
) -> torch.Tensor:
    """Return the workers' mean gradient as DDP's hooks compute it, float32, `(n,)`.

    `gradients` are float32, `(n_workers, n)`. They are multiplied by `scale`, rounded to `dtype`,
    divided by the number of workers (against overflow) and summed. Then `scale` is taken out.
    """
    parts = (gradients * scale).to(dtype).div_(len(gradients))
    return summed(parts, order).float() / scale


def predicted_error(
    n_workers: int, eps: float, order: str, true: float, noise: float, is_cast: bool = True
) -> float:
    """Return the predicted error of the sum, relative to its norm.

    A sum of k gradients has the squared norm k² `true` + k `noise`: |G|² and S of one worker. Every
    rounding adds an independent error of ONE_ROUNDING_OF_NORM · `eps` / 2, relative to the norm.
    `is_cast`: the gradients were rounded, too. Underflow and overflow do not count.
    """

    def norm2(k: int) -> float:
        return k * k * true + k * noise

    rounded = n_workers * norm2(1) if is_cast else 0.0
    sizes = [1] * n_workers
    while len(sizes) > 1:
        width = 2 if order == "ring" else len(sizes)  # the ring grows one sum, the tree all
        pairs = [a + b for a, b in zip(sizes[0:width:2], sizes[1:width:2], strict=False)]
        rounded += sum(map(norm2, pairs))
        sizes = pairs + sizes[2 * len(pairs) :]
    return ONE_ROUNDING_OF_NORM * eps / 2 * math.sqrt(rounded / norm2(n_workers))


@contextmanager
def _alone() -> Iterator[None]:
    """Be the only process of a group: DDP works, and nothing goes over a network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def handed_over(
    module: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    compress: torch.dtype | None = None,
    bucket_mib: float = 25,
) -> tuple[dict[str, int], list[float]]:
    """Return what DDP hands to the all-reduce in one backward pass, and when.

    The first is {dtype: bytes}, after a cast to `compress` if given. The second is, for each
    bucket, the share of gradients that backward had computed by then. The passes are two: DDP sorts
    its buckets after the first. The gradients of `module` are replaced.
    """
    counted: Counter[str] = Counter()
    ready: list[float] = []
    seen: set[int] = set()

    def count(_, bucket):  # DDP wants the types themselves as annotations, or none
        buffer = bucket.buffer()
        sent = buffer.to(compress or buffer.dtype)
        counted[str(sent.dtype).removeprefix("torch.")] += sent.nbytes
        ready.append(len(seen) / n_tensors)
        future = torch.futures.Future()
        future.set_result(buffer)
        return future

    parameters = [p for p in module.parameters() if p.requires_grad]
    n_tensors = len(parameters)
    handles = []
    for p in parameters:  # before DDP's own hooks, so that a gradient counts before it is sent
        handles.append(p.register_post_accumulate_grad_hook(lambda p: seen.add(id(p))))
    with _alone():
        parallel = DistributedDataParallel(module, bucket_cap_mb=bucket_mib)
        parallel.register_comm_hook(None, count)
        for _ in range(2):
            counted.clear(), ready.clear(), seen.clear()
            module.zero_grad(set_to_none=True)
            loss_of(parallel).backward()
    for handle in handles:
        handle.remove()
    return dict(counted), ready
