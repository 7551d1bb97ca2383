"""Real processes on the CPU, joined by Gloo: each runs a file that a reader can change.

Taught in sharding, section 5.
"""

from __future__ import annotations

import linecache
import os
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labutils.files import runs_dir, write_atomically


def write_worker(name: str, *functions: Callable) -> Path:
    """Write the notebook cells that define some functions to runs/NAME/worker.py; return its path.

    So processes that run this file run what the reader wrote last.
    """
    cells = ["".join(linecache.getlines(each.__code__.co_filename)) for each in functions]
    path = runs_dir() / name / "worker.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(dict.fromkeys(cells))  # each cell once
    write_atomically(path, text.encode())
    return path


def in_processes(n_processes: int, script: Path, function: str, *args: Any) -> list[Any]:
    """Return what a function of a Python file returns in each of some CPU processes.

    Gloo joins them; what they print is not shown. Arguments and results are pickled. Starting
    takes some seconds. An error in a process ends all and is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = (n_processes, folder, script, function, args)
        torch.multiprocessing.spawn(_in_one, common, nprocs=n_processes)
        files = [Path(folder) / f"{rank}.pt" for rank in range(n_processes)]
        return [torch.load(file, weights_only=False) for file in files]  # ours, made just now


def _in_one(
    rank: int, n_processes: int, folder: str, script: Path, function: str, args: tuple
) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)  # Gloo greets on both; errors travel otherwise
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), n_processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_processes)
    try:
        result = runpy.run_path(str(script))[function](*args)
        torch.save(result, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
