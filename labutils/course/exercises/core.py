"""What every exercise shares: its hints, its verdict, and the file for whoever grades.

An exercise is a function that judges an answer, its last argument. It returns the misconception
that the answer shows. If the answer is right, it returns None, or "Right." and a remark. No answer
is printed.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VERDICTS = "LABUTILS_VERDICTS"  # names a file: each verdict is appended to it, a line of JSON
OPEN = "Open: replace None by your answer and run the cell again."
EXERCISES: dict[str, tuple[str, ...]] = {}  # their hints

Problem = str | None  # a misconception; None, or "Right." and a remark, if the answer is right
Judge = Callable[..., Problem]


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
            try:
                with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
                    problem = None if answer is None else judge(*given, answer)
            except Exception as error:  # whatever the reader's answer raises is the verdict
                problem = what_raised(error, answer)
            if answer is None:
                verdict, text = "open", OPEN
            elif is_right(problem):
                verdict, text = "right", problem or "Right."
            else:
                verdict, text = f"wrong: {problem}", f"Not yet: {problem}"
            print(text)
            if VERDICTS in os.environ:
                line = {"exercise": judge.__name__, "verdict": verdict}
                with Path(os.environ[VERDICTS]).open("a", encoding="utf-8") as file:
                    print(json.dumps(line), file=file)

        EXERCISES[judge.__name__] = hints
        return check

    return decorate


def hint(exercise: str, number: int = 1) -> None:
    """Print hint `number` (from 1) of an exercise; they grow more explicit."""
    if exercise not in EXERCISES:
        print(f"There is no exercise {exercise!r}; there are: {', '.join(EXERCISES)}")
        return
    hints = EXERCISES[exercise]
    number = min(number, len(hints))
    print(f"Hint {number} of {len(hints)}: {hints[number - 1]}")


# ---- what several exercises share


def what_raised(error: Exception, answer: Any) -> str:
    """Return what an error means that a judge met when it used the answer, or its result."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").startswith("labutils."):  # not in the reader's own code
        if isinstance(answer, type) or "is not callable" in str(error):
            return (
                "the answer is a function: write its name alone, without quotes and without (). "
                "Of a torch.autograd.Function it is its `.apply`."
            )
        if "NoneType" in str(error):
            return "your function returned None. Is the line with `return` missing?"
    first_line = str(error).strip().split("\n")[0]
    return f"it raised {type(error).__name__}: {first_line}"


def is_right(problem: Problem) -> bool:
    return problem is None or problem.startswith("Right.")


def numbers_in(answer: Any) -> list[float]:
    """Return the numbers of an answer: of 14, "line 14", tensor(14), or of a list of such."""
    plain = answer.tolist() if hasattr(answer, "tolist") else answer
    text = re.sub(r"(?<=\d)[,_](?=\d{3})", "", str(plain))  # 4,198 is one number
    found = re.findall(r"(?<![\w.])-?\d+(?!x\w)(?:\.\d+)?(?:e[+-]?\d+)?", text)  # not 0x7f12
    numbers = [float(number) for number in found]
    if isinstance(answer, str) and numbers:
        print(f"A number needs no quotes: {numbers[0]:g}")
    return numbers


def letters_in(answer: Any) -> str:
    """Return the letters A to F of an answer: "BC" of "b, c", "B and C" or ("B", "C")."""
    return "".join(re.findall(r"\b[A-F]{1,2}\b", str(answer).upper()))
