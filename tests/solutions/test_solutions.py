"""Each right answer passes; each classic wrong one gets the misconception it shows."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import labutils as lab
from labutils.course import exercises
from labutils.course.exercises.core import OPEN, is_right
from labutils.course.exercises.quiz import read
from labutils.course.exercises.steps import judge_epoch
from labutils.course.labs import CALL, core_notebooks
from labutils.memory.tensors import saved_for_backward
from labutils.plotting.blocks import layout
from tests.helpers import code_of, read_notebook, said_by_cell
from tests.solutions import notebook_01, notebook_02, notebook_03, notebook_04, optional
from tests.solutions.answers import VALUES, broken, given

NOTEBOOKS = (notebook_01, notebook_02, notebook_03, notebook_04)
SOLUTIONS = {name: values for name, values in VALUES.items() if name in exercises.EXERCISES}
SOLUTIONS |= notebook_01.SOLUTIONS | notebook_02.SOLUTIONS
SOLUTIONS |= notebook_03.SOLUTIONS | notebook_04.SOLUTIONS


def verdict(capsys, exercise: str, answer: object) -> str:
    getattr(exercises, exercise)(*SOLUTIONS[exercise].given, answer)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_right_answers_pass(capsys, exercise):
    for answer in SOLUTIONS[exercise].right_answers():
        assert "Right." in verdict(capsys, exercise, answer), answer


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_wrong_answers_get_their_misconception(capsys, exercise):
    for words, answer in SOLUTIONS[exercise].wrong_answers().items():
        text = verdict(capsys, exercise, answer)
        assert "Not yet: " in text and words in text, (words, text)


@pytest.mark.parametrize("exercise", sorted(read("choices").keys() - {"history", "planned_peak"}))
def test_each_choice_hears_its_reason(capsys, exercise):
    table = read("choices")[exercise]
    assert sum(map(is_right, table["answers"].values())) == 1 + (exercise == "leak")
    for odd in ("?", [], {}, object(), print):
        assert verdict(capsys, exercise, odd) == f"Not yet: {table['otherwise']}"
    for answer, why in table["answers"].items():
        assert verdict(capsys, exercise, answer).endswith(why or "Right.")


def test_a_tensor_is_read_as_its_number_and_a_right_answer_can_have_a_remark(capsys):
    assert verdict(capsys, "leak", torch.tensor(3)) == "Right."
    assert verdict(capsys, "leak", (3, np.int64(6))).startswith("Right. But detach")


def test_warnings_are_silent_inside_a_judge(capsys, recwarn):
    loud = notebook_01.ZERO + "    __import__('warnings').warn('as torch does')\n"
    step = broken(notebook_01.amp_step, (notebook_01.ZERO, loud))
    assert verdict(capsys, "amp_step", step) == "Right." and not recwarn.list


def test_the_remark_on_the_leak_is_true(capsys):
    cells = code_of(notebook_04.NOTEBOOK)
    for mended, last_mib in (("(mean, h.detach())  #", "2.25"), ("(mean, h).detach()  #", "0.50")):
        record = cells["ex2-record"].replace("(mean, h)  #", mended)
        exec(cells["ex2-functions"] + "\n" + record, {"torch": torch, "lab": lab, "MIB": 2**20})
        assert capsys.readouterr().out.splitlines()[0].endswith(f" {last_mib}")


@pytest.mark.parametrize("exercise", exercises.EXERCISES)
def test_an_open_exercise_passes_and_its_hints_come_in_steps(capsys, exercise):
    assert verdict(capsys, exercise, None) == OPEN
    for number in (1, 2, 3, 99):
        exercises.hint(exercise, number)
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert len({first, second, third}) == 3 and third == last


@pytest.mark.parametrize(
    ("of", "solution"), optional.CELLS.items(), ids=map("-".join, optional.CELLS)
)
def test_an_optional_notebook_judges_in_its_own_cell(capsys, of, solution):
    notebook, cell, name = of
    path = f"further/{notebook}.ipynb"

    def says(answer: object) -> str:
        return said_by_cell(capsys, path, cell, **dict(solution.given), **{name: answer})

    assert says(None).startswith("Open:")
    assert all("Right." in says(answer) for answer in solution.right_answers())
    for words, answer in solution.wrong_answers().items():
        text = says(answer)
        assert words in text and "Not yet" in text and "Right." not in text, (words, text)


# ---- what the notebooks say and give


def test_every_exercise_is_called_by_a_core_notebook_and_has_answers():
    sources = [source for path in core_notebooks() for source in code_of(path.name).values()]
    called = set(CALL.findall("\n".join(sources)))
    assert called == exercises.EXERCISES.keys() == SOLUTIONS.keys()
    assert all(solution.right and solution.wrong_answers() for solution in SOLUTIONS.values())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.NOTEBOOK)
def test_neither_hints_nor_notebook_hold_an_answer(notebook):
    hints = itertools.chain(*exercises.EXERCISES.values())
    texts = [*code_of(notebook.NOTEBOOK).values(), *hints]
    assert not re.search(notebook.SECRETS, " ".join(texts))


@pytest.mark.parametrize(
    ("notebook", "name", "exercise"),
    [
        (notebook_01.NOTEBOOK, "plain_step", "amp_step"),
        (notebook_02.NOTEBOOK, "broken_window", "amp_window"),
        (notebook_02.NOTEBOOK, "right_epoch", "break_one"),
        (notebook_03.NOTEBOOK, "broken_forward", "mended_forward"),
        (notebook_04.NOTEBOOK, "leaking_training", "repair"),
    ],
)
def test_what_the_notebook_gives_is_not_right(capsys, notebook, name, exercise):
    text = verdict(capsys, exercise, given(notebook, name))
    assert text.startswith("Not yet:") and "it raised" not in text


def test_the_given_forward_can_be_mended_one_bug_at_a_time(capsys):
    changes = []
    for words, *more in (
        ("gradient of blocks", ("use_reentrant=True", "use_reentrant=False")),
        ("BatchNorm", ("decay.div_(2)", "decay = decay / 2"), ("h, block", "h, block, decay")),
        ("Right.", ("lambda h: net.mix(net.norm(h)), h,", "net.mix, net.norm(h),")),
    ):
        changes += more
        mended = given(notebook_03.NOTEBOOK, "broken_forward", *changes)
        assert words in verdict(capsys, "mended_forward", mended)


@pytest.mark.parametrize("judge", notebook_02.ALONE)
def test_each_judge_of_an_epoch_can_be_the_only_one_that_fails(capsys, judge):
    exercises.break_one(judge, notebook_02.ALONE[judge])
    assert capsys.readouterr().out == "Right.\n"
    assert not any(judge_epoch(notebook_02.accumulation_epoch).values())


def test_a_shorter_window_that_is_not_cleared_is_noticed_in_the_next_epoch():
    zero = notebook_02.EPOCH_ZERO
    full_only = f"        if len(window) == grad_accum_steps:\n    {zero}"
    problem = judge_epoch(notebook_02.epoch((zero, full_only)))["clipping"]
    assert "step 4" in problem and "cleared" in problem


def test_the_bug_stands_in_the_line_that_the_check_knows():
    """One level less to the right, this line counts windows."""
    line = f"            done += 1  # {VALUES['find_bug'].right[0]}\n"
    assert sum(line in source for source in code_of(notebook_02.NOTEBOOK).values()) == 1


def test_the_right_letters_are_those_of_the_runs_and_logs_that_the_notebook_shows():
    cells = {cell.id: cell.source for cell in read_notebook(notebook_01.NOTEBOOK).cells}
    runs = re.findall(r"^- ([A-E]): (.*)$", cells["cell-s6-control-text"], re.M)
    for (first, run), (second, other) in itertools.combinations(runs, 2):
        changed = {part.split()[0] for part in set(run.split(", ")) ^ set(other.split(", "))}
        reason = read("choices")["control_runs"]["answers"][first + second]
        assert (reason is None) == (changed == {"weights"})
        assert ("same dtype" in str(reason)) == ("weights" not in changed)
    names = {"lab": lab}
    exec(cells["56cbe388"], names)
    late = {letter: log[18:].count("x") for letter, log in names["logs"].items()}
    assert VALUES["scaler_log"].right[0] == sorted(late, key=late.get)[:1:-1]


def test_the_right_reading_is_that_of_the_recording():
    """As the notebook's cells tell who asked."""
    cells, names = code_of(notebook_04.NOTEBOOK), {"MIB": 2**20}
    exec(cells["s3-unpickle"] + "\n" + cells["s3-figure"].split("def draw")[0], names)
    boxes, segments = layout(names["history"], names["asked_by"])
    begin = min(begin for begin, *_ in boxes["backward"] if begin > boxes["optimizer"][0][0])
    allocated = lab.snapshot.load(names["recorded"]).alive_bytes
    free_mib = (sum(size for *_, size in segments) - allocated) / 2**20
    assert VALUES["history"].right[0] == [begin, "optimizer", round(free_mib, 1)]


