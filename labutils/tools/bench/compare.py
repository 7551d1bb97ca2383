"""Run the arms in turns, one process each, and report: a table, a figure, a JSON file.

Timed are blocks of steps between two synchronisations, after warm-up and compilation. In each round
every arm runs one block, so that a slow minute of the machine hits all of them. A row's ratio is
the median of its rounds' ratios.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from tqdm import tqdm

from labutils.files import commit, new_id, runs_dir, write_atomically
from labutils.memory.ledger import MIB
from labutils.plotting import BLACK, BLUE, SKY
from labutils.tools.bench.process import ArmProcess, Row

LAST_STEPS = 10  # whose mean loss is reported


def run(
    rows: Sequence[Row],
    *,
    warmup: int = 10,
    blocks: int = 7,
    steps: int = 10,
    progress: bool = True,
) -> bool:
    """Fill the rows in, but for those that have failed before; return whether all of them ran.

    A process starts when the one before it has warmed up.
    """
    processes = []
    total = len(rows) * (1 + blocks)
    bar = tqdm(total=total, disable=not progress, desc="warming up", file=sys.stdout)
    try:
        for row in rows:
            if row.failed:
                continue
            bar.set_description(f"warming up: {row.name}")
            processes.append(ArmProcess(row, warmup, blocks, steps))
            row.warm_s = processes[-1].read().get("warm_s", 0.0)
            bar.update()
        for block in range(blocks):
            bar.set_description(f"block {block + 1} of {blocks}")
            for process in processes if block % 2 == 0 else reversed(processes):
                _run_block(process)
                bar.update()
        bar.set_description("memory")
        for process in processes:
            if not process.row.failed:
                process.send_go()
                process.row.facts = process.read()
    finally:
        bar.close()
        for process in processes:
            process.close()
    return not any(process.row.failed for process in processes)


def _run_block(process: ArmProcess) -> None:
    if process.row.failed:
        return
    process.send_go()
    report = process.read()
    if report:
        process.row.tokens_per_s.append(report["tokens_per_s"])


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return a table, one row per arm; ratios are to the last row, the course's own."""
    ours = rows[-1]
    lines = []
    for row in rows:
        if row.failed or not row.facts:
            lines.append({"arm": row.name, "tokens/s": f"not run: {row.failed[:90]}"})
        else:
            how = {"compiled": row.facts["compiled"]}
            lines.append(_measured(row) | _ratios(row, ours) | how)
    whole = pd.DataFrame(lines).set_index("arm").fillna("")
    return whole.loc[:, (whole != "").any()]


def _measured(row: Row) -> dict[str, str]:
    reserved_bytes = row.facts.get("reserved_bytes")  # on CUDA
    predicted = row.facts.get("predicted_tokens_per_s")  # of the course's own loop
    return {
        "arm": row.name,
        "tokens/s": f"{statistics.median(row.tokens_per_s):,.0f}",
        "predicted": f"{predicted:,.0f}" if predicted else "",
        "from": f"{min(row.tokens_per_s):,.0f}",
        "to": f"{max(row.tokens_per_s):,.0f}",
        "peak MiB": f"{row.facts['peak_bytes'] / MIB:,.1f}",
        "reserved MiB": f"{reserved_bytes / MIB:,.1f}" if reserved_bytes else "",
        "loss": f"{statistics.mean(row.facts['losses'][-LAST_STEPS:]):.4f}",
        "warm-up s": f"{row.warm_s:.1f}",
    }


def _ratios(row: Row, ours: Row) -> dict[str, str]:
    if not ours.facts:
        return {}
    pairs = zip(ours.tokens_per_s, row.tokens_per_s, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    flops_per_s = statistics.median(row.tokens_per_s) * ours.facts["flops_per_token"]
    # A row of an ablation may have another precision, and with it another peak.
    facts = row.facts if "peak_flops" in row.facts else ours.facts
    return {
        "last row is × faster": f"{ratio:.3f}",
        "MFU % of peak": f"{100 * flops_per_s / facts['peak_flops']:.1f}",
        "of product": f"{100 * flops_per_s / facts['product_flops']:.1f}",
    }


def figure(rows: Sequence[Row], path: Path) -> None:
    """Save a figure: tokens per second of every block, and the peak, one line per arm."""
    done = [row for row in rows if row.facts]
    size = (11, 0.45 * len(done) + 1.6)
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for y, row in enumerate(done):
        _draw_speed(axes[0], y, row.tokens_per_s)
    peaks = [row.facts["peak_bytes"] / MIB for row in done]
    bars = axes[1].barh(range(len(done)), peaks, color=SKY, edgecolor=BLACK)
    axes[1].bar_label(bars, fmt="{:,.1f}", padding=3)
    axes[0].set_yticks(range(len(done)), [row.name for row in done])
    axes[0].invert_yaxis()
    axes[0].set(xlabel="tokens per second: blocks, and their median", xlim=(0, None))
    axes[1].set_xlabel("peak of bytes allocated, MiB")
    for ax in axes:
        ax.margins(x=0.18)
        ax.spines[["top", "right"]].set_visible(False)
    if done:
        figure.suptitle(_title(done[-1]), fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_speed(ax: Axes, y: int, tokens_per_s: Sequence[float]) -> None:
    median = statistics.median(tokens_per_s)
    ax.plot(tokens_per_s, [y] * len(tokens_per_s), "|", color=SKY, ms=14)
    ax.plot(median, y, "o", color=BLUE)
    at = (max(tokens_per_s), y)
    ax.annotate(f"{median:,.0f}", at, xytext=(6, -4), textcoords="offset points")


def _title(row: Row) -> str:
    config, environment = row.config, row.facts["environment"]
    size = f"{config.micro_batch_size} × {config.seq_len} tokens"
    machine = f"{environment['device']}, torch {environment['torch']}"
    return f"{config.model}, {size}, {config.precision}; measured on {machine}"


def save(rows: Sequence[Row], what: str) -> Path:
    """Write all results to a new file `bench-….json`, with a figure beside it; return its path."""
    run_id, created = new_id()
    path = runs_dir() / f"bench-{what}-{run_id}.json"
    document = {
        "what": what,
        "created": created,
        "commit": commit(),
        "rows": [_saved(row) for row in rows],
    }
    write_atomically(path, json.dumps(document, indent=1).encode())
    figure(rows, path.with_suffix(".png"))
    return path


def _saved(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "arm": row.arm,
        "config": row.config.model_dump(exclude={"when_cpu", "overrides"}),
        "tokens_per_s": row.tokens_per_s,
        "warm_s": row.warm_s,
        "failed": row.failed,
        **row.facts,
    }
