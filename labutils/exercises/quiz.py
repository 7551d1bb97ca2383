"""The self-test at the end of a notebook: four choices a question, and why. See quizzes.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

LETTERS = "abcd"
Question = dict[str, Any]  # its text, the right letter, and {letter: choice and why}


@cache
def quizzes() -> dict[str, list[Question]]:
    """Return the questions of each notebook."""
    text = Path(__file__).with_name("quizzes.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def self_test(answers: Sequence[str | None], quiz: str) -> None:
    """Print the questions of a quiz, and for each answer whether it is right, and why.

    An answer is the letter of a choice. An answer of None is open: no reason is printed. Raises
    ValueError for an unknown quiz.
    """
    if quiz not in quizzes():
        raise ValueError(f"there is no quiz {quiz!r}; there are: {', '.join(quizzes())}")
    questions = quizzes()[quiz]
    if len(answers) != len(questions):
        print(f"There are {len(questions)} questions; the list has {len(answers)} entries.")
        return
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), start=1):
        print(f"{number:2d}. {_answered(question, answer)}")


def _answered(question: Question, answer: str | None) -> str:
    """Return the question with its choices, or with the chosen one and what is to say of it."""
    choices, letter = question["choices"], str(answer).lower()
    if letter in choices:
        verdict = "right" if letter == question["right"] else "wrong"
        chosen = choices[letter]
        line = f"{letter}) {chosen['choice']} ({chosen['why']})"
        return f"{verdict}  {question['question']}\n       {line}"
    form = "" if answer is None else ' (answer by a letter, for example "a")'
    lines = [f"{letter}) {choices[letter]['choice']}" for letter in LETTERS]
    return "\n       ".join([f"open   {question['question']}{form}", *lines])
