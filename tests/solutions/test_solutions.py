"""Each right answer passes; each classic wrong one gets the misconception it shows."""

from __future__ import annotations

import ast
import inspect
import itertools
import re

import nbformat
import pytest
import torch

import labutils as lab
from labutils import checks
from labutils.checks.accumulation import INNOCENT, LATE_LINE
from labutils.checks.epoch_trials import judge_epoch
from labutils.checks.mixed_precision import CONTROL_RUNS
from labutils.checks.quiz import LETTERS, quizzes
from labutils.grade import answers_of
from tests.helpers import committed
from tests.solutions import (
    further_eight_bits,
    further_frameworks,
    further_rounding,
    further_scaler,
    further_speed,
    further_where_time_goes,
    notebook_01,
    notebook_02,
    notebook_03,
    notebook_04,
    notebook_capstone,
)

NOTEBOOKS = (notebook_01, notebook_02, notebook_03, notebook_04)
NOTEBOOKS += (further_eight_bits, further_frameworks, further_rounding, further_scaler)
NOTEBOOKS += (further_speed, further_where_time_goes, notebook_capstone)
SOLUTIONS = {one.exercise: one for notebook in NOTEBOOKS for one in notebook.SOLUTIONS}


def verdict(capsys, exercise: str, answer: object) -> str:
    getattr(checks, exercise)(*SOLUTIONS[exercise].given, answer)
    return capsys.readouterr().out.strip()


def right_answers() -> list:
    cases = []
    for name, solution in SOLUTIONS.items():
        for i, answer in enumerate(solution.right):
            cases.append(pytest.param(name, answer, id=f"{name}-{i}"))
    return cases


def wrong_answers() -> list:
    cases = []
    for name, solution in SOLUTIONS.items():
        for i, (answer, words) in enumerate(solution.wrong):
            cases.append(pytest.param(name, answer, words, id=f"{name}-{i}"))
    return cases


@pytest.mark.parametrize(("exercise", "answer"), right_answers())
def test_right_answers_pass(capsys, exercise, answer):
    assert verdict(capsys, exercise, answer).startswith("Right.")


@pytest.mark.parametrize(("exercise", "answer", "words"), wrong_answers())
def test_wrong_answers_get_their_misconception(capsys, exercise, answer, words):
    printed = verdict(capsys, exercise, answer)
    assert printed.startswith("Not yet: ")
    assert words in printed


@pytest.mark.parametrize("exercise", checks.EXERCISES)
def test_every_exercise_has_right_and_wrong_answers(exercise):
    assert SOLUTIONS[exercise].right and SOLUTIONS[exercise].wrong


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.NOTEBOOK)
def test_neither_hints_nor_notebook_hold_an_answer(notebook):
    texts = [cell.source for cell in cells_of(notebook.NOTEBOOK)]
    for solution in notebook.SOLUTIONS:
        texts += checks.EXERCISES[solution.exercise].hints
    assert not re.search(notebook.SECRETS, " ".join(texts))


def test_hints_name_no_number_of_bytes():
    for check in checks.EXERCISES.values():
        assert "16 bytes" not in " ".join(check.hints)


def cells_of(notebook: str) -> list[nbformat.NotebookNode]:
    return nbformat.reads(committed(notebook), as_version=4).cells


def given_function(notebook: str, name: str) -> str:
    """Return the source of a function that the notebook gives as broken."""
    for cell in cells_of(notebook):
        if cell.cell_type == "code" and f"def {name}" in cell.source:
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return ast.unparse(node)
    raise AssertionError(f"{notebook} has no function {name}")


