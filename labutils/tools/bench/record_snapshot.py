"""Record what three training steps of a small GPT-2 allocate, on the GPU of this machine.

    python -m labutils.tools.bench.record_snapshot FOLDER ["what the page should say about it"]

The file is a history of torch's CUDA allocator, without paths of the machine. The one that ships
stands in labutils/reference/; `lab.snapshot_page` and torch's own page show it.
"""

from __future__ import annotations

import pickle
import platform
import sys
from pathlib import Path

import torch

from labutils.files import write_atomically
from labutils.machine.gpu import choose_device
from labutils.machine.here import device_name
from labutils.memory import allocator_history, snapshot
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.gpt2 import build_model, vocab_size

SEQUENCES, SEQ_LEN, STEPS = 4, 128, 3
PICKLE_PROTOCOL = 4  # torch's own page reads it


def record_snapshot(folder: Path, model_name: str = "gpt2-nano", note: str = "") -> Path:
    """Record a model's making and STEPS steps; return the path, which has the device's name.

    `note` goes into the file's facts, which the page shows.
    """
    device = choose_device()
    name = device_name(device)
    file_name = "".join(c if c.isalnum() else "_" for c in name)
    path = folder / f"snapshot-{model_name}-{file_name}.pickle"
    if device.type != "cuda":  # no allocator that writes a history: our own recorder's, as JSON
        with snapshot.record(device) as found:
            _train(model_name, device)
        found.save(path.with_suffix(".json"))
        return path.with_suffix(".json")
    # torch unwinds C++ on this platform only; there autograd's nodes are frames
    has_cpp = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    stacks = "all" if has_cpp else "python"
    torch.cuda.memory._record_memory_history(stacks=stacks, max_entries=100_000)
    try:
        alive = _train(model_name, device)  # till the end: so the segments have blocks
        raw = torch.cuda.memory._snapshot(device)
        del alive
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    facts = {
        "model": model_name,
        "batch": f"{SEQUENCES} x {SEQ_LEN} tokens, float32, AdamW",
        "steps": STEPS,
        "device": note or name,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "allocator": "torch's CUDA caching allocator, default settings",
        "peak, allocated bytes": torch.cuda.max_memory_allocated(device),
    }
    raw = allocator_history.slim(raw) | {"facts": facts}
    write_atomically(path, pickle.dumps(raw, protocol=PICKLE_PROTOCOL))
    return path


def _train(model_name: str, device: torch.device) -> tuple[object, ...]:
    """Make a model, take STEPS steps, and return what a training program keeps."""
    torch.manual_seed(0)
    model = build_model(model_name, dropout=0.0, activation="gelu_tanh").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, vocab_size(model_name), (SEQUENCES, SEQ_LEN)).to(device)
    for _ in range(STEPS):
        lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, ids


if __name__ == "__main__":
    words = sys.argv[2] if len(sys.argv) > 2 else ""
    print(f"wrote {record_snapshot(Path(sys.argv[1]), note=words)}")
