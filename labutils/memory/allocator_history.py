"""The history that torch's CUDA allocator writes: a pickle of plain data, and the blocks in it.

A block is one piece of memory from its allocation to the moment when it is free again.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALLOCATED, FREED = "alloc", "free_completed"  # a block is free again at the second
NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+Backward\d*|AccumulateGrad)\b")
OPERATION = re.compile(r"at::_ops::(\w+)::call\(")
WORKSPACE = re.compile(r"at::cuda::\w*Workspace\w*")
ENGINE = "torch::autograd::Engine::"
UNKNOWN = "no frames recorded"
BEFORE = "allocated before the recording"
KINDS = (
    *("parameters", "forward and others", "backward", "optimizer"),
    *("library workspaces", BEFORE),
)


@dataclass(frozen=True)
class Block:
    """A block of `n_bytes`, alive from event `start` until before event `end`.

    `end` is the number of events for what is alive at the end. `kind` says which part of a step
    asked for it, as far as its frames tell. `frames` are texts, the innermost first.
    """

    start: int
    end: int
    n_bytes: int
    kind: str
    frames: tuple[str, ...]


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and text; resolves no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a snapshot is plain data")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `torch.cuda.memory._dump_snapshot` wrote; none of the file's code runs.

    Raises UnpicklingError, or another error of pickle, for anything but plain data.
    """
    with Path(path).open("rb") as file:
        return _PlainUnpickler(file).load()


def blocks(raw: Mapping[str, Any], device_index: int = 0) -> tuple[list[Block], int]:
    """Return (blocks in order of their allocation, number of events) of a history.

    An event is an allocation, or a block that is free again. What was there before the recording
    is a block too: its size stands in its free, or in the segments at the end.
    """
    entries = raw["device_traces"][device_index]
    events = [entry for entry in entries if entry["action"] in (ALLOCATED, FREED)]
    alive: dict[int, tuple[int, Mapping[str, Any]]] = {}
    found = []
    for i, entry in enumerate(events):
        if entry["action"] == ALLOCATED:
            alive[entry["addr"]] = i, entry
        elif entry["addr"] in alive:
            start, allocated = alive.pop(entry["addr"])
            found.append(_block(start, i, allocated))
        else:
            found.append(Block(0, i, entry["size"], BEFORE, ()))
    for start, allocated in alive.values():
        found.append(_block(start, len(events), allocated))
    for n_bytes in _standing(raw, device_index, alive):
        found.append(Block(0, len(events), n_bytes, BEFORE, ()))
    found.sort(key=lambda block: (block.kind != BEFORE, block.start))
    return found, len(events)


def segments(raw: Mapping[str, Any], device_index: int = 0) -> list[list[tuple[int, bool]]]:
    """Return for each segment its blocks at the end: (bytes, whether a tensor lives in it)."""
    found = []
    for segment in raw["segments"]:
        if segment["device"] == device_index:
            parts = segment["blocks"]
            found.append([(part["size"], part["state"] != "inactive") for part in parts])
    return found


def slim(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a history without paths of the machine and without most frames of C++.

    Kept are Python's lines, an operation, and the node of autograd. Equal stacks are one object, so
    the pickle is small. The rest is as torch wrote it, so torch's own page reads it.
    """
    known: dict[str, list[dict[str, Any]]] = {}

    def slimmed(entry: Mapping[str, Any]) -> dict[str, Any]:
        kept = dict(entry)
        if "frames" in entry:
            frames = _told(entry["frames"])
            kept["frames"] = known.setdefault(str(frames), frames)
        return kept

    traces = []
    for trace in raw["device_traces"]:
        traces.append(list(map(slimmed, trace)))
    parts = []
    for segment in raw["segments"]:
        parts.append({**slimmed(segment), "blocks": list(map(slimmed, segment["blocks"]))})
    return {**raw, "device_traces": traces, "segments": parts}


def _told(frames: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames that tell a reader something, with short names."""
    kept: list[dict[str, Any]] = []
    for frame in frames:
        file, name = str(frame["filename"]), str(frame["name"])
        if file.endswith(".py"):
            kept.append({"name": name, "filename": _relative(file), "line": frame["line"]})
            continue
        node, operation, workspace = (
            pattern.search(name) for pattern in (NODE, OPERATION, WORKSPACE)
        )
        short = None
        if workspace:
            short = f"{workspace[0]}()"
        elif node:
            short = f"torch::autograd::{node[1]}::apply()"
        elif operation:
            short = f"at::_ops::{operation[1]}::call()"
        elif ENGINE in name:
            short = f"{ENGINE}thread_main()"
        if short and short not in [one["name"] for one in kept]:
            kept.append({"name": short, "filename": "C++", "line": 0})
    return kept


def _relative(file: str) -> str:
    """Return a path from its package on; of a file that is in no package, the name."""
    file = file.replace("\\", "/")
    if not file.startswith("/") and file[1:2] != ":":
        return file
    for root in ("/site-packages/", "/dist-packages/"):
        if root in file:
            return file.rpartition(root)[2]
    where = file.rfind("/labutils/")
    return file[where + 1 :] if where >= 0 else file.rpartition("/")[2]


def _block(start: int, end: int, entry: Mapping[str, Any]) -> Block:
    frames = _told(entry.get("frames", ()))
    texts = []
    for frame in frames:
        place = f" ({frame['filename']}:{frame['line']})" if frame["line"] else ""
        texts.append(frame["name"] + place)
    return Block(start, end, entry["size"], _kind(frames), tuple(texts) or (UNKNOWN,))


def _kind(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return which part of a step asked for a block."""
    places = {(frame["filename"].rpartition("/")[2], frame["name"]) for frame in frames}
    if any(WORKSPACE.match(name) for _, name in places):
        return "library workspaces"
    if any(name.startswith("torch::autograd::") for _, name in places):
        return "backward"
    if any("/optim/" in frame["filename"] for frame in frames):
        return "optimizer"
    if ("module.py", "to") in places or ("module.py", "cuda") in places:
        return "parameters"
    return "forward and others"


def _standing(raw: Mapping[str, Any], device_index: int, seen: Mapping[int, Any]) -> list[int]:
    """Return the sizes of blocks that live at the end, and whose allocation is not recorded."""
    sizes = []
    for segment in raw["segments"]:
        if segment["device"] != device_index:
            continue
        for part in segment["blocks"]:
            if part["state"] == "active_allocated" and part["address"] not in seen:
                sizes.append(part.get("requested_size", part["size"]))
    return sizes
