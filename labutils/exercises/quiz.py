"""What has few answers is data: exercises of choices.yaml, and self-tests of quizzes.yaml."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from labutils.exercises.core import Problem, exercise, is_right, letters_in, numbers_in


@cache
def read(name: str) -> dict[str, Any]:
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def choice(name: str) -> Callable[..., None]:
    """Make an exercise of what choices.yaml says of it."""
    table = read("choices")[name]
    answers, otherwise = table["answers"], table["otherwise"]

    def judge(answer: Any) -> Problem:
        if isinstance(next(iter(answers)), str):
            return answers.get(letters_in(answer), otherwise)
        problems = [answers.get(number, otherwise) for number in numbers_in(answer)] or [otherwise]
        # each number must be right; a remark stands before none
        return min(problems, key=lambda problem: (is_right(problem), problem is None))

    judge.__name__, judge.__doc__ = name, table["asks"]
    return exercise(*table["hints"])(judge)


find_bug = choice("find_bug")
accumulation_request = choice("accumulation_request")
leak = choice("leak")
products_in_backward = choice("products_in_backward")
useful_del = choice("useful_del")


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
