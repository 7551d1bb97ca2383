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
from labutils.machine import use_recorded_threads
from labutils.memory.errors import is_out_of_memory

ASKED = b"\nstops after this step; once more stops at once\n"


class StateError(ValueError):
    """A saved state that cannot be continued. The message says why, and what to do."""


class Saver:
    """Keeps what decides the steps to come in `runs/<name>.state`, replaced as a whole.

    That is: parameters, optimizer, loss scale, random numbers, and the series so far. The number
    of steps done is also the position in the data, which come in the same order in every run. A
    state is written every `every` steps (0: never).
    """

    def __init__(self, name: str, every: int) -> None:
        self.name, self.every, self.done = name, every, 0
        self.path = runs_dir() / f"{name}.state"
        self.identity: dict[str, Any] = {}
        self.state: dict[str, Any] | None = None

    def read(self) -> None:
        """Read the state that an unfinished run has left, if there is one.

        Torch then computes with as many threads as when the run began: another number would add
        in another order. Raises StateError if the file cannot be read.
        """
        if not self.path.exists():
            return
        try:
            # weights_only: no code in a file runs
            self.state = torch.load(self.path, map_location="cpu", weights_only=True)
            self.done = self.state["done"]
            threads = self.state["identity"].get("threads", "")
        except Exception as error:  # whatever a damaged file makes of torch's reader
            raise self._unreadable(error) from error
        said = use_recorded_threads(threads)
        if said:
            print(f"{self.name}: {said}")

    def plan(self, identity: dict[str, Any]) -> None:
        """Note what decides the run's results. Raises StateError if the state read is of others."""
        self.identity = identity
        if self.state is None:
            return
        theirs, changed = self.state["identity"], []
        for key in self.identity | theirs:
            if self.identity.get(key) != theirs.get(key):
                changed.append(f"{key} was {theirs.get(key)}, now {self.identity.get(key)}")
        if changed:
            raise StateError(
                f"{self.path.name} is of another experiment: {', '.join(changed)}. "
                "Put that back, or train from the beginning without --resume"
            )

    def restore(self, parts: dict[str, Any]) -> int:
        """Put the state that was read into the parts that `save` gets; return its steps."""
        if self.state is None:
            return 0
        try:
            for key, part in parts.items():
                part.load_state_dict(self.state["parts"][key])
            torch.set_rng_state(self.state["random"])
            if self.state["random_cuda"] is not None:
                torch.cuda.set_rng_state(self.state["random_cuda"], _device(parts))
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._unreadable(error) from error
        self.state = None
        return self.done

    def due(self, done: int, stops: bool) -> bool:
        """Whether the state after `done` steps is to be saved: every so often, and at a stop."""
        return self.every > 0 and (stops or done % self.every == 0)

    def save(self, parts: dict[str, Any], done: int) -> None:
        """Save the state after `done` steps. On a full disk the older one stays, and the run."""
        is_cuda = _device(parts).type == "cuda"
        state = {
            "identity": self.identity,
            "done": done,
            "parts": {key: part.state_dict() for key, part in parts.items()},
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(_device(parts)) if is_cuda else None,
        }
        try:
            write_atomically(self.path, lambda file: torch.save(state, file))
            self.done = done
        except (OSError, RuntimeError) as error:  # torch's writer makes the second of the first
            reason = str(error).splitlines()[0]
            print(f"{self.name}: state of step {done} NOT SAVED: {reason}; the run goes on")

    def _unreadable(self, error: Exception) -> Exception:
        """Return the error that says so; too little memory is another cause, and stays itself."""
        if is_out_of_memory(error):
            return error
        reason = (str(error).strip().splitlines() or [""])[0][:100]
        return StateError(f"{self.path.name} cannot be continued ({reason}); delete it")


def _device(parts: dict[str, Any]) -> torch.device:
    return next(parts["model"].parameters()).device


class Stop:
    """Whether Ctrl-C or SIGTERM has asked a run to stop. A second time stops it at once."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, as a handler of it."""
        if self.asked:
            signal.default_int_handler(number, frame)  # raises KeyboardInterrupt
        self.asked = True
        os.write(2, ASKED)  # print could be what the signal has interrupted


@contextmanager
def orderly_stop(active: bool) -> Iterator[Stop]:
    """Give a `Stop` that takes the signals which would raise KeyboardInterrupt.

    So does SIGTERM where it would end the process at once. Only the main thread can do so;
    elsewhere, or if not `active`, signals do what they did.
    """
    stop, before = Stop(), {}
    if active and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                before[number] = signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
