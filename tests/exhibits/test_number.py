from __future__ import annotations

import math

import pytest
import torch

import labutils as lab
from labutils.exhibits.number_data import NUMBER_FORMATS

FORMATS = {one.name: one for one in NUMBER_FORMATS}
# The script's own functions, on many values at once.
STORE = """
const { formats, round, encode } = arguments[0].exhibit;
const format = formats[arguments[1]];
return arguments[2].map((text) => {
  const stored = round(text === "inf" ? Infinity : Number(text), format);
  return [String(stored), encode(stored, format)];
});
"""


def values_to_store() -> torch.Tensor:
    """Return 10,000 float32 values: of all sizes, on ties, subnormal, and beyond each range."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.empty(6_000).uniform_(-160, 128, generator=generator)
    near = torch.empty(3_000).uniform_(-20, 20, generator=generator)
    random = torch.cat([2.0**sizes, 2.0**near]).float()
    ties = torch.arange(990).float() / 64
    edges = torch.tensor([0.0, 65504, 65519, 65520, 447, 448, 463, 464, 465, 480])
    found = torch.cat([random, ties, edges])
    sign = torch.randint(0, 2, found.shape, generator=generator) * 2 - 1
    return found * sign


def stored_by_torch(values: torch.Tensor, name: str) -> torch.Tensor:
    if name != "TF32":
        return values.to(FORMATS[name].dtype).double()
    raw = values.view(torch.int32)
    half = 0xFFF + ((raw >> 13) & 1)  # to nearest, ties to even
    return ((raw + half) & ~0x1FFF).view(torch.float32).double()


def bits_by_torch(stored: torch.Tensor, name: str) -> list[str]:
    one = FORMATS[name]
    width = 1 + one.exponent_bits + one.mantissa_bits
    if name == "TF32":
        raw = stored.float().view(torch.int32).to(torch.int64) >> 13
    else:
        kinds = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
        raw = stored.float().to(one.dtype).view(kinds[width]).to(torch.int64)
    return [f"{int(number) & (2**width - 1):0{width}b}" for number in raw]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stores_what_torch_stores_bit_for_bit(browser, show, name):
    root = show(lab.play.number())
    values = values_to_store()
    assert len(values) == 10_000
    texts = [repr(value) for value in values.tolist()]
    found = browser.execute_script(STORE, root, name, texts)
    right = stored_by_torch(values, name)
    bits = bits_by_torch(right, name)
    for text, (stored, pattern), number, its_bits in zip(texts, found, right, bits, strict=True):
        number = number.item()
        if math.isnan(number):
            assert stored == "NaN", text
            continue
        assert float(stored.replace("Infinity", "inf")) == number, text
        assert pattern == its_bits, text
