"""Exercise of further/sharding: the bytes of one process under ZeRO."""

from __future__ import annotations

from collections.abc import Callable

from labutils.checks.core import exercise

BytesPerProcess = Callable[[int, int, int], float]
WEIGHT, GRADIENT, MOMENTS = 4, 4, 8  # bytes per parameter: float32, AdamW
N, PROCESSES = 1200, 3


@exercise(
    "Write down the three groups of bytes first: weights, gradients, moments. Which of them "
    "does each stage cut?",
    "A stage keeps what the stages before it do. What is not cut stands in every process.",
    "Try stage 0 first: nothing is cut. Then add one division per stage.",
)
def bytes_per_process(answer: BytesPerProcess | None) -> str | None:
    """Check `answer(n_parameters, n_processes, stage)`: bytes of one process in float32, AdamW."""
    if answer(N, 1, 0) != (WEIGHT + GRADIENT + MOMENTS) * N:
        return "one process alone has weights, gradients and two moments, all in float32."
    for stage in (1, 2, 3):
        if answer(N, 1, stage) != answer(N, 1, 0):
            return f"with one process, stage {stage} cuts nothing."
    if answer(N, PROCESSES, 0) != answer(N, 1, 0):
        return "stage 0 cuts nothing: every process has all, however many there are."
    return next(filter(None, (_judge(answer, stage) for stage in (1, 2, 3))), None)


def _judge(answer: BytesPerProcess, stage: int) -> str | None:
    found, right = answer(N, PROCESSES, stage), _expected(stage)
    if abs(found - right) < 1:
        return None
    for other in (1, 2, 3):
        if abs(found - _expected(other)) < 1:
            return f"stage {stage} is not what you count: that is stage {other}."
    if found < _expected(3):
        return f"at stage {stage} your process has less than its part of everything."
    if found > (WEIGHT + GRADIENT + MOMENTS) * N:
        return f"at stage {stage} your process has more than one that shares nothing."
    is_moments = abs(found - (WEIGHT + GRADIENT) * N - MOMENTS / 2 * N / PROCESSES) < 1
    if is_moments:
        return f"at stage {stage} only one of the two moments is there."
    return f"at stage {stage}, with {PROCESSES} processes, the number is another one."


def _expected(stage: int) -> float:
    weight = WEIGHT / (PROCESSES if stage >= 3 else 1)
    gradient = GRADIENT / (PROCESSES if stage >= 2 else 1)
    return (weight + gradient + MOMENTS / PROCESSES) * N
