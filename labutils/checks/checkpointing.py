"""Exercises of notebook 03: what is kept, how often a block runs, and where segments begin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labutils.checks.core import exercise
from labutils.memory.tensors import saved_for_backward


class _CountsRuns(nn.Linear):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(x).tanh()


def _counted_runs(n_layer: int, unit: int) -> int:
    """Return how often blocks run forward in one real step, checkpointed in units."""
    blocks = nn.Sequential(*(_CountsRuns(2, 2) for _ in range(n_layer)))
    x = torch.ones(1, 2)
    for start in range(0, n_layer, unit):
        x = checkpoint(blocks[start : start + unit], x, use_reentrant=False)
    x.sum().backward()
    return sum(block.runs for block in blocks)


class _SwiGLU(nn.Module):
    """The second half of a block, with hidden layers of `width` times the input's numbers."""

    def __init__(self, n_numbers: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n_numbers)
        self.gate, self.up = (nn.Linear(n_numbers, width * n_numbers) for _ in range(2))
        self.down = nn.Linear(width * n_numbers, n_numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))


def _kept_by_swiglu(width: int) -> int:
    """Return what autograd keeps of it, in units of the input, without the small storages."""
    half_block, x = _SwiGLU(64, width), torch.ones(8, 64, requires_grad=True)
    with saved_for_backward(half_block, lambda tensor: tensor.untyped_storage().nbytes()) as kept:
        output = half_block(x)  # alive until the count is done
    del output
    return sum(n_bytes for size, n_bytes in kept.items() if size >= x.nbytes) // x.nbytes


@exercise(
    hints=(
        "Walk through it as through the block of GPT-2. Only one operation is not in the table.",
        "The derivative of a · b needs b for a, and a for b.",
        "SiLU keeps its input. Its output is read by somebody, too.",
    )
)
def swiglu_kept(width: int, answer: int | None) -> str | None:
    """Check how many times its input half a block with SwiGLU keeps; hidden layers are `width` h.

    It computes x + W3 (SiLU(W1 n) * W2 n), where n is the layer norm of x.
    """
    right = _kept_by_swiglu(width)
    misconceptions = {
        right - width: (
            "one of four wide tensors is missing. Name them: what SiLU reads, what the "
            "multiplication reads, what W3 reads."
        ),
        right - 2 * width: (
            "that is the count for GELU. The multiplication keeps both of its factors."
        ),
        right + width: "one wide tensor is counted twice, although two operations read it.",
        right - 1: "the norm keeps its input, and W1 and W2 keep theirs.",
        right - 2: "the norm keeps its input, and W1 and W2 keep theirs.",
        right + 1: "the sum keeps nothing, and W1 and W2 read the same tensor.",
        10: "that is the second half of GPT-2's block.",
    }
    if answer == right:
        return None
    return misconceptions.get(answer, "go through it operation by operation: what does each read?")


@exercise(
    hints=(
        "Count the forward pass first. Then ask of each block: are the results inside it there "
        "when backward arrives?",
        "A unit keeps its input only. What must run before backward can go through the unit's "
        "first block?",
        "Does the unit in which backward begins differ from the others, or is it treated as they "
        "are?",
    )
)
def block_runs(n_layer: int, unit: int, answer: int | None) -> str | None:
    """Check how often a block's forward runs in one step.

    The model has `n_layer` blocks, checkpointed in units of `unit`.
    """
    right = _counted_runs(n_layer, unit)
    n_units = n_layer // unit
    misconceptions = {
        n_layer: "that is the step without checkpointing. What does backward find inside a unit?",
        n_layer + n_units: (
            "each unit is computed again, not one block of each: only the unit's input is kept."
        ),
        right - unit: (
            "saving the last unit is possible, but a checkpointed unit is computed again wherever "
            "it stands."
        ),
        2: "that is one block's count; there are more blocks.",
        right - n_units: (
            "a unit's first block is computed again too: kept is what goes in, not what comes out."
        ),
        3 * n_layer: "backward costs as much as two forward passes, but it is not one.",
    }
    if answer == right:
        return None
    return misconceptions.get(answer, "count block by block: how often does each run?")


@exercise(
    hints=(
        "Two things are alive together: all the segments' inputs, and the layers of one segment.",
        "Count in inputs: n segments keep n of them. What does one segment of 1/n of the layers "
        "keep, in inputs?",
        "Write the sum as a function of n, and try n smaller and larger until it no longer falls.",
    )
)
def best_segments(n_layer: int, ratio: float, answer: float | None) -> str | None:
    """Check the number of equal segments with the smallest peak.

    Each layer keeps `ratio` times its input.
    """
    if not isinstance(answer, (int, float)) or answer != int(answer) or not 1 <= answer <= n_layer:
        return (
            f"the answer is a whole number: {n_layer} layers have between 1 and {n_layer} segments."
        )

    def peak(n: float) -> float:
        return n + ratio * math.ceil(n_layer / n)

    if peak(answer) == min(map(peak, range(1, n_layer + 1))):
        return None
    if abs(answer - n_layer**0.5) < 0.5:
        return (
            "that is best if a layer keeps as much as its input. Here it keeps more, so segments "
            "should be shorter."
        )
    if answer == n_layer:
        return "one checkpoint per layer: all the inputs together are the largest part then."
    if answer == 1:
        return (
            "one segment keeps nothing in between, and all layers at once when it is computed "
            "again."
        )
    if abs(answer - (n_layer / ratio) ** 0.5) < 0.5:
        return (
            "the ratio acts the other way: layers that keep much ask for shorter segments, so for "
            "more of them."
        )
    return (
        f"{peak(answer):g} inputs at the peak; there is a smaller sum. "
        f"Are there too {_few_or_many(peak, answer)} segments?"
    )


