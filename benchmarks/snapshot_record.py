"""Record what three training steps of a small GPT-2 allocate, on the GPU of this machine.

    python -m benchmarks.snapshot_record FOLDER ["what its facts should say of the device"]

The file is a history of torch's CUDA allocator as `torch.cuda.memory._dump_snapshot` writes it, but
slim: without paths of this machine, and without what no figure shows. `lab.snapshot.load` and
https://pytorch.org/memory_viz read it.
"""

from __future__ import annotations

import pickle
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from labutils.config.choices import MODELS
from labutils.files import write_atomically
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.gpt2 import build_model

MODEL, SEQUENCES, SEQ_LEN, STEPS = "gpt2-nano", 4, 128, 3
# What a frame of C++ tells a reader: the operation, the node of autograd, its thread, a workspace.
TOLD = re.compile(
    r"at::_ops::\w+::call|torch::autograd::(?:generated::)?\w+::(?:apply|thread_main)\b"
    r"|at::cuda::\w*Workspace\w*"
)


def record_snapshot(note: str = "") -> dict[str, Any]:
    """Return the slim history of a model's making and STEPS steps; `note` goes into its facts."""
    # torch unwinds C++ on this platform only; there autograd's nodes are frames
    has_cpp = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    stacks = "all" if has_cpp else "python"
    torch.cuda.memory._record_memory_history(stacks=stacks, max_entries=100_000)
    try:
        torch.manual_seed(0)
        model = build_model(MODEL, dropout=0.0, activation="gelu_tanh").to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(0, MODELS[MODEL].vocabulary, (SEQUENCES, SEQ_LEN)).to("cuda")
        for _ in range(STEPS):
            lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
            optimizer.step()
            optimizer.zero_grad()
        history = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    facts = {
        "model": MODEL,
        "batch": f"{SEQUENCES} x {SEQ_LEN} tokens, float32, AdamW",
        "steps": STEPS,
        "device": note or torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "allocator": "torch's CUDA caching allocator, default settings",
        "peak, allocated bytes": torch.cuda.max_memory_allocated(),
    }
    return slim(history) | {"facts": facts}


def slim(history: Mapping[str, Any]) -> dict[str, Any]:
    """Return a history that is small as a pickle, and that torch's own page reads.

    Its events have the frames of allocations alone, and no times. Addresses count from the lowest
    segment. Equal frames are one object, and equal stacks.
    """
    base = min((segment["address"] for segment in history["segments"]), default=0)
    known: dict[str, Any] = {}  # frames and stacks
    traces, segments = [], []
    for trace in history["device_traces"]:
        events = []
        for event in trace:
            kept = {key: event[key] for key in ("action", "addr", "size", "stream")}
            kept["addr"] -= base
            if event["action"] == "alloc":
                frames = [known.setdefault(str(f), f) for f in _told(event["frames"])]
                kept["frames"] = known.setdefault(str(frames), frames)
            events.append(kept)
        traces.append(events)
    for segment in history["segments"]:
        blocks = []
        for block in segment["blocks"]:
            kept = {key: block[key] for key in ("address", "size", "requested_size", "state")}
            blocks.append(kept | {"address": block["address"] - base})
        place = {"address": segment["address"] - base, "frames": [], "blocks": blocks}
        segments.append({**segment, **place})
    # traces first: pickle writes its 256 first texts again in two bytes, later ones in five
    return {"device_traces": traces, "segments": segments}


def _told(frames: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames that tell a reader something, with short names."""
    kept = []
    for frame in frames:
        file, name = _relative(str(frame["filename"])), str(frame["name"])
        told = TOLD.search(name)
        if file.endswith(".py"):
            place = {"filename": sys.intern(file), "line": frame["line"]}
            kept.append({"name": sys.intern(name), **place})
        elif told:
            name = told[0].replace("generated::", "")
            kept.append({"name": f"{name}()", "filename": "C++", "line": 0})
    return kept


def _relative(file: str) -> str:
    """Return a path from its package on; of a file that is in no package, the name."""
    file = file.replace("\\", "/")
    package = re.fullmatch(r".*/(?:(?:site|dist)-packages/|(?=labutils/))(.+)", file)
    if package:
        return package[1]
    return file.rpartition("/")[2] if file.startswith("/") or file[1:2] == ":" else file


def main(folder: str, note: str = "") -> None:
    """Write the history into a folder, under the name of the device."""
    device = "".join(c if c.isalnum() else "_" for c in torch.cuda.get_device_name())
    path = Path(folder) / f"snapshot-{MODEL}-{device}.pickle"
    write_atomically(path, pickle.dumps(record_snapshot(note), protocol=4))
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
