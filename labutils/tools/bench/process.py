"""One arm in a process of its own, seen from outside: what it reports, and when it may go on."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from labutils.config.schema import Config

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


class ArmProcess:
    """A process that runs `worker` for a row, and the pipes to it."""

    def __init__(self, row: Row, warmup: int, blocks: int, steps: int) -> None:
        self.row = row
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        numbers = [str(warmup), str(blocks), str(steps)]
        worker = [sys.executable, "-m", "labutils.tools.bench.worker"]
        self.process = subprocess.Popen(
            [*worker, row.arm, row.config.model_dump_json(), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        """Return what the arm reports next; {} when it has failed, and the row says why."""
        overdue = threading.Timer(PATIENCE_S, self.process.kill)
        overdue.start()
        line = self.process.stdout.readline()
        is_late = overdue.finished.is_set()
        overdue.cancel()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        self.row.failed = lines[-1] if lines else f"exit code {self.process.returncode}"
        if is_late:
            self.row.failed = f"no answer for {PATIENCE_S} s"
        return {}

    def send_go(self) -> None:
        """Let the arm run its next block."""
        with suppress(OSError):  # it has died; `read` will say of what
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the process and close the pipes."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with suppress(OSError):
                stream.close()
