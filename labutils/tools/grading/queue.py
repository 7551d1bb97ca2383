"""Judge many answers, several at once; every verdict is kept as it comes."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path

from labutils.tools.grading.judge import given, judge, warm_up
from labutils.tools.grading.notebook import Cut, given_of
from labutils.tools.grading.process import IS_FORKED, PROCESSES, Limits, Outcome
from labutils.tools.grading.submissions import Task

BATCHES_PER_WORKER = 4  # of one exercise, so that the last ones still share the cores
SMALLEST_BATCH = 20  # each computes anew what the course gives


class Kept:
    """Outcomes by key, in a file with a line for each: what a run that ended left is there.

    With `retry`, those for which time or memory was the reason are forgotten.
    """

    def __init__(self, path: Path | None, retry: bool = False) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._read(line)
        if retry:
            self.outcomes = {key: one for key, one in self.outcomes.items() if one.is_final}

    def _read(self, line: str) -> None:
        try:
            key, values = json.loads(line)
            self.outcomes[key] = Outcome(**values)
        except (ValueError, TypeError):
            return  # the last line of a run that was killed while it wrote

    def add(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome."""
        self.outcomes[key] = outcome
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, asdict(outcome)]) + "\n")


def judge_all(
    tasks: Iterable[Task],
    limits: Limits,
    kept: Kept,
    n_at_once: int,
    progress: Callable[[str], object] = lambda exercise: None,
) -> None:
    """Judge each answer whose key is not kept yet, and keep the outcome.

    `progress` is called with the exercise after each.
    """
    waiting: dict[str, dict[str, Cut]] = {}
    for task in tasks:
        if task.answer is not None and task.outcome is None and task.key not in kept.outcomes:
            waiting.setdefault(task.exercise, {})[task.key] = task.answer
    batches = [
        (exercise, batch)
        for exercise, answers in waiting.items()
        for batch in _batches(list(answers.items()), n_at_once)
    ]
    if batches and IS_FORKED:
        importlib.import_module(
            "torch._dynamo"
        )  # optimizers import it late: once, not in each fork
    running: dict[Connection, tuple] = {}
    try:
        while batches or running:
            while batches and len(running) < n_at_once:
                receiver, process, todo = _start(*batches.pop(0), limits)
                running[receiver] = process, todo
            for receiver in wait(list(running)):
                _take(receiver, running, kept, progress)
    finally:
        for process, _ in running.values():
            process.terminate()


def _batches(answers: list, n_at_once: int) -> list[list]:
    size = max(SMALLEST_BATCH, -(-len(answers) // (BATCHES_PER_WORKER * n_at_once)))
    return [answers[start : start + size] for start in range(0, len(answers), size)]


def _start(exercise: str, answers: list, limits: Limits) -> tuple:
    receiver, sender = PROCESSES.Pipe(duplex=False)
    work = (exercise, answers, limits, sender, os.getpid())
    process = PROCESSES.Process(target=_judge_batch, args=work)
    process.start()
    sender.close()
    return receiver, process, {key: exercise for key, _ in answers}


def _take(receiver: Connection, running: dict, kept: Kept, progress: Callable) -> None:
    """Take one outcome from a worker; when it has ended, whatever is left has failed."""
    process, todo = running[receiver]
    try:
        key, values = receiver.recv()
    except EOFError:
        process.join()
        del running[receiver]
        why = f"its judge ended with exit code {process.exitcode}"
        for key, exercise in todo.items():
            kept.add(key, Outcome("failed", why, is_final=False))
            progress(exercise)
        return
    kept.add(key, Outcome(**values))
    progress(todo.pop(key))


def _judge_batch(
    exercise: str, answers: Sequence, limits: Limits, sender: Connection, parent: int
) -> None:
    """Judge answers to one exercise, one after the other, in a process that all of them fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())  # and it ends its own
    course, arguments = given_of(exercise), None
    if IS_FORKED:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            arguments = given(course)
            warm_up(exercise, arguments)
    for key, answer in answers:
        if sys.platform != "win32" and os.getppid() != parent:
            return  # whoever asked is gone
        sender.send((key, asdict(judge(exercise, answer, course, arguments, limits))))
