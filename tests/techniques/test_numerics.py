from __future__ import annotations

import math

import pytest
import torch

from labutils.techniques.numerics import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    TF32,
    bits,
    fp16_fate,
    rounded,
)


@pytest.mark.parametrize("number_format", [FP32, BF16, FP16])
def test_limits_equal_torch_finfo(number_format):
    info = torch.finfo(number_format.dtype)
    assert (number_format.max, number_format.min_normal, number_format.eps) == (
        info.max,
        info.tiny,
        info.eps,
    )


@pytest.mark.parametrize("number_format", [FP32, BF16, FP16])
def test_smallest_subnormal_is_stored_and_less_than_half_of_it_is_not(number_format):
    smallest = number_format.min_subnormal
    assert rounded(smallest, number_format.dtype) == smallest
    assert rounded(smallest * 0.49, number_format.dtype) == 0.0


@pytest.mark.parametrize("number_format", [FP32, BF16, FP16])
@pytest.mark.parametrize("value", [1.0, 3.7, 2.0**-16, 1e4])
def test_spacing_is_the_distance_to_the_next_number(number_format, value):
    here = rounded(value, number_format.dtype)
    following = here + number_format.spacing(here)
    assert rounded(following, number_format.dtype) == following
    assert rounded(here + 0.4 * number_format.spacing(here), number_format.dtype) == here


def test_known_roundings():
    assert rounded(65519.0, torch.float16) == 65504.0
    assert math.isinf(rounded(65520.0, torch.float16))
    assert rounded(1e-40, torch.bfloat16) == pytest.approx(9.18e-41, rel=1e-3)
    assert rounded(3.7, torch.float16) == pytest.approx(3.699, abs=5e-4)


def test_bits_reassemble_to_the_value():
    assert bits(-1.5, FP16) == ("1", "01111", "1000000000")
    assert bits(1.0, BF16) == ("0", "01111111", "0000000")
    assert bits(1.0, FP32) == ("0", "01111111", "0" * 23)


def test_formats_have_the_bits_of_their_standards():
    assert [1 + f.exponent_bits + f.mantissa_bits for f in FORMATS] == [32, 19, 16, 16]
    assert TF32.exponent_bits == FP32.exponent_bits == BF16.exponent_bits


def test_fate_of_gradients():
    shares = fp16_fate(torch.tensor([0.0, 1e-9, 1e-6, 1.0, 1e6]))
    assert shares == {"zero": 0.25, "subnormal": 0.25, "normal": 0.25, "inf": 0.25}
    assert fp16_fate(torch.tensor([1e-9]), scale=2.0**16)["zero"] == 0.0