def test_autograd_keeps_of_swiglu_what_the_check_counts():
    x = torch.ones(8, 64, requires_grad=True)
    sizes = {"gate": (64, 192), "up": (64, 192), "down": (192, 64)}
    net = torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in sizes.items()})
    net["norm"] = torch.nn.LayerNorm(64)
    with saved_for_backward(net, lambda tensor: tensor.nbytes >= x.nbytes) as kept:
        n = net["norm"](x)
        out = x + net["down"](F.silu(net["gate"](n)) * net["up"](n))  # alive until the count
    assert kept[True] == SOLUTIONS["swiglu_kept"].right[0] * out.nbytes


# ---- hints and quizzes


def test_an_unknown_exercise_is_answered_with_the_known_ones(capsys):
    exercises.hint("amp_stepp")
    text = capsys.readouterr().out
    assert "'amp_stepp'" in text and all(name in text for name in exercises.EXERCISES)


@pytest.mark.parametrize("quiz", read("quizzes"))
def test_a_question_says_what_is_wrong_about_the_chosen_answer_only(capsys, quiz):
    questions = read("quizzes")[quiz]

    def says(*answers: object) -> str:
        exercises.self_test([*answers, *[None] * (len(questions) - len(answers))], quiz)
        return capsys.readouterr().out.strip()

    text = says()
    for question in questions:
        assert "".join(question["choices"]) == "abcd" and question["question"] in text
        for chosen in question["choices"].values():
            assert chosen["choice"] in text and chosen["why"] not in text
    for letter, chosen in questions[0]["choices"].items():
        text = says(letter.upper())
        assert f"{chosen['choice']} ({chosen['why']})" in text
        assert text.startswith("1. right") == (letter == questions[0]["right"])
    assert "by a letter" in says(True)
    assert f"{len(questions)} questions" in says(*"a" * (len(questions) + 1))
