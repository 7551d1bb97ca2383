"""Does `labutils.train` cost anything over the bare ten-line loop? Same model, same batches, taking turns.

Each block is a fresh model and `steps` optimizer steps; the two loops alternate, and which one goes first alternates
too, so that a machine that slows down slows both. The median of the blocks' medians is compared.
"""

from __future__ import annotations

import statistics
import time
from itertools import islice

import torch
from tqdm import tqdm

from labutils import data, device, models
from labutils.training import to_device, train


def bare_steps(model, batches, optimizer, max_grad_norm: float) -> list[float]:
    """The loop of notebook 01, FP32: return each step's time in ms."""
    where, times = next(model.parameters()).device, []
    for batch in batches:
        start = time.perf_counter()
        batch = to_device(batch, where)
        loss = models.lm_loss_sum(model, batch) / models.count_targets(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(1000 * (time.perf_counter() - start))
    return times


def measure(blocks: int, steps: int, where: torch.device) -> tuple[float, float, list[float]]:
    """Return (median ms of the bare loop, of labutils.train, ratio of each pair of blocks)."""
    name, seq_len = ("gpt2", 512) if where.type == "cuda" else ("gpt2-nano", 128)
    corpus = data.load_corpus(vocab_size=models.vocab_size(name), min_tokens=10 * steps * seq_len)
    sequences, _ = corpus.split(seq_len)

    def one(which: str) -> float:
        model = models.build_model(name, seq_len=seq_len).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        stream = data.batches(sequences, 4, seed=0)
        if which == "bare":
            times = bare_steps(model.train(), islice(stream, steps), optimizer, 1.0)
        else:
            record = train(model, stream, models.lm_loss_sum, optimizer, steps=steps, max_grad_norm=1.0, progress=False)
            times = record.series.step_ms
        return statistics.median(times[2:])

    found: dict[str, list[float]] = {"bare": [], "train": []}
    for block in tqdm(range(blocks), desc="alternating blocks"):
        for which in ("bare", "train") if block % 2 else ("train", "bare"):
            found[which].append(one(which))
    ratios = [t / b for t, b in zip(found["train"], found["bare"], strict=True)]
    return statistics.median(found["bare"]), statistics.median(found["train"]), ratios


def main(quick: bool = False) -> int:
    """Measure, print the result with its spread, and return 0; speed is a finding, not a test."""
    where = device.choose_device()
    bare, ours, ratios = measure(*((2, 4) if quick else (8, 30)), where)
    low, *_, high = sorted(ratios)
    print(f"{device.device_name(where)}, FP32, {len(ratios)} pairs of blocks")
    print(f"bare ten-line loop {bare:.2f} ms, labutils.train {ours:.2f} ms per step")
    print(f"ratio: median {statistics.median(ratios):.3f}, from {low:.3f} to {high:.3f} (bound: 1.03)")
    return 0
