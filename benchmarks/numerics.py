"""Float formats: layout, range, spacing, rounding. All on the CPU: the same on every machine.

01, section 3, teaches it; `benchmarks.exhibits` takes its tables from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FloatFormat:
    """A binary format of IEEE 754's kind: 1 sign bit, then exponent and mantissa bits; `dtype` is
    torch's.

    A number is (-1)^sign · 1.mantissa · 2^(exponent - bias), or, with exponent bits all zero, the
    subnormal (-1)^sign · 0.mantissa · 2^(1 - bias). Exponent bits that are all 1 are inf or NaN. A
    format without inf keeps them for numbers, and only the pattern of all ones is NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype | None = None
    has_inf: bool = True

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max(self) -> float:
        """The largest finite number. What rounds beyond it becomes inf: overflow."""
        if self.has_inf:
            return (2 - 2.0**-self.mantissa_bits) * 2.0**self.bias
        return (2 - 2.0 ** (1 - self.mantissa_bits)) * 2.0 ** (self.bias + 1)

    @property
    def min_normal(self) -> float:
        """The smallest positive number with full precision; below it bits are lost one by one."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number. Half of it and less rounds to zero: underflow."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def spacing(self, value: float) -> float:
        """Return the distance between neighbouring numbers at a finite `value`."""
        exponent = math.frexp(value)[1] - 1 if value else -math.inf
        return 2.0 ** (max(exponent, 1 - self.bias) - self.mantissa_bits)


FP32 = FloatFormat("FP32", 8, 23, torch.float32)
TF32 = FloatFormat("TF32", 8, 10)  # a rounding inside tensor cores; tensors are stored as FP32
BF16 = FloatFormat("BF16", 8, 7, torch.bfloat16)
FP16 = FloatFormat("FP16", 5, 10, torch.float16)
FORMATS = (FP32, TF32, BF16, FP16)
# Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433. E4M3 has no inf.
E4M3 = FloatFormat("E4M3", 4, 3, torch.float8_e4m3fn, has_inf=False)
E5M2 = FloatFormat("E5M2", 5, 2, torch.float8_e5m2)


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return a value as `dtype` stores it: to nearest even, inf beyond the range, 0 below it."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).to(torch.float64).item()
