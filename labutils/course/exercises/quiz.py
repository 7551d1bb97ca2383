"""Questions with few answers are data: exercises of choices.yaml, self-tests of quizzes.yaml."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from labutils.course.exercises.core import Problem, exercise, is_right, letters_in, numbers_in


@cache
def read(name: str) -> dict[str, Any]:
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def problem_of(
    number: float, table: Mapping[str, Any], of_others: Callable[[float], str] | None = None
) -> Problem:
    """Return what a table of choices.yaml says of a number; see `choice`."""
    for value, problem in table["answers"].items():
        if abs(number - value) <= table.get("tolerance", 0) * abs(value):
            return problem
    if of_others and number in range(1, 101):  # whole numbers only: 2.5 is in no range
        return of_others(number)
    return table["otherwise"]


def choice(name: str, of_others: Callable[[float], str] | None = None) -> Callable[..., None]:
    """Make an exercise of what choices.yaml says of it.

    `of_others` says what any other whole number from 1 to 100 hears.
    """
    table = read("choices")[name]
    answers, otherwise = table["answers"], table["otherwise"]

    def judge(answer: Any) -> Problem:
        if isinstance(next(iter(answers)), str):
            letters = letters_in(answer)  # a pair in either order, unless the table has both
            return answers.get(letters, answers.get(letters[::-1], otherwise))
        numbers = numbers_in(answer)
        problems = [problem_of(number, table, of_others) for number in numbers]
        if isinstance(answer, str) and len(numbers) > 1 and not all(map(is_right, problems)):
            return "that text has several numbers. Write the one that you mean, without words."
        # each number must be right; a remark stands before none
        ranked = sorted(problems, key=lambda problem: (is_right(problem), problem is None))
        return ranked[0] if ranked else otherwise

    judge.__name__, judge.__doc__ = name, table["asks"]
    return exercise(*table["hints"])(judge)


def peak_of_segments(n: float) -> str:
    few_or_many = "few" if n < 20 else "many"
    return (
        f"{n + 4 * math.ceil(100 / n):g} inputs at the peak; there is a smaller sum. "
        f"Are there too {few_or_many} segments?"
    )


def peak_of_batch(n: float) -> str:
    needed = 500 + 200 * n
    comparison = "that is over the budget." if needed > 4096 else "one more fits."
    return f"{n:g} sequences need {needed:g}: {comparison}"


find_bug = choice("find_bug")
padded_labels = choice("padded_labels")
accumulation_request = choice("accumulation_request")
leak = choice("leak")
products_outside_backward = choice("products_outside_backward")
useful_del = choice("useful_del")
sixteen_bits = choice("sixteen_bits")
scaler_log = choice("scaler_log")
control_runs = choice("control_runs")
swiglu_kept = choice("swiglu_kept")
block_runs = choice("block_runs")
best_segments = choice("best_segments", peak_of_segments)
nvidia_smi = choice("nvidia_smi")
largest_batch = choice("largest_batch", peak_of_batch)


def self_test(answers: Sequence[str | None], quiz: str) -> None:
    """Print the questions of a quiz, and for each answer whether it is right, and why.

    An answer is the letter of a choice. An answer of None is open: no reason is printed. Raises
    KeyError for an unknown quiz.
    """
    questions = read("quizzes")[quiz]
    if len(answers) != len(questions):
        print(f"There are {len(questions)} questions; the list has {len(answers)} entries.")
        return
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), start=1):
        print(f"{number:2d}. {_answered(question, answer)}")


def _answered(question: dict[str, Any], answer: str | None) -> str:
    """Return the question with its choices, or with the chosen one and what is to say of it."""
    text, choices, letter = question["question"], question["choices"], letters_in(answer).lower()
    if letter in choices:
        verdict = "right" if letter == question["right"] else "wrong"
        chosen = choices[letter]
        return f"{verdict}  {text}\n       {letter}) {chosen['choice']} ({chosen['why']})"
    form = "" if answer is None else ' (answer by a letter, for example "a")'
    lines = [f"{letter}) {choice['choice']}" for letter, choice in choices.items()]
    return "\n       ".join([f"open   {text}{form}", *lines])
