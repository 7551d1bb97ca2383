"""From the traces of a shallow model and of one that is a layer deeper to that of any depth;
likewise for sequences.

A segment of a trace is a beginning, a part that repeats with every layer (or not at all), and an
end. Two traces show where that part lies and what is in it; it is then repeated as often as needed.
What is left to find out for each copy is which storages die in it: in a forward pass those of the
same layer, in a backward pass those of its mirror image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labutils.prediction.storage_log import BIRTH, DEATH, Event, Segment, Storage
from labutils.prediction.trace import Trace
from labutils.prediction.work import between


class CannotExtrapolate(ValueError):
    """Two traces that do not differ by repetitions of one part, so that a third cannot be computed
    from them.
    """


# of an event: the segment's number (-1: what stands), and the event's in it
Place = tuple[int, int]


@dataclass(frozen=True)
class Alignment:
    """Two segments, of the low and the high trace: equal but for `unit` events at `cut`."""

    cut: int
    unit: int
    length: int  # of the high one

    def low(self, i: int) -> int | None:
        """Return where the low segment has event `i` of the high one; None if it is in the part
        that repeats.
        """
        if i < self.cut:
            return i
        return i - self.unit if i >= self.cut + self.unit else None

    def moved(self, i: int, copies: int) -> int:
        """Return where an event of the end lies if the part is repeated `copies` times."""
        return i + (copies - 1) * self.unit


def extrapolated(low: Trace, high: Trace, ratio: int) -> Trace:
    """Return the trace that lies `ratio` times as far from `low` as `high` does, in the number of
    layers or sequences.

    Sizes are affine in that number. Raises CannotExtrapolate if the events of the two do not align,
    or if what results contradicts itself: a storage that dies twice, or before it is born.
    """
    if [(s.phase, s.micro_batch) for s in low.segments] != [
        (s.phase, s.micro_batch) for s in high.segments
    ]:
        raise CannotExtrapolate("other phases")
    lows, highs = ([_standing(t), *t.segments] for t in (low, high))
    alignments = [_align(a, b) for a, b in zip(lows, highs, strict=True)]
    makers = _Makers(lows, highs, alignments, ratio)
    segments, storages = [], {}
    for number, (a, b, how) in enumerate(zip(lows, highs, alignments, strict=True)):
        segments.append(Segment(b.phase, b.step, b.micro_batch))
        for i, copy in _order(how, ratio):
            event, before = b.events[i], how.low(i)
            storage = work = None
            if event.work:
                work = between(
                    a.events[before].work if before is not None else None, event.work, ratio
                )
            if event.kind == BIRTH:
                storage = _between(
                    a.events[before].storage if before is not None else None, event.storage, ratio
                )
                storages[number, len(segments[-1].events)] = storage
            elif event.kind == DEATH:
                storage = storages.pop(makers.of(number, i, copy), None)
                if storage is None or storage.made_by != event.name:
                    raise CannotExtrapolate(f"what dies in the {b.phase} phase does not align")
            segments[-1].events.append(Event(event.kind, event.name, storage, work))
    return Trace([event.storage for event in segments[0].events], segments[1:])


def _standing(trace: Trace) -> Segment:
    return Segment("", 0, None, [Event(BIRTH, str(s.n_bytes), s) for s in trace.standing])


def _align(low: Segment, high: Segment) -> Alignment:
    a, b = ([event[:2] for event in segment.events] for segment in (low, high))
    from_start, from_end = _equal_at_start(a, b), _equal_at_start(a[::-1], b[::-1])
    if from_start + from_end < len(a) or len(b) < len(a):
        raise CannotExtrapolate(f"the operations of the {low.phase} phase do not align")
    cut = (len(a) - from_end + from_start) // 2  # in the middle of what repeats
    return Alignment(cut, len(b) - len(a), len(b))


def _equal_at_start(a: Sequence, b: Sequence) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _order(how: Alignment, copies: int) -> list[tuple[int, int]]:
    """Return the new segment's events as (event of the high one, number of the copy, -1 outside
    what repeats).
    """
    beginning = [(i, -1) for i in range(how.cut)]
    repeated = [(i, copy) for copy in range(copies) for i in range(how.cut, how.cut + how.unit)]
    return beginning + repeated + [(i, -1) for i in range(how.cut + how.unit, how.length)]


def _between(low: Storage | None, high: Storage, ratio: int) -> Storage:
    if low is None:
        return replace(high)
    numbers = tuple(a + ratio * (b - a) for a, b in zip(low.numbers, high.numbers, strict=True))
    n_bytes = (
        high.rule(*numbers) if high.rule else low.n_bytes + ratio * (high.n_bytes - low.n_bytes)
    )
    return replace(high, n_bytes=n_bytes, numbers=numbers)


class _Makers:
    """Finds the birth that belongs to each death in the extrapolated trace."""

    def __init__(
        self, lows: list[Segment], highs: list[Segment], alignments: list[Alignment], copies: int
    ) -> None:
        self.low, self.high = _births_of_deaths(lows), _births_of_deaths(highs)
        self.highs, self.alignments, self.copies = highs, alignments, copies

    def of(self, number: int, i: int, copy: int) -> Place:
        """Return where the storage is born that dies in event `i` of a segment of the high trace,
        in a copy of it.
        """
        target, at = self.high[number, i]
        there = self.alignments[target]
        if copy < 0:
            # counted from the beginning
            if (target, at) == self.low[number, self.alignments[number].low(i)]:
                return target, at
            return target, there.moved(at, self.copies)  # from the end
        steps = self._steps(number, i)
        if there.unit in steps:  # the next copy's lies one part further on
            return target, at + copy * there.unit
        if -there.unit in steps:  # mirrored: one part further back
            return target, there.moved(at, self.copies) - copy * there.unit
        if 0 in steps:  # one for all: of the beginning or of the end
            return target, at if at < there.cut else there.moved(at, self.copies)
        raise CannotExtrapolate(f"deaths in the {self.highs[number].phase} phase follow no rule")

    def _steps(self, number: int, i: int) -> set[int]:
        """Return how far births lie apart of what dies one part earlier, now, and one part later.

        The beginning ends with such a part, and the end begins with one; the very first or last
        layer may be different.
        """
        target, at = self.high[number, i]
        unit = self.alignments[number].unit
        before, after = (self.high.get((number, i + way * unit)) for way in (-1, 1))
        steps = set()
        if before and before[0] == target:
            steps.add(at - before[1])
        if after and after[0] == target:
            steps.add(after[1] - at)
        return steps


def _births_of_deaths(segments: list[Segment]) -> dict[Place, Place]:
    born: dict[int, Place] = {}
    found: dict[Place, Place] = {}
    for number, segment in enumerate(segments):
        for i, event in enumerate(segment.events):
            if event.kind == BIRTH:
                born[id(event.storage)] = (number, i)
            elif event.kind == DEATH:
                found[number, i] = born[id(event.storage)]
    return found
