from __future__ import annotations

import pytest

from labutils import checks


def verdict(capsys, check, *arguments) -> str:
    check(*arguments)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("check", "arguments", "right", "wrong"),
    [
        (
            checks.nvidia_smi,
            (3.0, 3.6, 0.5),
            [4198, 4198.4, 4199],
            {
                3686.4: "context",
                3072: "tensors alone",
                3584: "cached",
                7270.4: "within",
                4100: "unit",
                4.1: "unit",
                9: "driver",
            },
        ),
        (
            checks.leak,
            (),
            ["running_mean", "running_mean()"],
            {"augment": "no leak", "forward": "Who", "mean": "name of"},
        ),
        (
            checks.largest_batch,
            ({2: 900, 6: 1700}, 4096),
            [17],
            {
                9: "through zero",
                14: "through zero",
                20: "before the first",
                17.98: "whole",
                18: "over",
                16: "one more",
            },
        ),
    ],
)
def test_right_answers_and_the_misconceptions_behind_wrong_ones(
    check, arguments, right, wrong, capsys
):
    for answer in right:
        assert verdict(capsys, check, *arguments, answer) == "Right."
    for answer, words in wrong.items():
        assert verdict(capsys, check, *arguments, answer).startswith("Not yet: ")
        assert words in verdict(capsys, check, *arguments, answer)


def test_self_test_tells_right_from_wrong_and_gives_no_answer_away(capsys):
    truths = [truth for _, truth, _ in checks.STATEMENTS]
    first = verdict(capsys, checks.self_test, [False] + [None] * (len(truths) - 1)).splitlines()[0]
    assert (
        first.startswith("1. right") and "saves activations always lowers" in first
    )  # it does not
    for answers, word in (
        (truths, "right"),
        ([not t for t in truths], "wrong"),
        ([None] * len(truths), "open"),
    ):
        printed = verdict(capsys, checks.self_test, answers)
        assert printed.count(f". {word}") == len(truths)
    assert "(" not in printed.replace("empty_cache()", "")
    assert "10 statements" in verdict(capsys, checks.self_test, [True])