def defined(source: str, name: str):
    namespace = {"torch": notebook_01.torch, "F": notebook_01.F}
    namespace["checkpoint"] = notebook_03.checkpoint
    exec(source, namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("notebook", "name", "exercise"),
    [
        (notebook_01.NOTEBOOK, "plain_step", "amp_step"),
        (notebook_02.NOTEBOOK, "broken_window", "amp_window"),
        (notebook_03.NOTEBOOK, "broken_forward", "mended_forward"),
        (notebook_04.NOTEBOOK, "leaking_training", "repair"),
    ],
)
def test_what_the_notebook_gives_as_broken_is_not_right(capsys, notebook, name, exercise):
    function = defined(given_function(notebook, name), name)
    assert verdict(capsys, exercise, function).startswith("Not yet:")


def test_the_loop_to_break_is_right_as_it_is_given(capsys):
    names = {}
    exec(f"import torch\nimport torch.nn.functional as F\n{given_epoch()}", names)
    assert set(judge_epoch(names["right_epoch"]).values()) == {None}
    assert "still right" in verdict(capsys, "break_one", names["right_epoch"])


def given_epoch() -> str:
    return given_function(notebook_02.NOTEBOOK, "right_epoch")


def test_each_judge_can_be_the_only_one_that_fails():
    last, clip = notebook_02.EPOCH_STEP, notebook_02.EPOCH_CLIP
    alone = {
        "clipping": notebook_02.epoch((clip, "")),
        "unequal lengths": notebook_02.ONLY_UNEQUAL[0],
        "logged losses": notebook_02.epoch(("losses.append(window_loss)", "losses.append(0.0)")),
        "step count": notebook_02.epoch((last, "")),
    }
    for judge, epoch in alone.items():
        failed = {name for name, problem in judge_epoch(epoch).items() if problem}
        assert failed == {judge}


def test_a_shorter_window_that_is_not_cleared_is_noticed_in_the_next_epoch():
    zero = notebook_02.EPOCH_ZERO
    full_only = f"        if len(window) == grad_accum_steps:\n    {zero}"
    problem = judge_epoch(notebook_02.epoch((zero, full_only)))["clipping"]
    assert "step 1 of epoch 2" in problem and "cleared" in problem


