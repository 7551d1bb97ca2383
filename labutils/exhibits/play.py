"""Exhibits: `lab.play.number()` and so on. Each is played with in the notebook or in a page.

They compute with the same numbers as the cells; no kernel and no network are needed.
"""

from __future__ import annotations

from labutils.exhibits import allocator_data, segments_data, window_data
from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.plotting import bit_layout, curves, steps
from labutils.techniques.float_formats import E4M3, E5M2, FORMATS, FloatFormat, rounded

NUMBER_FORMATS = (*FORMATS, E4M3, E5M2)


def number(value: float = 0.1, number_format: str = "BF16") -> Exhibit:
    """Return an exhibit: type or drag a value, flip any bit, and see what six formats store."""
    data = {
        "value": repr(value),
        "format": number_format,
        "formats": [_described(one) for one in NUMBER_FORMATS],
    }
    alt = "The bits of six number formats, one square for each: sign, exponent and mantissa."
    return make_exhibit(
        "number",
        "A number under the microscope",
        "Type a value, drag its size, or flip a bit: see what each format stores, and the error.",
        data,
        bit_layout(NUMBER_FORMATS),
        alt,
    )


def segments(n_layer: int = 24, ratio: float = 16.0) -> Exhibit:
    """Return an exhibit: cut layers into checkpointed segments, and see the peak and the work.

    A layer keeps `ratio` times its input. At first each layer is a segment.
    """
    data = {"n_layer": n_layer, "ratio": ratio, "networks": segments_data.networks()}
    lines = {}
    for r in (1, 4, 16):
        lines[f"each layer keeps {r} × its input"] = segments_data.peaks_of_equal_segments(24, r)
    axes = "equal segments of 24 layers", "peak, in inputs of a layer"
    still = curves(lines, *axes, log2_ticks=(1, 2, 3, 4, 6, 8, 12, 24))
    alt = "The peak against the number of equal segments, for layers that keep much and little."
    return make_exhibit(
        "segments",
        "Segments between checkpoints",
        "Cut the layers into segments: see what is kept, what is computed again, and the peak.",
        data,
        still,
        alt,
    )


def allocator(limit_mib: int = 200, is_expandable: bool = False) -> Exhibit:
    """Return an exhibit: request and free tensors, and see segments, holes and reserved memory.

    The card has `limit_mib`. Its rules are those of `lab.allocator.CachingAllocator`.
    """
    story = allocator_data.story()
    data = {
        "limit_mib": limit_mib,
        "expandable": is_expandable,
        "rules": allocator_data.RULES,
        "story": story,
    }
    lines = allocator_data.told(story)
    alt = "Allocated and reserved MiB after five events, for fixed and for expandable segments."
    return make_exhibit(
        "allocator",
        "The caching allocator",
        "Request and free tensors: see holes, reserved memory, and when memory runs out.",
        data,
        steps(lines, [say for say, _, _ in story], "MiB"),
        alt,
    )


def window(n_micro_batches: int = 4, micro_batch_size: int = 4) -> Exhibit:
    """Return an exhibit: scrub through the memory of n × m sequences, and weigh unequal ones.

    Bytes are those of the ledger, of a small GPT-2 on a CPU: two traces take a few seconds.
    """
    words = "Predicted by the ledger for gpt2-nano in float32 on a CPU, with sequences of "
    data = {
        "n": n_micro_batches,
        "m": micro_batch_size,
        "film": window_data.film(),
        "categories": list(window_data.GROUPS),
        "lengths": window_data.LENGTHS,
        "model": f"{words}{window_data.SEQ_LEN} tokens. The time axis is a sketch.",
    }
    ticks = (2, 4, 8, 16, 32)
    axes = "sequences per optimizer step", "predicted peak, MiB"
    still = curves(window_data.peaks(32), *axes, log2_ticks=ticks)
    alt = "The peak of one batch of m sequences grows; that of n micro-batches of two hardly does."
    return make_exhibit(
        "window",
        "A window of micro-batches",
        "Scrub through one optimizer step: activations come and go, gradients stay.",
        data,
        still,
        alt,
    )


def _described(one: FloatFormat) -> dict[str, object]:
    return {
        "name": one.name,
        "exponent": one.exponent_bits,
        "mantissa": one.mantissa_bits,
        "bias": one.bias,
        "max": one.max,
        "has_inf": one.has_inf,
        "saturates": one.dtype is not None and rounded(2 * one.max, one.dtype) == one.max,
    }
