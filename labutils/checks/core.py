"""What every exercise shares: the decorator, its verdict, and who hears of it.

An exercise is a function that judges an answer, its last argument. It returns the misconception
that the answer shows, or None (or a remark, `Right`) if the answer is right. Hints come in steps;
no answer is printed.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ParamSpec

import torch

Parameters = ParamSpec("Parameters")
VERDICTS = "LABUTILS_VERDICTS"  # names a file: each verdict is appended to it, a line of JSON


class Right(str):
    """What a judge returns for a right answer about which there is something to say.

    `share` is the part of the points that it earns, from 0 to 1.
    """

    share: float = 1.0

    def __new__(cls, remark: str, share: float = 1.0) -> Right:
        self = super().__new__(cls, remark)
        self.share = share
        return self


class Partly(str):
    """The problem of an answer that passes some of a check's steps; `share` is their part."""

    share: float = 0.0

    def __new__(cls, problem: str, share: float) -> Partly:
        self = super().__new__(cls, problem)
        self.share = share
        return self


def first_problem(*steps: Callable[[], str | None]) -> str | None:
    """Take the steps of a check in order, up to the first that finds a problem, and return it."""
    for n_passed, step in enumerate(steps):
        if problem := step():
            return Partly(problem, n_passed / len(steps))
    return None


@dataclass(frozen=True)
class Verdict:
    """What became of one answer: open, right (`problem` is None), or not yet right.

    `share` is the part of the points that it earns, from 0 to 1.
    """

    exercise: str
    is_open: bool
    problem: str | None = None
    remark: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        if self.is_open:
            return "Open: replace None by your answer and run the cell again."
        if self.problem is None:
            return f"Right. {self.remark}".strip()
        return f"Not yet: {self.problem}"


# The list that collects verdicts; None, as in a notebook, prints them instead.
_collected: ContextVar[list[Verdict] | None] = ContextVar("collected", default=None)


@contextmanager
def collect_verdicts() -> Iterator[list[Verdict]]:
    """Collect verdicts in the list, which the checks inside print no longer.

    What an answer raises is raised here: whoever collects decides what it means.
    """
    verdicts: list[Verdict] = []
    token = _collected.set(verdicts)
    try:
        yield verdicts
    finally:
        _collected.reset(token)


def exercise(
    hints: Sequence[str],
) -> Callable[[Callable[Parameters, str | None]], Callable[Parameters, None]]:
    """Make a check of a function that judges an answer.

    The check has the function's parameters and prints the verdict. An answer of None is open: it
    passes, so that Run All goes through. The hints grow more explicit.
    """

    def decorate(judge: Callable[Parameters, str | None]) -> Callable[Parameters, None]:
        signature = inspect.signature(judge)

        @functools.wraps(judge)
        def check(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
            given = signature.bind(*arguments, **named)
            *_, answer = given.arguments.values()
            found = None
            if answer is not None:
                found = _problem(functools.partial(judge, *given.args))
            is_right = found is None or isinstance(found, Right)
            problem, remark = (None, found or "") if is_right else (found, "")
            share = getattr(found, "share", float(is_right)) if answer is not None else 0.0
            verdict = Verdict(judge.__name__, answer is None, problem, remark, share)
            _tell(verdict)
            _write(verdict, list(given.arguments.values())[:-1])

        check.__signature__ = signature.replace(return_annotation=None)
        check.hints = tuple(hints)
        return check

    return decorate


def _problem(judge: Callable[[], str | None]) -> str | None:
    try:
        return judge()
    except Exception as error:  # whatever the reader's answer raises is the verdict
        if _collected.get() is not None:
            raise
        return f"it raised {type(error).__name__}: {error}"


def _tell(verdict: Verdict) -> None:
    collected = _collected.get()
    if collected is None:
        print(verdict)
    else:
        collected.append(verdict)


def _write(verdict: Verdict, given: Sequence[object]) -> None:
    """Append the verdict to the file named by the variable VERDICTS, for whoever grades."""
    if VERDICTS in os.environ:
        said = "open" if verdict.is_open else "right"
        if verdict.problem is not None:
            said = f"wrong: {verdict.problem}"
        arguments = ", ".join(map(_described, given))
        line = {"exercise": verdict.exercise, "verdict": said, "arguments": arguments}
        with Path(os.environ[VERDICTS]).open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)


def _described(value: object) -> str:
    """Return a text that is the same for equal arguments; numbers have three digits in it."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        pairs = [f"{_described(key)}: {_described(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {float(value.double().mean()):.3g}"
    is_plain = value is None or isinstance(value, int | str)
    return repr(value) if is_plain else type(value).__name__


def exercises_in(module: ModuleType) -> dict[str, Callable[..., None]]:
    """Return {name: check} of the exercises a module defines, in its order."""
    return {name: found for name, found in vars(module).items() if hasattr(found, "hints")}
