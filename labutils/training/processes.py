"""Real processes on the CPU that exchange gradients through Gloo: what DDP makes, and how fast."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labutils.memory.tensors import flat_gradient
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.gpt2 import build_model


def compress_hook(dtype: torch.dtype) -> Callable[[Any, Any], torch.futures.Future]:
    """Return a DDP hook that exchanges gradients in `dtype`, like PyTorch's `*_compress_hook`.

    Those do the same, but DDP takes `bf16_compress_hook` only where PyTorch is built with NCCL.
    """

    def hook(_, bucket):  # DDP wants the types themselves as annotations, or none
        part = bucket.buffer().to(dtype).div_(dist.get_world_size())
        done = dist.all_reduce(part, async_op=True).get_future()
        return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))

    return hook


def in_processes(n_workers: int, work: Callable[..., Any], *args: Any) -> Any:
    """Return what `work(*args)` returns in the first of real CPU processes, joined by Gloo.

    `work` stands in a module, and its result can be pickled. Starting takes some seconds. An error
    in a process ends all and is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = (n_workers, folder, work, args)
        torch.multiprocessing.spawn(_in_one, common, nprocs=n_workers)
        return torch.load(Path(folder) / "result", weights_only=False)  # ours, made just now


def _in_one(rank: int, n_workers: int, folder: str, work: Callable[..., Any], args: tuple) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)  # Gloo greets on both; errors travel otherwise
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), n_workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_workers)
    try:
        result = work(*args)
        if rank == 0:
            torch.save(result, Path(folder) / "result")
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Given(nn.Module):
    """A module whose gradient is what the forward pass is given."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def mean_by_ddp(gradients: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return the mean that DDP makes of `gradients`, `(n_workers, n)`, sent in each of `dtypes`.

    For `in_processes`: process number i has row i. Float32 is what DDP does without a hook.
    """
    means = []
    for dtype in dtypes:
        parallel = DistributedDataParallel(_Given(gradients.shape[1]))
        if dtype != torch.float32:
            parallel.register_comm_hook(None, compress_hook(dtype))
        parallel(gradients[dist.get_rank()]).backward()
        means.append(parallel.module.weight.grad)
    return means


def mean_and_times(
    gradients: torch.Tensor, dtypes: Sequence[torch.dtype], n_pairs: int
) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Return `mean_by_ddp` and `overlap_times`: processes that start once are enough for both."""
    return mean_by_ddp(gradients, dtypes), *overlap_times(n_pairs)


def overlap_times(n_pairs: int) -> tuple[list[float], list[float]]:
    """Return the ms of n_pairs backward passes with the exchange inside, and with it at the end.

    For `in_processes`. The model is `gpt2-nano`. Both kinds exchange the same buckets' bytes; they
    take turns, and one pass of each is left out.
    """
    model = build_model("gpt2-nano", dropout=0.0)
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    ids = torch.arange(4 * 128).view(4, 128) % 251
    batch = {"input_ids": ids, "labels": ids}
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(2 * n_pairs + 2):
        is_late = i % 2 == 1
        parallel.zero_grad(set_to_none=True)
        with parallel.no_sync() if is_late else nullcontext():
            loss = lm_loss_sum(parallel, batch)
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
        if is_late:
            dist.all_reduce(flat_gradient(model))
        times[is_late].append(1000 * (time.perf_counter() - start))
    return times[0][1:], times[1][1:]
