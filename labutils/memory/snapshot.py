"""A memory history: what was allocated, when, and by which line.

It is recorded on one device. On CUDA the caching allocator keeps the history
itself. On a CPU a dispatch mode notes each tensor that an operation makes, and when its memory
dies. It does not see what an operation allocates and frees inside itself.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sysconfig
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TORCH = str(Path(torch.__file__).parent) + os.sep
PYTHON = sysconfig.get_path("stdlib") + os.sep
PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))  # they are inside PYTHON
NO_LINE = "no line of Python: another thread, backward on a GPU for one"
MAX_EVENTS = 1_000_000
UNREADABLE = (
    *(AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError),
    pickle.UnpicklingError,
)


@dataclass
class Snapshot:
    """A history: `events[i]` is (allocation, bytes, line); bytes are negative where it is freed.

    `lines` are the lines that allocated, as "function: source". Each is the innermost line that is
    neither torch's nor Python's.
    """

    method: str
    events: list[tuple[int, int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def alive(self) -> np.ndarray:
        """Return the bytes alive after each event by line, `(events, lines)`.

        What was there before the recording is not counted.
        """
        changes = np.zeros((len(self.events), len(self.lines)), dtype=np.int64)
        for i, (_, n_bytes, line) in enumerate(self.events):
            changes[i, line] += n_bytes
        return changes.cumsum(axis=0)

    def at_peak(self) -> dict[str, int]:
        """Return {line: bytes alive when most was alive}, largest first."""
        alive = self.alive()
        return self._by_line(alive[alive.sum(axis=1).argmax()]) if len(alive) else {}

    def at_end(self) -> dict[str, int]:
        """Return {line: bytes alive when the recording ended}, largest first: a leak shows here."""
        return self._by_line(self.alive()[-1]) if self.events else {}

    def _by_line(self, row: np.ndarray) -> dict[str, int]:
        largest_first = np.argsort(-row, kind="stable")
        return {self.lines[i]: int(row[i]) for i in largest_first if row[i] > 0}


@contextmanager
def record(device: torch.device, limit_bytes: int = 0) -> Iterator[Snapshot]:
    """Record inside; the snapshot is complete when the block has ended, also by an exception.

    On a CPU, `limit_bytes` emulates a small memory: the operation after which more is alive raises
    `torch.OutOfMemoryError`. On CUDA use `memory.memory_limit`. Never time what is recorded.
    """
    if device.type != "cuda":
        recorder = _AllocationRecorder(limit_bytes)
        with recorder:
            yield recorder.snapshot
        return
    found = Snapshot("CUDA allocator history")
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)
    try:
        yield found
    finally:
        raw = torch.cuda.memory._snapshot(device)
        torch.cuda.memory._record_memory_history(enabled=None)
        index = torch.cuda.current_device() if device.index is None else device.index
        found.lines, found.events = _read_traces(raw, index)


def load(path: str | os.PathLike[str], device_index: int = 0) -> Snapshot:
    """Return the snapshot in a pickle of `torch.cuda.memory._dump_snapshot`.

    It may hold plain data only. A pickle that asks for a class or a function is refused, and none
    of its code runs. Raises ValueError for a file that is no such pickle.
    """
    path = Path(path)
    try:
        plain_data = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        lines, events = _read_traces(plain_data, device_index)
    except UNREADABLE as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path.name} is no snapshot that can be read: {problem}") from error
    return Snapshot("CUDA allocator history", events, lines)


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and text; resolves no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a snapshot is plain data")


def _read_traces(
    raw: dict[str, Any], device_index: int
) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Return (lines, events) of the allocator's own format."""
    lines: dict[str, int] = {}
    events: list[tuple[int, int, int]] = []
    alive: dict[int, tuple[int, int]] = {}  # address: (bytes, line)
    for entry in raw["device_traces"][device_index]:
        # Memory is free again at `free_completed`. An `oom` entry, for one, has no address.
        if entry["action"] not in ("alloc", "free_completed"):
            continue
        address, n_bytes = entry["addr"], entry["size"]
        if entry["action"] == "alloc":
            frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", [])]
            # the others are C++
            frames = [frame for frame in frames if frame[0].endswith((".py", ">"))]
            line = lines.setdefault(_own_line(frames), len(lines))
            alive[address] = n_bytes, line
            events.append((address, n_bytes, line))
        elif address in alive:  # else it was there before the recording
            allocated_bytes, line = alive.pop(address)
            events.append((address, -allocated_bytes, line))
    return list(lines), events


def _own_line(frames: list[tuple[str, int, str]]) -> str:
    """Return the innermost line outside torch and Python.

    A frame is (file, line, function); the innermost comes first.
    """
    for frame in frames:
        if _is_own(frame[0]):
            return _described(*frame)
    return NO_LINE


def _is_own(file: str) -> bool:
    if file.startswith(PYTHON) and not file.startswith(PACKAGES):
        return False
    if "/site-packages/torch/" in file.replace(os.sep, "/"):  # of another machine
        return False
    return not file.startswith((TORCH, "torch/", "<frozen", "<string>"))


def _described(file: str, line: int, function: str) -> str:
    is_here = file.startswith("<") or Path(file).is_absolute()  # else of another machine
    source = linecache.getline(file, line).strip() if is_here else ""
    place = "cell" if function == "<module>" else function
    if source:
        return f"{place}: {source[:60]}"
    return f"{place}, line {line}" if line else place


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storage of each tensor in a nest of lists, tuples and dicts."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]


class _AllocationRecorder(TorchDispatchMode):
    """Note birth and death of each storage that the operations inside make."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.snapshot = Snapshot("tensors made by CPU operations")
        self.limit_bytes = limit_bytes
        self.alive_bytes = 0
        self.alive: dict[int, weakref.ref] = {}
        self.lines: dict[str, int] = {}
        self.n_allocations = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:
                self._see(storage)
        if self.limit_bytes and self.alive_bytes > self.limit_bytes:
            alive_mib, limit_mib = self.alive_bytes / 2**20, self.limit_bytes / 2**20
            raise torch.OutOfMemoryError(
                f"emulated: {alive_mib:.1f} MiB alive, the limit is {limit_mib:.1f} MiB"
            )
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self.alive or not n_bytes:
            return
        stack = traceback.extract_stack()[:-2]  # without this method and __torch_dispatch__
        frames = [(f.filename, f.lineno, f.name) for f in reversed(stack)]
        line = self.lines.setdefault(_own_line(frames), len(self.lines))
        self.snapshot.lines = list(self.lines)
        self.n_allocations += 1
        allocation = self.n_allocations
        self._note(allocation, n_bytes, line)

        def end(_: weakref.ref) -> None:
            del self.alive[key]
            self._note(allocation, -n_bytes, line)

        self.alive[key] = weakref.ref(storage, end)

    def _note(self, allocation: int, n_bytes: int, line: int) -> None:
        self.alive_bytes += n_bytes
        self.snapshot.events.append((allocation, n_bytes, line))

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self.alive.clear()  # what dies later is no longer noted
