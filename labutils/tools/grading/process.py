"""Do one piece of work in a process of its own, inside limits, watched."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from labutils.tools.grading.tampering import TamperingError, watch

# A fork has imported all already and takes milliseconds; where there is none, each starts anew.
PROCESSES = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
IS_FORKED = PROCESSES.get_start_method() == "fork"
MOST_FILES = 4096
WAIT_FACTOR = 6  # seconds on the clock for one of processor time


@dataclass(frozen=True)
class Limits:
    """What one answer may use: seconds of processor time, GiB (both on Linux only); what not."""

    seconds: float = 10
    memory_gib: float = 6
    closed: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of one answer.

    `verdict` is right, wrong, open, missing, failed or tampered; `reason` says why in words.
    `share` is the part of the points that it earns, from 0 to 1. `is_final` is False where time or
    memory was the reason: another try could end otherwise.
    """

    verdict: str
    reason: str = ""
    share: float = 0.0
    is_final: bool = True


def in_own_process(work: Callable, arguments: tuple, limits: Limits) -> Any:
    """Return what `work` returns in a process of its own, or an `Outcome` that says why not."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    token = secrets.token_hex(8)
    process = PROCESSES.Process(target=_child, args=(work, arguments, limits, sender, token))
    process.start()
    sender.close()
    wait = WAIT_FACTOR * limits.seconds
    try:
        with receiver:
            text = _received(receiver, wait)
        if text is None:
            why = f"not judged: no answer in {wait:g} s on the clock; the time is the reason"
            return Outcome("failed", why, is_final=False)
        process.join(wait)
        return _read(text, token, process, limits)
    finally:
        process.kill()
        process.join()


def _received(receiver: Connection, wait: float) -> str | None:
    """Return what was sent, None if nothing came in time, and nothing if the process died."""
    try:
        with _alarm(wait):  # also if it sends half a message and then sleeps
            return receiver.recv_bytes().decode(errors="replace") if receiver.poll(wait) else None
    except TimeoutError:
        return None
    except (EOFError, OSError):
        return ""


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds on the clock, where the system has an alarm."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _read(text: str, token: str, process: BaseProcess, limits: Limits) -> Any:
    if not text:
        return _died(process.exitcode, limits)
    try:
        is_token, what, value = json.loads(text)
    except ValueError:
        return Outcome("tampered", "its process wrote a verdict of its own")
    if is_token != token:
        return Outcome("tampered", "its process wrote a verdict of its own")
    return Outcome(*value) if what == "outcome" else value


def _died(code: int | None, limits: Limits) -> Outcome:
    if code is not None and -code == getattr(signal, "SIGXCPU", None):
        why = f"not judged: {limits.seconds:g} s of processor time were used up; the time is the"
        return Outcome("failed", f"{why} reason, not the answer", is_final=False)
    return Outcome("failed", f"its process ended with exit code {code}", is_final=False)


def _child(
    work: Callable, arguments: tuple, limits: Limits, sender: Connection, token: str
) -> None:
    """Do the work inside limits and send what it returns; nothing printed is seen."""

    def send(what: str, value: Any) -> None:
        sender.send_bytes(json.dumps([token, what, value]).encode())

    def tell(what: str) -> None:
        send("outcome", ["tampered", what])

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            _enter(limits, folder, sender.fileno())
            watch(limits.closed, tell)
            found = work(*arguments)
        except TamperingError as error:
            found = Outcome("tampered", str(error))
        except MemoryError:
            why = f"not judged: more than {limits.memory_gib:g} GiB of memory"
            found = Outcome("failed", why, is_final=False)
        except BaseException as error:  # whatever it raises, SystemExit too, is its own failure
            found = Outcome("failed", f"{type(error).__name__}: {error}"[:200])
        if isinstance(found, Outcome):
            parts = [found.verdict, found.reason, found.share, found.is_final]
            send("outcome", parts)
        else:
            send("value", found)
        os.chdir(os.sep)


def _enter(limits: Limits, folder: str, channel: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    os.chdir(folder)
    os.environ |= {"LABUTILS_RUNS": folder, "MPLBACKEND": "Agg"}
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    if IS_FORKED:  # what the judge has open is none of a submission's business
        os.closerange(3, channel)
        os.closerange(channel + 1, MOST_FILES)
    if sys.platform == "linux":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + limits.seconds + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        n_bytes = int(limits.memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (n_bytes, n_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
