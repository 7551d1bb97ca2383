"""An orderly stop: the step that is under way ends, then its state can be saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKED = b"\nstops after this step, with its state saved; once more stops at once\n"


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
def orderly_stop(active: bool = True) -> Iterator[Stop]:
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
