"""Guesses: taken before or after the result, scored at the end."""

import pytest

from labutils.course import guesses
from labutils.training.noise import CANNOT_TELL, paired_difference, paired_ratio


@pytest.fixture(autouse=True)
def no_guesses(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})


def test_without_a_guess_nothing_is_printed_and_nothing_fails(capsys):
    for nothing in (
        guesses.guess("peak", "peak in % of FP32"),
        guesses.guessed("peak"),
        guesses.answer("peak", 84.5, predicted=84.0),
    ):
        assert nothing is None  # a cell that ends with one shows nothing
    assert capsys.readouterr().out == ""
    row = guesses.scores().loc["peak in % of FP32"]
    assert row["your guess"] == "" and row["made"] == "" and row["right"] == ""
    assert row["measured"] == 84.5 and row["predicted / measured"] == 0.9941


def difference(worth, *second):
    return paired_difference([0.0] * 3, second or [0.21, 0.18, 0.22], worth_telling=worth)


RATIO = paired_ratio([1.0] * 3, [1.01, 1.0, 0.99], worth_telling=1.05)  # too small to matter
NOISE = difference(0.01, -9.0, 0.1, 9.0)
TOO_LARGE = "not right, since the result is too small to matter"


@pytest.mark.parametrize(
    ("given", "result", "score", "says"),
    [
        ({"value": 69}, 84.5, "yes", "your guess: 69; result: 84.5: right"),
        ({"value": 101}, 84.5, "yes", "right"),
        ({"value": 67}, 84.5, "no", "your guess: 67; result: 84.5: 0.79 times the result"),
        ({"value": -80}, -84.5, "yes", "right"),
        ({"value": 0}, 0, "yes", "result: 0: right"),
        ({"value": 5}, 0, "no", "result: 0: not right"),
        ({"low": 50, "high": 90}, 84.5, "yes", "your guess: 50 to 90; result: 84.5: right"),
        ({"low": 50, "high": 60}, 84.5, "no", "0.65 times the result"),
        # 11.39 is what the notebook works out by hand; who does may round
        ({"value": 11.8}, 9.0, "as by hand", "as by hand, 11.39, and this missed"),
        ({"value": 12.1}, 9.0, "no", "1.3 times the result"),
        ({"low": 11, "high": 12}, 9.0, "as by hand", "as by hand, 11.39"),
        ({"value": 11.4}, 10.0, "yes", "right"),  # it is by hand, and near
        ({"value": 11.4}, None, "", "no result here, predicted: 11.39"),
        # what is too small to matter is right if the guess is too
        ({"value": 0.2}, difference(0.1), "yes", "result: 0.2033: right"),
        ({"value": 0.29}, difference(0.3), "yes", "right"),
        ({"value": -0.31}, difference(0.3), "no", TOO_LARGE),
        ({"value": 0.31}, difference(0.3), "no", TOO_LARGE),
        ({"value": 0.96}, RATIO, "yes", "right"),
        ({"value": 1.06}, RATIO, "no", TOO_LARGE),
        ({"value": 0.94}, RATIO, "no", TOO_LARGE),
        ({"low": 0.5, "high": 2}, RATIO, "yes", "right"),
        ({"low": 0.97, "high": 0.99}, RATIO, "yes", "right"),  # all of it is too small
        ({"low": 0.94, "high": 0.99}, RATIO, "no", TOO_LARGE),
        ({"value": 0.2}, NOISE, CANNOT_TELL, "cannot tell here, so it has no score"),
    ],
)
def test_a_guess_is_scored(given, result, score, says, capsys):
    guesses.guess("peak", "peak", **given)
    guesses.answer("peak", result, predicted=11.39)
    row = guesses.scores().loc["peak"]
    assert (row["right"], row["made"]) == (score, "before")
    assert says in capsys.readouterr().out


def test_a_guess_is_noted_in_a_line_and_can_be_drawn(capsys):
    guesses.guess("peak", "peak in MiB", low=50, high=90)
    assert capsys.readouterr().out == "noted: 50 to 90 (peak in MiB)\n"
    assert guesses.guessed("peak") == 70 and guesses.guessed("paek") is None


def test_in_a_students_copy_a_guess_that_was_not_made_is_asked_for(capsys):
    guesses.guess("peak", "peak in MiB", ...)
    said = "no guess yet: write a number in place of the three dots (peak in MiB)\n"
    assert capsys.readouterr().out == said
    guesses.answer("peak", 84.5)
    assert guesses.scores().loc["peak in MiB"]["made"] == ""
    guesses.guess("peak", "peak in MiB", ..., low=80, high=90)
    assert capsys.readouterr().out == "noted, after the result: 80 to 90 (peak in MiB)\n"


# where nothing can be measured the prediction is shown, and ends the guessing
@pytest.mark.parametrize(("result", "right"), [((84.5,), "yes"), ((None, 84.0), "")])
def test_a_guess_after_the_result_is_taken_and_said(result, right, capsys):
    for value in (None, 84):  # Run All, then filled in
        guesses.guess("peak", "peak", value)
        guesses.answer("peak", *result)
    assert "after the result" in capsys.readouterr().out
    row = guesses.scores().loc["peak"]
    assert (row["right"], row["made"]) == (right, "after the result")


def test_an_early_guess_stays_whatever_comes_after_the_result(capsys):
    for low in (0, 0, 84):  # the section runs again; then somebody writes what came out
        guesses.guess("peak", "peak", low=low, high=90)
        guesses.answer("peak", 84.5)
    row = guesses.scores().loc["peak"]
    assert (row["made"], row["your guess"]) == ("before", "0 to 90")
    assert "the result is there: your guess of before stays, 0 to 90" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given",
    [
        {"value": "16"},
        {"value": True},
        {"value": float("nan")},
        {"low": 1},
        {"low": 3, "high": 2},
        {"value": 1, "low": 0, "high": 2},
    ],
)
def test_what_is_no_guess_is_refused_in_words(given):
    with pytest.raises(ValueError, match="peak: ") as refused:
        guesses.guess("peak", "peak", **given)
    [line] = refused.value._render_traceback_()  # all that IPython shows
    assert line == str(refused.value) and "\n" not in line
    guesses.answer("peak", 1)  # its cell goes on


def test_an_answer_to_nothing_names_what_there_is():
    guesses.guess("peak", "peak")
    with pytest.raises(ValueError, match="there are: peak"):
        guesses.answer("paek", 1)


def test_a_field_without_a_number_is_empty_and_others_keep_four_digits():
    for name, measured in (("speed", 1234.5678), ("peak", None)):
        guesses.guess(name, name)
        guesses.answer(name, measured, predicted=1 / 3)
    shown = guesses.scores().to_string() + guesses.scores().round(3).to_html()
    assert "NaN" not in shown and "None" not in shown
    assert "0.3333" in shown and "0.33333" not in shown and "1235" in shown
