"""A long run keeps its state on disk, and continues from it as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from labutils.files import runs_dir, write_atomically


class StateError(ValueError):
    """A saved state that cannot be continued. The message says why, and what to do."""


class Saver:
    """Keeps what decides the steps to come in `runs/<name>.state`, replaced as a whole.

    That is: parameters, optimizer, loss scale, random numbers, and the series so far. The number
    of steps done is also the position in the data, which come in the same order in every run. A
    state is written every `every` steps, and at a stop (0: never).
    """

    def __init__(self, name: str, every: int) -> None:
        self.path, self.every, self.done = runs_dir() / f"{name}.state", every, 0
        self.identity: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    def plan(self, identity: dict[str, Any], resume: bool) -> None:
        """Note what decides the run's results, and to `resume` read the state of such a run.

        Raises StateError if the file cannot be read, or is of another experiment.
        """
        self.identity = identity
        if not resume or not self.path.exists():
            return
        try:  # weights_only: no code in a file runs
            self.state = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file makes of torch's reader
            raise StateError(f"{self.path.name} cannot be read; delete it ({error})") from error
        self.done, before, changed = self.state["done"], self.state["identity"], []
        for key in identity | before:
            if identity.get(key) != before.get(key):
                changed.append(f"{key} was {before.get(key)}, now {identity.get(key)}")
        if changed:
            raise StateError(
                f"{self.path.name} is of another experiment: {', '.join(changed)}. "
                "Put that back, or train from the beginning without --resume"
            )

    def restore(self, parts: dict[str, Any]) -> None:
        """Put the state that was read, if there is one, into the parts that `save` gets."""
        if not self.state:
            return
        for key, part in parts.items():
            part.load_state_dict(self.state[key])
        torch.set_rng_state(self.state["random"])
        if self.state["random_cuda"] is not None:
            torch.cuda.set_rng_state(self.state["random_cuda"])
        self.state = {}

    def save(self, parts: dict[str, Any], done: int) -> None:
        """Save the state after `done` steps. On a full disk the older one stays, and the run."""
        state = {key: part.state_dict() for key, part in parts.items()}
        state |= {"identity": self.identity, "done": done, "random": torch.get_rng_state()}
        used_cuda = torch.cuda.is_initialized()
        state["random_cuda"] = torch.cuda.get_rng_state() if used_cuda else None
        try:
            write_atomically(self.path, lambda file: torch.save(state, file))
            self.done = done
        except (OSError, RuntimeError) as error:  # torch's writer makes the second of the first
            print(f"{self.path.name}: step {done} NOT SAVED, the run goes on: {error}")


@contextmanager
def orderly_stop(active: bool) -> Iterator[list[int]]:
    """Give the list of signals that have asked the run to stop; a second one stops it at once.

    It takes Ctrl-C and SIGTERM where they would raise KeyboardInterrupt or end the process. Only
    the main thread can do so; elsewhere, or if not `active`, signals do what they did.
    """
    signals, before = [], {}

    def ask(number: int, frame: FrameType | None) -> None:
        if signals:
            signal.default_int_handler(number, frame)  # raises KeyboardInterrupt
        signals.append(number)
        # print could be what the signal has interrupted
        os.write(2, b"\nstops after this step; once more stops at once\n")

    if active and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                before[number] = signal.signal(number, ask)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
