"""A memory history: what was allocated, when, and by which line.

On CUDA the caching allocator keeps the history itself, and torch writes it to a file. On a CPU a
dispatch mode notes each tensor that an operation makes, and when its memory dies. It does not see
what an operation allocates and frees inside itself.

Taught in 04, section 3.
"""

from __future__ import annotations

import linecache
import os
import pickle
import re
import sysconfig
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

# private, and the only way to see each operation below autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # private: tensors in any nest of containers

# of any machine, and in a recording that has been slimmed
TORCH = re.compile(r"(^|[/\\](site|dist)-packages[/\\])torch[/\\]")
PACKAGE = re.compile(r"[/\\](site|dist)-packages[/\\]")
PYTHON = re.compile(r"[/\\](lib[/\\]python3\.\d+|Python3\d+[/\\]Lib)[/\\]|^<(frozen|string>)")
STDLIB = sysconfig.get_path("stdlib") + os.sep
NO_LINE = "no line of Python: another thread, backward on a GPU for one"
NO_STACKS = "no stacks were recorded"

Event = Mapping[str, Any]  # of `device_traces` in `torch.cuda.memory._dump_snapshot`


@dataclass
class Snapshot:
    """A history: `events[i]` is (bytes, line); bytes are negative where they are freed.

    `lines` are the lines that allocated, as "function: source". Each is the innermost line that is
    neither torch's nor Python's.
    """

    method: str
    events: list[tuple[int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    alive_bytes: int = 0

    def add(self, n_bytes: int, line: str) -> None:
        """Note that a line allocated memory, or, with negative bytes, that this memory is free."""
        if line not in self.lines:
            self.lines.append(line)
        self.events.append((n_bytes, self.lines.index(line)))
        self.alive_bytes += n_bytes

    def alive(self) -> np.ndarray:
        """Return the bytes alive after each event by line, `(events, lines)`.

        What was there before the recording is not counted.
        """
        changes = np.zeros((len(self.events), len(self.lines)), dtype=np.int64)
        for i, (n_bytes, line) in enumerate(self.events):
            changes[i, line] = n_bytes
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


def load(path: str | os.PathLike[str], device_index: int = 0) -> Snapshot:
    """Return the snapshot in a pickle of `torch.cuda.memory._dump_snapshot`.

    It may hold plain data only. A pickle that asks for a class or a function raises UnpicklingError
    before any of its code runs, and so does a file that is no pickle. Raises ValueError for a
    pickle that is no snapshot, and for one without a history of this device.
    """
    trace = _trace_of(Path(path), device_index)
    has_stacks = any(event.get("frames") for event in trace)
    snapshot = Snapshot("CUDA allocator history")
    alive: dict[int, tuple[int, str]] = {}  # address: (bytes, line)
    for event in trace:
        # Memory is free again at `free_completed`. An `oom` event, for one, has no address.
        if event["action"] == "alloc":
            frames = [
                (frame["filename"], frame["line"], frame.get("name", "?"))
                for frame in event.get("frames") or []
            ]
            line = own_line(frames) if has_stacks else NO_STACKS
            alive[event["addr"]] = event["size"], line
            snapshot.add(*alive[event["addr"]])
        elif event["action"] == "free_completed" and event["addr"] in alive:
            n_bytes, line = alive.pop(event["addr"])  # else it was there before the recording
            snapshot.add(-n_bytes, line)
    return snapshot


def _trace_of(path: Path, device_index: int) -> list[Event]:
    """Return the history of one device in a file. Raises what `load` raises."""
    with path.open("rb") as file:
        try:
            content = _PlainUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError) as error:
            raise pickle.UnpicklingError(f"{path} is no snapshot: {error}") from None
    if not isinstance(content, dict) or "device_traces" not in content:
        raise ValueError(f"{path} is no snapshot of torch.cuda.memory._dump_snapshot")
    traces = content["device_traces"]
    if device_index < len(traces) and traces[device_index]:
        return traces[device_index]
    others = [i for i, trace in enumerate(traces) if trace]
    if others:
        raise ValueError(f"{path}: device {device_index} has no events: device_index={others[0]}")
    raise ValueError(
        f"{path} has no history: torch.cuda.memory._record_memory_history() comes before the step"
    )


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and text; resolves no class and no function."""

    # the only way from a pickle to code: whatever it would run or make, it asks for here by name
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a snapshot is plain data")


def own_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return "function: source" of the innermost line outside torch, Python and other packages.

    A frame is (file, line, function); the innermost comes first. Frames of C++ are passed over. If
    all are of packages, it is the innermost of these. A recording of another machine has no source
    here: then its file and line stand for it.
    """
    of_python = [frame for frame in frames if frame[0].endswith((".py", ">"))]
    of_packages = [frame for frame in of_python if PACKAGE.search(frame[0])]
    own = [frame for frame in of_python if frame not in of_packages and not _is_python(frame[0])]
    for file, line, function in [*own, *of_packages]:
        if TORCH.search(file):
            continue
        place = "cell" if function == "<module>" else function
        is_here = file.startswith("<") or Path(file).is_absolute()
        source = linecache.getline(file, line).strip() if is_here else ""
        if source:
            return f"{place}: {source[:60]}"
        name = "/".join(re.split(r"[/\\]", file)[-2:])
        return f"{place}, {name}:{line}" if line else place
    return NO_LINE


def _is_python(file: str) -> bool:
    """Tell whether a file is of the standard library, of this machine or of another one."""
    return file.startswith(STDLIB) or bool(PYTHON.search(file))


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storage of each tensor in a nest of lists, tuples and dicts."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]


@contextmanager
def record(limit_bytes: int = 0) -> Iterator[Snapshot]:
    """Record what operations on a CPU make inside; the snapshot grows until the block ends.

    `limit_bytes` emulates a small memory: the operation after which more is alive raises
    `torch.OutOfMemoryError`. Never time what is recorded.
    """
    recorder = _AllocationRecorder(limit_bytes)
    try:
        with recorder:
            yield recorder.snapshot
    finally:
        recorder.alive.clear()  # what dies later is no longer noted


class _AllocationRecorder(TorchDispatchMode):
    """Note birth and death of each storage that the operations inside make.

    `_cdata` is private: the address of the storage itself, which tells it from others also where
    it has no memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.snapshot = Snapshot("tensors made by CPU operations")
        self.limit_bytes = limit_bytes
        self.alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        # a view, or a result in place, has the storage of an input, and allocates nothing
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:
                self._see(storage)
        if self.limit_bytes and self.snapshot.alive_bytes > self.limit_bytes:
            alive_mib, limit_mib = self.snapshot.alive_bytes / 2**20, self.limit_bytes / 2**20
            raise torch.OutOfMemoryError(
                f"emulated: {alive_mib:.1f} MiB alive, the limit is {limit_mib:.1f} MiB"
            )
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self.alive or not n_bytes:
            return
        stack = traceback.extract_stack()[:-2]  # without this method and __torch_dispatch__
        line = own_line((f.filename, f.lineno, f.name) for f in reversed(stack))
        self.snapshot.add(n_bytes, line)

        def end(_: weakref.ref) -> None:
            del self.alive[key]
            self.snapshot.add(-n_bytes, line)

        # torch keeps one Python object for a storage until its memory dies, so `end` comes then
        self.alive[key] = weakref.ref(storage, end)
