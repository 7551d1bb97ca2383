"""Record what one training step of GPT-2 allocates, line by line, on the GPU of this machine.

    python -m labutils.tools.bench.record_snapshot FOLDER

Notebook 04 shows the file if it stands in labutils/reference/.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from labutils.machine.gpu import choose_device
from labutils.machine.here import device_name
from labutils.memory import snapshot
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.gpt2 import build_model, vocab_size

SEQUENCES, SEQ_LEN = 4, 512


def record_snapshot(folder: Path, model_name: str = "gpt2") -> Path:
    """Record one step, the second, save it under the device's name, and return the path."""
    device = choose_device()
    model = build_model(model_name, dropout=0.0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, vocab_size(model_name), (SEQUENCES, SEQ_LEN), device=device)

    def step() -> None:
        lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one also makes the optimizer's state
    with snapshot.record(device) as found:
        step()
    name = "".join(c if c.isalnum() else "_" for c in device_name(device))
    path = folder / f"snapshot-{model_name}-{name}.json"
    found.save(path)
    return path


if __name__ == "__main__":
    print(f"wrote {record_snapshot(Path(sys.argv[1]))}")
