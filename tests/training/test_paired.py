"""A difference is told only where every pair shows it, by more than the noise."""

import pytest

from labutils.training.paired import CANNOT_TELL, paired_difference

FIRST = [1.0, 1.1, 0.9, 1.0, 1.05]


def test_a_difference_that_all_pairs_show_is_told():
    assert paired_difference(FIRST, [x + 0.2 for x in FIRST]).verdict == "larger"
    assert paired_difference(FIRST, [x - 0.2 for x in FIRST]).verdict == "smaller"


def test_one_pair_that_disagrees_is_enough_to_say_nothing():
    second = [x + 0.2 for x in FIRST[:4]] + [FIRST[4] - 0.01]
    assert paired_difference(FIRST, second).verdict == CANNOT_TELL


def test_what_identical_runs_differ_by_is_noise():
    second = [x + 0.2 for x in FIRST]
    identical = (FIRST, [*FIRST[:4], FIRST[4] + 0.25])
    found = paired_difference(FIRST, second, identical)
    assert found.noise == pytest.approx(0.25)
    assert found.verdict == CANNOT_TELL and CANNOT_TELL in str(found)


def test_noise_that_nobody_measured_is_not_printed_as_zero():
    found = paired_difference(FIRST, [x + 0.2 for x in FIRST])
    assert found.noise is None and "noise" not in str(found)


def test_four_pairs_are_too_few():
    assert paired_difference(FIRST[:4], [x + 1 for x in FIRST[:4]]).verdict == CANNOT_TELL


def test_pairs_need_two_numbers_each():
    with pytest.raises(ValueError, match="5 and 4"):
        paired_difference(FIRST, FIRST[:4])
    with pytest.raises(ValueError, match="0 and 0"):
        paired_difference([], [])
