"""Guesses: taken before or after the result, scored at the end."""

import pytest

from labutils import guesses


@pytest.fixture(autouse=True)
def no_guesses(monkeypatch):
    monkeypatch.setattr(guesses, "_guesses", {})


def test_without_a_guess_nothing_is_printed_and_nothing_fails(capsys):
    made = guesses.guess("peak", "peak in % of FP32")
    assert not made and made.middle is None
    guesses.answer("peak", 84.5, predicted=84.0)
    assert capsys.readouterr().out == ""
    row = guesses.scores().loc["peak in % of FP32"]
    assert row["your guess"] == "" and row["made"] == "" and row["right"] == ""
    assert row["measured"] == 84.5 and row["predicted / measured"] == 0.9941


@pytest.mark.parametrize(
    ("given", "measured", "right", "says"),
    [
        ({"value": 80}, 84.5, "yes", "your guess: 80; measured: 84.5: right"),
        ({"value": 50}, 84.5, "no", "0.59 times the result"),
        ({"low": 50, "high": 90}, 84.5, "yes", "your guess: 50 to 90; measured: 84.5: right"),
        ({"low": 50, "high": 60}, 84.5, "no", "0.65 times the result"),
        ({"value": 5}, 0, "no", "measured: 0: not right"),
    ],
)
def test_a_number_or_a_range_is_scored(given, measured, right, says, capsys):
    guesses.guess("peak", "peak", **given)
    guesses.answer("peak", measured)
    row = guesses.scores().loc["peak"]
    assert (row["right"], row["made"]) == (right, "before")
    assert says in capsys.readouterr().out


def test_a_guess_after_the_result_is_taken_and_said(capsys):
    for value in (None, 84):  # Run All, then filled in
        guesses.guess("peak", "peak", value)
        guesses.answer("peak", 84.5)
    assert "after the result" in capsys.readouterr().out
    row = guesses.scores().loc["peak"]
    assert (row["right"], row["made"]) == ("yes", "after the result")


def test_running_a_section_again_leaves_an_early_guess_early():
    for low, is_early in ((80, True), (80, True), (84, False)):
        assert guesses.guess("peak", "peak", low=low, high=90).was_early is is_early
        guesses.answer("peak", 84.5)


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
    with pytest.raises(ValueError, match="peak: "):
        guesses.guess("peak", "peak", **given)


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


def test_where_nothing_can_be_measured_the_prediction_is_shown_and_ends_the_guessing(capsys):
    guesses.guess("card", "GiB of a card")
    guesses.answer("card", None, 4.0)
    guesses.guess("card", "GiB of a card", 4.2)
    guesses.answer("card", None, 4.0)
    assert capsys.readouterr().out == "your guess: 4.2; predicted, not measured here: 4\n"
    row = guesses.scores().loc["GiB of a card"]
    assert row["made"] == "after the result" and row["right"] == ""
