"""Answers to the exercise of further/speed, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution

NOTEBOOK = "further/speed.ipynb"
SECRETS = r"max\(computing|2 \* m \* n \* k"  # what neither hints nor the notebook may say


def floor_ms(m, n, k, bytes_per_number, tflops, gb_per_s):
    """Return the ms of a product by the roofline."""
    computing = 2 * m * n * k / (tflops * 1e12)
    moving = bytes_per_number * (m * k + k * n + m * n) / (gb_per_s * 1e9)
    return 1000 * max(computing, moving)


def adds(m, n, k, size, tflops, gb_per_s):
    computing = 2 * m * n * k / (tflops * 1e9)
    return computing + size * (m * k + k * n + m * n) / (gb_per_s * 1e6)


def one_operation(m, n, k, size, tflops, gb_per_s):
    return m * n * k / (tflops * 1e9)


def smaller(m, n, k, size, tflops, gb_per_s):
    computing = 2 * m * n * k / (tflops * 1e9)
    return min(computing, size * (m * k + k * n + m * n) / (gb_per_s * 1e6))


def seconds(*numbers):
    return floor_ms(*numbers) / 1000


def arithmetic_only(m, n, k, size, tflops, gb_per_s):
    return 2 * m * n * k / (tflops * 1e9)


def without_result(m, n, k, size, tflops, gb_per_s):
    return max(2 * m * n * k / (tflops * 1e9), size * (m * k + k * n) / (gb_per_s * 1e6))


def always_float32(m, n, k, size, tflops, gb_per_s):
    return floor_ms(m, n, k, 4, tflops, gb_per_s)


def squares(m, n, k, size, tflops, gb_per_s):
    return 2 * m**3 / (tflops * 1e9)


SOLUTIONS = [
    Solution(
        "floor_ms",
        right=[floor_ms],
        wrong=[
            (adds, "side by side"),
            (one_operation, "two operations for each term"),
            (smaller, "the smaller limit"),
            (seconds, "0.001 times"),
            (arithmetic_only, "what limits it"),
            (without_result, "written, too"),
            (always_float32, "half the transfers"),
            (squares, "a large product should take"),
            (lambda *numbers: "3 ms", "a number of milliseconds"),
        ],
    ),
]
