"""What every exercise shares: its hints, its verdict, and the file for whoever grades.

An exercise is a function that judges an answer, its last argument. It returns the misconception
that the answer shows, or None (or a remark, `Right`) if the answer is right. No answer is printed.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path

VERDICTS = "LABUTILS_VERDICTS"  # names a file: each verdict is appended to it, a line of JSON
OPEN = "Open: replace None by your answer and run the cell again."
EXERCISES: dict[str, Callable[..., None]] = {}

Judge = Callable[..., str | None]


class Right(str):
    """What a judge returns for a right answer about which there is something to say."""


def exercise(*hints: str) -> Callable[[Judge], Callable[..., None]]:
    """Make a check of a function that judges an answer; the hints grow more explicit.

    The check has the function's parameters and prints the verdict. An answer of None is open: it
    passes, so that Run All goes through.
    """

    def decorate(judge: Judge) -> Callable[..., None]:
        signature = inspect.signature(judge)

        @functools.wraps(judge)
        def check(*arguments: object, **named: object) -> None:
            *given, answer = signature.bind(*arguments, **named).args
            problem = None if answer is None else _problem(judge, given, answer)
            if answer is None:
                verdict, text = "open", OPEN
            elif problem is None or isinstance(problem, Right):
                verdict, text = "right", " ".join(["Right.", *filter(None, [problem])])
            else:
                verdict, text = f"wrong: {problem}", f"Not yet: {problem}"
            print(text)
            _write(judge.__name__, verdict, given)

        if judge.__name__ in EXERCISES:
            raise ValueError(f"there are two exercises of the name {judge.__name__}")
        EXERCISES[judge.__name__] = check
        check.hints = hints
        return check

    return decorate


def _problem(judge: Judge, given: list[object], answer: object) -> str | None:
    try:
        return judge(*given, answer)
    except Exception as error:  # whatever the reader's answer raises is the verdict
        return f"it raised {type(error).__name__}: {error}"


def _write(name: str, verdict: str, given: list[object]) -> None:
    """Append the verdict to the file named by the variable VERDICTS, if it is set."""
    if VERDICTS not in os.environ:
        return
    # the grader compares them with the course's own, which ran on the same machine
    arguments = json.dumps(given, default=lambda value: type(value).__name__)
    line = {"exercise": name, "verdict": verdict, "arguments": arguments}
    with Path(os.environ[VERDICTS]).open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


def hint(exercise: str, number: int = 1) -> None:
    """Print hint `number` (from 1) of an exercise; they grow more explicit."""
    if exercise not in EXERCISES:
        print(f"There is no exercise {exercise!r}; there are: {', '.join(EXERCISES)}")
        return
    hints = EXERCISES[exercise].hints
    number = max(1, min(int(number), len(hints)))
    print(f"Hint {number} of {len(hints)}: {hints[number - 1]}")
