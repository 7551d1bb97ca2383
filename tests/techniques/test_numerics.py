import pytest
import torch

from labutils.techniques.numerics import BF16, FORMATS, FP16, FP32, TF32, rounded

STORED = pytest.mark.parametrize("form", [FP32, BF16, FP16], ids=lambda form: form.name)


@STORED
def test_limits_equal_torch_finfo(form):
    info = torch.finfo(form.dtype)
    assert (form.max, form.min_normal, form.spacing(1.0)) == (info.max, info.tiny, info.eps)
    assert rounded(form.min_subnormal, form.dtype) == form.min_subnormal
    assert rounded(form.min_subnormal * 0.49, form.dtype) == 0.0


@STORED
@pytest.mark.parametrize("value", [1.0, 3.7, 2.0**-16, 1e4])
def test_spacing_is_the_distance_to_the_next_number(form, value):
    here = rounded(value, form.dtype)
    following = here + form.spacing(here)
    assert rounded(following, form.dtype) == following
    assert rounded(here + 0.4 * form.spacing(here), form.dtype) == here


def test_formats_have_the_bits_of_their_standards():
    assert [1 + form.exponent_bits + form.mantissa_bits for form in FORMATS] == [32, 19, 16, 16]
    assert TF32.exponent_bits == FP32.exponent_bits == BF16.exponent_bits