def _few_or_many(peak: Callable[[float], float], n: float) -> str:
    more = range(int(n) + 1, 2 * int(n) + 2)
    return "few" if min(map(peak, more)) < peak(n) else "many"


@exercise(
    hints=(
        "No placement brings the largest segment below the largest layer. Can you reach that "
        "bound?",
        "A segment smaller than the largest one is free to grow; each further segment costs one "
        "input.",
        "Which layers should share a segment with the huge one?",
    )
)
def placement(kept: Sequence[float], input_size: float, answer: Sequence[int] | None) -> str | None:
    """Check the first layers of segments that make their inputs plus the largest one smallest."""
    n_layer = len(kept)
    if not isinstance(answer, (list, tuple, set)) or not set(answer) <= set(range(n_layer)):
        return f"the answer is a list of layer numbers, from 0 to {n_layer - 1}."
    starts = sorted(int(start) for start in set(answer))
    if not starts or starts[0] != 0:
        return "the first segment starts at layer 0; without it the first layers belong to none."
    largest = _largest_segment(kept, starts)
    peak = input_size * len(starts) + largest
    if peak == _smallest_peak(kept, input_size):
        return None
    given = f"{peak:g} at the peak, {largest:g} of it the largest segment; less is possible."
    if len(starts) == 1:
        return f"{given} One segment is no checkpointing at the moment that counts."
    if len(starts) == n_layer:
        return f"{given} A checkpoint at each layer: most of these inputs buy nothing."
    if largest > max(kept):
        return f"{given} What is in that largest segment, and need segments be equally long?"
    return f"{given} The huge layer stands alone; do the others need so many segments?"


@exercise(
    hints=(
        "Backward goes from the last segment to the first, and frees each input when it is done.",
        "How many inputs are still there while the first segment is computed again? And the last?",
        "Which segments can be longer than the others without raising the peak?",
    )
)
def segment_lengths(n_layer: int, ratio: float, answer: Sequence[int] | None) -> str | None:
    """Check lengths of segments, first to last, that make the peak as small as possible.

    While segment i is computed again, i inputs are alive, and `ratio` inputs for each of its
    layers.
    """
    is_list = isinstance(answer, (list, tuple)) and len(answer) > 0
    if not is_list or not all(isinstance(one, int) and one > 0 for one in answer):
        return "the answer is a list of whole numbers above 0: the segments' lengths, in order."
    if sum(answer) != n_layer:
        return f"these segments have {sum(answer)} layers together; there are {n_layer}."
    peak = _peak_of_lengths(answer, ratio)
    if peak == _smallest_peak_of_lengths(n_layer, ratio):
        return None
    given = f"{peak:g} inputs at the peak; less is possible."
    if len(answer) == n_layer:
        return f"{given} That is one checkpoint per layer: all inputs are alive at the end."
    if _peak_of_lengths(sorted(answer, reverse=True), ratio) < peak:
        return f"{given} The same segments in another order need less."
    if len(set(answer)) == 1:
        return f"{given} Need all segments be equally long?"
    return f"{given} Some segments are longer or shorter than the number of inputs then allows."


def _peak_of_lengths(lengths: Sequence[int], ratio: float) -> float:
    return max(i + ratio * length for i, length in enumerate(lengths, 1))


def _smallest_peak_of_lengths(n_layer: int, ratio: float) -> float:
    """Return the smallest peak: below it the longest possible segments hold too few layers."""
    candidates = {i + ratio * n for i in range(1, n_layer + 1) for n in range(1, n_layer + 1)}
    for peak in sorted(candidates):
        held = sum(int((peak - i) / ratio) for i in range(1, n_layer + 1) if peak > i)
        if held >= n_layer:
            return peak
    raise AssertionError("one segment holds all layers")


def _largest_segment(kept: Sequence[float], starts: Sequence[int]) -> float:
    ends = [*starts[1:], len(kept)]
    return max(sum(kept[start:end]) for start, end in zip(starts, ends, strict=True))


def _smallest_peak(kept: Sequence[float], input_size: float) -> float:
    """Return the smallest peak of all placements; every one is tried."""
    smallest = math.inf
    later_layers = range(1, len(kept))
    for n_later in range(len(kept)):
        for later in itertools.combinations(later_layers, n_later):
            starts = [0, *later]
            peak = input_size * len(starts) + _largest_segment(kept, starts)
            smallest = min(smallest, peak)
    return smallest
