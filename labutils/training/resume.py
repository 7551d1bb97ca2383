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

from labutils.files import write_atomically
from labutils.machine.threads import use_recorded_threads
from labutils.memory.errors import is_out_of_memory
from labutils.training.records import RecordError, RunRecord, state_path

ASKED = b"\nstops after this step, with its state saved; once more stops at once\n"


class Saver:
    """Keeps what decides the steps to come in `runs/<name>-<repeat>.state`, replaced as a whole.

    That is: parameters, optimizer, loss scale, random numbers, and the series so far. The number
    of steps done is also the position in the data, which come in the same order in every run. A
    state is written every `every` steps (0: never).
    """

    def __init__(self, name: str, repeat: int, every: int) -> None:
        self.name, self.every, self.done = name, every, 0
        self.path = state_path(name, repeat)
        self.identity: dict[str, Any] = {}
        self.state: dict[str, Any] | None = None

    def read(self) -> None:
        """Read the state that an unfinished run has left, if there is one.

        Torch then computes with as many threads as when the run began: another number would add
        in another order. Raises RecordError if the file cannot be read.
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

    def plan(self, planned: RunRecord) -> None:
        """Note what the run will be. Raises RecordError if the state read is of another one."""
        # A slow machine plans fewer steps, by a noisy probe.
        self.identity = planned.model_copy(update={"steps_planned": 0}).identity
        if self.state is None:
            return
        theirs, changed = self.state["identity"], []
        for key in self.identity | theirs:
            if self.identity.get(key) != theirs.get(key):
                changed.append(f"{key} was {theirs.get(key)}, now {self.identity.get(key)}")
        if changed:
            raise RecordError(
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

    def due(self, done: int) -> bool:
        """Whether the state after `done` steps is to be saved."""
        return self.every > 0 and done % self.every == 0

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
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            reason = str(error).splitlines()[0]
            print(f"{self.name}: state of step {done} NOT SAVED: {reason}; the run goes on")

    def _unreadable(self, error: Exception) -> Exception:
        """Return the error that says so; too little memory is another cause, and stays itself."""
        if is_out_of_memory(error):
            return error
        reason = (str(error).strip().splitlines() or [""])[0][:100]
        return RecordError(f"{self.path.name} cannot be continued ({reason}); delete it")


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

    Only the main thread can do so; elsewhere, or if not `active`, signals do what they did.
    """
    stop, before = Stop(), {}
    if active and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.default_int_handler:
                before[number] = signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
