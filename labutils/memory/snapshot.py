"""What was allocated, when and by which line: the history of one device's memory, recorded, saved,
read, drawn.

On CUDA the caching allocator keeps the history itself. On a CPU a dispatch mode notes each tensor
that an operation makes, and when its memory dies; what an operation allocates and frees inside
itself it does not see.
"""

from __future__ import annotations

import json
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

from labutils.files import write_atomically

PACKAGES = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)  # within the standard library's folder
TORCH, PYTHON = str(Path(torch.__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep
NO_LINE = "no line of Python: another thread, backward on a GPU for one"
MAX_EVENTS = 1_000_000


@dataclass
class Snapshot:
    """A history: `events[i]` is (block, bytes, line); bytes are negative where the block is freed.

    `lines` are the lines that allocated, as "function: source": the innermost that are neither torch's nor Python's.
    """

    method: str
    events: list[tuple[int, int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def alive(self) -> np.ndarray:
        """Return bytes alive after each event, by line:

        `(events, lines)`; what was there before is not counted.
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
        """Return {line: bytes still alive when the recording ended}, largest first:

        Where a leak is seen.
        """
        return self._by_line(self.alive()[-1]) if self.events else {}

    def _by_line(self, row: np.ndarray) -> dict[str, int]:
        return {self.lines[i]: int(row[i]) for i in np.argsort(-row, kind="stable") if row[i] > 0}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history as JSON."""
        facts = {"method": self.method, "lines": self.lines, "events": self.events}
        write_atomically(Path(path), json.dumps(facts).encode())


@contextmanager
def record(device: torch.device, limit_bytes: int = 0) -> Iterator[Snapshot]:
    """Record inside; the snapshot is complete when the block has ended, also by an exception.

    On a CPU, `limit_bytes` emulates a small memory: the operation after which more is alive raises
    `torch.OutOfMemoryError`. On CUDA use `memory.memory_limit`. Never time what is recorded.
    """
    if device.type != "cuda":
        mode = _Recorder(limit_bytes)
        with mode:
            yield mode.snapshot
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
    """Return a saved snapshot: JSON of ours, or a pickle of `torch.cuda.memory._dump_snapshot`.

    A pickle may hold plain data only: one that asks for a class or a function is refused, none of
    its code runs. Raises ValueError for a file that is neither.
    """
    raw = Path(path).read_bytes()
    name = Path(path).name
    try:
        if raw[:1] == b"{":
            facts = json.loads(raw)
            lines = [str(line) for line in facts["lines"]]
            events = [tuple(map(int, event)) for event in facts["events"]]
            if any(len(event) != 3 or not 0 <= event[2] < len(lines) for event in events):
                raise ValueError("its events do not fit its lines")
            return Snapshot(str(facts["method"]), events, lines)
        with Path(path).open("rb") as file:
            lines, events = _read_traces(_PlainUnpickler(file).load(), device_index)
        return Snapshot("CUDA allocator history", events, lines)
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"{name} is no snapshot that can be read: {type(error).__name__}: {error}"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and text; resolves no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a snapshot is plain data")


def _read_traces(
    raw: dict[str, Any], device_index: int
) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Return (lines, events) of the allocator's own format; `free_completed` is when the memory is
    free again.
    """
    lines: dict[str, int] = {}
    events, alive = [], {}
    for entry in raw["device_traces"][device_index]:
        if entry["action"] not in (
            "alloc",
            "free_completed",
        ):  # an `oom` entry, for one, has no address
            continue
        address, n_bytes = entry["addr"], entry["size"]
        if entry["action"] == "alloc":
            frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", [])]
            alive[address] = n_bytes, lines.setdefault(_own_line(frames), len(lines))
            events.append((address, n_bytes, alive[address][1]))
        elif address in alive:  # else it was there before the recording
            size, line = alive.pop(address)
            events.append((address, -size, line))
    return list(lines), events


def _own_line(frames: list[tuple[str, int, str]]) -> str:
    """Return the innermost line outside torch and Python, of (file, line, function) from the
    innermost outwards.
    """

    def is_outside(file: str) -> bool:
        in_python = file.startswith(PYTHON) and not file.startswith(PACKAGES)
        return not (in_python or file.startswith((TORCH, "<frozen", "<string>")))

    file, line, function = next((f for f in frames if is_outside(f[0])), ("", 0, NO_LINE))
    source = linecache.getline(file, line).strip()
    place = "cell" if function == "<module>" else function
    return f"{place}: {source[:60]}" if source else f"{place}, line {line}" if line else place


class _Recorder(TorchDispatchMode):
    """Notes birth and death of each storage that the operations inside make."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.snapshot, self.limit, self.total = (
            Snapshot("tensors made by CPU operations"),
            limit_bytes,
            0,
        )
        self.alive: dict[int, weakref.ref] = {}
        self.lines: dict[str, int] = {}
        self.n_blocks = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        before = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                self._see(tensor.untyped_storage())
        if self.limit and self.total > self.limit:
            raise torch.OutOfMemoryError(
                f"emulated: {self.total / 2**20:.1f} MiB alive, the limit is {self.limit / 2**20:.1f} MiB"
            )
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self.alive or not n_bytes:
            return
        frames = [(f.filename, f.lineno, f.name) for f in reversed(traceback.extract_stack()[:-2])]
        line = self.lines.setdefault(_own_line(frames), len(self.lines))
        self.snapshot.lines = list(self.lines)
        self.n_blocks += 1
        block = self.n_blocks
        self._note(block, n_bytes, line)

        def end(_: weakref.ref) -> None:
            del self.alive[key]
            self._note(block, -n_bytes, line)

        self.alive[key] = weakref.ref(storage, end)

    def _note(self, block: int, n_bytes: int, line: int) -> None:
        self.total += n_bytes
        self.snapshot.events.append((block, n_bytes, line))

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self.alive.clear()  # what dies later is no longer noted
