"""Run the arms in turns, one process each, and report: a table, a figure, a JSON file.

Timed are blocks of steps between two synchronisations, after warm-up and compilation. In each round
every arm runs one block, so that a slow minute of the machine hits all of them; a row's ratio is
the median of its rounds' ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from labutils.config.schema import Config
from labutils.files import commit, new_id, runs_dir, write_atomically
from labutils.memory.ledger import MIB

LAST_STEPS = 10  # whose mean loss is reported
PATIENCE_S = 900  # max-autotune compiles for minutes


@dataclass
class Row:
    """One arm's result; `failed` says why there is none."""

    name: str
    arm: str
    config: Config
    tokens_per_s: list[float] = field(default_factory=list)  # one for each block
    warm_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    @property
    def loss(self) -> float:
        """Mean training loss of the last steps."""
        return statistics.mean(self.facts["losses"][-LAST_STEPS:])


class _Process:
    def __init__(self, row: Row, warmup: int, blocks: int, steps: int) -> None:
        self.row = row
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        numbers = [str(n) for n in (warmup, blocks, steps)]
        command = [
            sys.executable,
            "-m",
            "labutils.tools.bench.worker",
            row.arm,
            row.config.model_dump_json(),
            *numbers,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def hear(self) -> dict[str, Any]:
        """Return what the arm says next; {} when it has failed, and the row says why."""
        overdue = threading.Timer(PATIENCE_S, self.process.kill)
        overdue.start()
        line = self.process.stdout.readline()
        is_late = overdue.finished.is_set()
        overdue.cancel()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        self.row.failed = said[-1] if said else f"exit code {self.process.returncode}"
        if is_late:
            self.row.failed = f"nothing heard of it for {PATIENCE_S} s"
        return {}

    def go(self) -> None:
        with suppress(OSError):  # it has died; `hear` will say of what
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with suppress(OSError):
                stream.close()


def run(
    rows: Sequence[Row],
    *,
    warmup: int = 10,
    blocks: int = 7,
    steps: int = 10,
    progress: bool = True,
) -> None:
    """Fill the rows in. Processes start one after the other, each only when the one before has
    warmed up.
    """
    processes = []
    bar = tqdm(
        total=len(rows) * (1 + blocks), disable=not progress, desc="warming up", file=sys.stdout
    )
    try:
        for row in (row for row in rows if not row.failed):
            bar.set_description(f"warming up: {row.name}")
            processes.append(_Process(row, warmup, blocks, steps))
            row.warm_s = processes[-1].hear().get("warm_s", 0.0)
            bar.update()
        for block in range(blocks):
            bar.set_description(f"block {block + 1} of {blocks}")
            order = processes if block % 2 == 0 else processes[::-1]
            for process in (p for p in order if not p.row.failed):
                process.go()
                if heard := process.hear():
                    process.row.tokens_per_s.append(heard["tokens_per_s"])
                bar.update()
        bar.set_description("memory")
        for process in (p for p in processes if not p.row.failed):
            process.go()
            process.row.facts = process.hear()
    finally:
        bar.close()
        for process in processes:
            process.end()


def table(rows: Sequence[Row]):
    """Return a pandas table, one row per arm; ratios are to the last row, the course's own."""
    import pandas as pd

    ours = rows[-1]
    lines = []
    for row in rows:
        if row.failed or not row.facts:
            lines.append({"arm": row.name, "tokens/s": f"not run: {row.failed[:90]}"})
            continue
        rate = statistics.median(row.tokens_per_s)
        line = {
            "arm": row.name,
            "tokens/s": f"{rate:,.0f}",
            "from": f"{min(row.tokens_per_s):,.0f}",
            "to": f"{max(row.tokens_per_s):,.0f}",
            "peak MiB": f"{row.facts['peak_bytes'] / MIB:,.1f}",
            "reserved MiB": f"{row.facts['reserved_bytes'] / MIB:,.1f}"
            if "reserved_bytes" in row.facts
            else "",
            "loss": f"{row.loss:.4f}",
            "warm-up s": f"{row.warm_s:.1f}",
        }
        if ours.facts:
            pairs = zip(ours.tokens_per_s, row.tokens_per_s, strict=True)
            line["last row is × faster"] = f"{statistics.median(a / b for a, b in pairs):.3f}"
            needed = rate * ours.facts["flops_per_token"]
            facts = (
                row.facts if "peak_flops" in row.facts else ours.facts
            )  # an ablation may have another precision
            line["MFU % of peak"] = f"{100 * needed / facts['peak_flops']:.1f}"
            line["of product"] = f"{100 * needed / facts['product_flops']:.1f}"
        line["compiled"] = row.facts.get("compiled", "")
        lines.append(line)
    whole = pd.DataFrame(lines).set_index("arm").fillna("")
    return whole.loc[:, (whole != "").any()]


def figure(rows: Sequence[Row], path: Path) -> None:
    """Save a figure: tokens per second of every block, and the peak, one line per arm."""
    import matplotlib.pyplot as plt

    from labutils.plotting import BLACK, BLUE, SKY

    done = [row for row in rows if row.facts]
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 0.45 * len(done) + 1.6), layout="constrained", sharey=True
    )
    for y, row in enumerate(done):
        axes[0].plot(row.tokens_per_s, [y] * len(row.tokens_per_s), "|", color=SKY, ms=14)
        axes[0].plot(statistics.median(row.tokens_per_s), y, "o", color=BLUE)
        label = f"{statistics.median(row.tokens_per_s):,.0f}"
        axes[0].annotate(
            label, (max(row.tokens_per_s), y), xytext=(6, -4), textcoords="offset points"
        )
    bars = axes[1].barh(
        range(len(done)),
        [row.facts["peak_bytes"] / MIB for row in done],
        color=SKY,
        edgecolor=BLACK,
    )
    axes[1].bar_label(bars, fmt="{:,.1f}", padding=3)
    axes[0].set_yticks(range(len(done)), [row.name for row in done])
    axes[0].invert_yaxis()
    axes[0].set(xlabel="tokens per second: blocks, and their median", xlim=(0, None))
    axes[1].set_xlabel("peak of bytes allocated, MiB")
    for ax in axes:
        ax.margins(x=0.18)
        ax.spines[["top", "right"]].set_visible(False)
    if done:
        config, environment = done[-1].config, done[-1].facts["environment"]
        shape = f"{config.model}, {config.micro_batch_size} × {config.seq_len} tokens, {config.precision}"
        figure.suptitle(
            f"{shape}; measured on {environment['device']}, torch {environment['torch']}",
            fontsize=10,
        )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def save(rows: Sequence[Row], what: str) -> Path:
    """Write everything that was seen to a new file `bench-….json`, and the figure beside it; return
    its path.
    """
    run_id, created = new_id()
    path = runs_dir() / f"bench-{what}-{run_id}.json"
    parts = [
        {
            "name": row.name,
            "arm": row.arm,
            "config": row.config.model_dump(exclude={"when_cpu", "overrides"}),
            "tokens_per_s": row.tokens_per_s,
            "warm_s": row.warm_s,
            "failed": row.failed,
            **row.facts,
        }
        for row in rows
    ]
    document: Mapping[str, Any] = {
        "what": what,
        "created": created,
        "commit": commit(),
        "rows": parts,
    }
    write_atomically(path, json.dumps(document, indent=1).encode())
    figure(rows, path.with_suffix(".png"))
    return path