def test_the_bug_stands_in_the_line_that_the_check_knows():
    """The line is numbered in the notebook; one level less to the right, it counts windows."""
    for cell in cells_of(notebook_02.NOTEBOOK):
        if "def suspect" in cell.source:
            source = cell.source
    line = f"            done += 1  # {LATE_LINE}\n"
    assert source.count(line) == 1
    assert [int(n) for n in re.findall(r"  # (\d+)$", source, re.M)] == list(range(1, 14))
    assert INNOCENT.keys() | {LATE_LINE} == set(range(1, 14))
    seen = {}
    for name, text in (("given", source), ("mended", source.replace(line, line[4:]))):
        asked = seen[name] = []
        names = {"lab": lab, "torch": torch, "islice": itertools.islice}
        names |= {"total_loss": lab.lm_loss_sum, "count_trained": lab.count_targets}
        exec(text, names)
        model = lab.build_model("gpt2-nano", dropout=0.0)
        stream = itertools.islice(lab.batches(lab.sequences(16), 1, seed=0), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        names["suspect"](model, stream, optimizer, lambda n, asked=asked: asked.append(n) or 0.0, 2)
    assert seen == {"given": [0, 2, 4], "mended": [0, 1, 2]}


def test_the_notebook_lists_the_runs_that_the_control_is_chosen_from():
    text = " ".join(cell.source for cell in cells_of(notebook_01.NOTEBOOK))
    for letter, run in CONTROL_RUNS.items():
        listed = ", ".join(f"{cause} {value}" for cause, value in run.items())
        assert f"- {letter}: {listed.replace('3e-05', '3e-5').replace('0.002', '2e-3')}" in text


def test_the_logs_of_the_notebook_are_those_of_the_solutions():
    [cell] = [c for c in cells_of(notebook_01.NOTEBOOK) if "checks.scaler_log" in c.source]
    logs = ast.literal_eval(cell.source.partition("logs = ")[2].partition("diagnosis")[0])
    assert logs == notebook_01.LOGS


def printed_for(capsys, answers: list, quiz: str) -> str:
    checks.self_test(answers, quiz)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("quiz", quizzes())
def test_a_question_says_what_is_wrong_about_the_chosen_answer_only(capsys, quiz):
    questions = quizzes()[quiz]
    printed = printed_for(capsys, [None] * len(questions), quiz)
    for question in questions:
        assert list(question["choices"]) == list(LETTERS) and question["right"] in LETTERS
        assert question["question"] in printed
        for chosen in question["choices"].values():
            assert chosen["choice"] in printed and chosen["why"] not in printed
    for letter, chosen in questions[0]["choices"].items():
        letter = letter.upper()
        printed = printed_for(capsys, [letter, *[None] * (len(questions) - 1)], quiz)
        verdict = "right" if letter.lower() == questions[0]["right"] else "wrong"
        assert printed.startswith(f"1. {verdict}")
        assert f"{chosen['choice']} ({chosen['why']})" in printed
    assert "by a letter" in printed_for(capsys, [True, *[None] * (len(questions) - 1)], quiz)
    assert f"{len(questions)} questions" in printed_for(capsys, ["a"], quiz)


@pytest.mark.parametrize("quiz", quizzes())
def test_one_letter_everywhere_earns_little(quiz):
    right = [question["right"] for question in quizzes()[quiz]]
    assert max(map(right.count, LETTERS)) <= 0.3 * len(right)


def test_an_unknown_quiz_is_refused():
    with pytest.raises(ValueError, match="there is no quiz 'checkpoints'"):
        checks.self_test([], "checkpoints")


def test_the_given_forward_can_be_mended_one_bug_at_a_time(capsys):
    """Each mended bug changes the verdict, and with the last one the answer is right."""
    source = given_function(notebook_03.NOTEBOOK, "broken_forward")
    changes = (
        ("use_reentrant=True", "use_reentrant=False"),
        ("decay.div_(2)", "decay = decay / 2"),
        ("def residual(h, block)", "def residual(h, block, decay)"),
        ("(residual, h, block,", "(residual, h, block, decay,"),
        ("checkpoint(lambda h: net.mix(net.norm(h)), h,", "checkpoint(net.mix, net.norm(h),"),
    )
    seen = [verdict(capsys, "mended_forward", defined(source, "broken_forward"))]
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
        seen.append(verdict(capsys, "mended_forward", defined(source, "broken_forward")))
    assert len(set(seen)) >= 4 and seen[-1] == "Right."
    assert all(text.startswith("Not yet:") for text in seen[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("notebook", "places"),
    [
        (
            notebook_03.NOTEBOOK,
            {
                "own_checkpoint = None": (notebook_03.Own, "own_checkpoint = Own.apply"),
                "mended_forward = None": (notebook_03.mended_forward, ""),
            },
        ),
        (
            "further/checkpointing.ipynb",
            {"chosen_policy = None": (notebook_03.budget_policy, "chosen_policy = budget_policy")},
        ),
    ],
    ids=["core", "further"],
)
def test_the_grader_scores_answers_that_are_code(tmp_path, notebook, places):
    body = nbformat.reads(committed(notebook), as_version=4)
    helpers = "from torch.utils.checkpoint import checkpoint\n"
    helpers += inspect.getsource(notebook_03.residual)
    for cell in body.cells:
        for start, (answer, use) in places.items():
            if cell.source.startswith(start) or f"\n{start}" in cell.source:
                line = next(one for one in cell.source.splitlines() if one.startswith(start))
                answered = f"{helpers}\n{inspect.getsource(answer)}\n{use}"
                cell.source = cell.source.replace(line, answered)
    nbformat.write(body, tmp_path / "answered.ipynb")
    answers = answers_of(tmp_path / "answered.ipynb", timeout=300)
    right = {name for name, (verdict, _) in answers.items() if verdict == "right"}
    assert right == {start.partition(" ")[0].replace("chosen", "budget") for start in places}
    assert {verdict for verdict, _ in answers.values()} == {"right", "open"}
