"""Judge one answer, in processes that hold nothing else.

An answer that is a value is computed in one process and judged in another. An answer that is a
function is judged where it was defined, between two looks at what the checks are made of.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Sequence
from typing import Any

from labutils import checks
from labutils.checks.core import Verdict
from labutils.tools.grading.notebook import Cut
from labutils.tools.grading.plain import plain, unpacked
from labutils.tools.grading.process import Limits, Outcome, in_own_process
from labutils.tools.grading.tampering import SUBMISSION, Originals, TamperingError


def last_parameter(exercise: str) -> tuple[str, bool]:
    """Return (the name of the parameter that takes the answer, whether it is a function)."""
    judge = checks.EXERCISES[exercise].__wrapped__
    hints = typing.get_type_hints(judge)
    hints.pop("return", None)
    name, kind = list(hints.items())[-1]
    callables = [one for one in (kind, *typing.get_args(kind)) if _is_callable(one)]
    return name, bool(callables)


def _is_callable(kind: Any) -> bool:
    return kind is Callable or typing.get_origin(kind) is Callable


def given(cut: Cut) -> list:
    """Run the course's own statements and return the arguments that they give to a check."""
    names: dict[str, Any] = {"__name__": "__main__", "display": print}
    exec(compile(cut.source, "<course>", "exec"), names)
    return eval(cut.expression, names)


def warm_up(exercise: str, arguments: Sequence) -> None:
    """Judge a function that does nothing: what a check imports late is there for all forks."""
    if last_parameter(exercise)[1]:
        with contextlib.suppress(Exception):  # some checks raise what such a function raises
            verdict(exercise, arguments, lambda *inputs, **named: None)


def judge(
    exercise: str, answer: Cut, course: Cut, arguments: list | None, limits: Limits
) -> Outcome:
    """Judge an answer; `arguments` are what the course gives, None: computed in the process."""
    if last_parameter(exercise)[1]:
        return in_own_process(_judge_function, (exercise, answer, course, arguments), limits)
    found = in_own_process(_compute_value, (answer,), limits)
    if isinstance(found, Outcome):
        return found
    return in_own_process(_judge_value, (exercise, found, course, arguments), limits)


# ---- in a process of its own


def _compute_value(answer: Cut) -> Any:
    return plain(_answer(answer))


def _judge_value(exercise: str, value: Any, course: Cut, arguments: list | None) -> Outcome:
    arguments = given(course) if arguments is None else arguments
    return verdict(exercise, arguments, unpacked(value))


def _judge_function(exercise: str, answer: Cut, course: Cut, arguments: list | None) -> Outcome:
    arguments = given(course) if arguments is None else arguments
    originals = Originals()
    function = _answer(answer)
    if function is not None and not callable(function):
        function = unpacked(plain(function))  # a value of a class of its own could be anything
    _stay_as_they_were(originals)
    try:
        return verdict(exercise, arguments, function)
    finally:
        _stay_as_they_were(originals)


def _stay_as_they_were(originals: Originals) -> None:
    if changed := originals.changed():
        raise TamperingError(f"it changes {changed}")


def _answer(answer: Cut) -> Any:
    names = {"__name__": "__main__", "__source__": answer.source, "display": print}
    exec(compile(answer.source, SUBMISSION, "exec"), names)
    return eval(compile(answer.expression, SUBMISSION, "eval"), names)


def verdict(exercise: str, arguments: Sequence, answer: Any) -> Outcome:
    with checks.collect_verdicts() as verdicts:
        checks.EXERCISES[exercise](*arguments, answer)
    last: Verdict = verdicts[-1]
    if last.is_open:
        return Outcome("open")
    if last.problem is None:
        return Outcome("right", last.remark, last.share)
    return Outcome("wrong", last.problem, last.share)
