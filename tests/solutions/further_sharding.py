"""Answers to the exercise of further/sharding, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution, broken

NOTEBOOK = "further/sharding.ipynb"
SECRETS = r"stage >= [123]|8 \* n_parameters / n"  # what neither hints nor the notebook may say


def kept(n_parameters: int, n_processes: int, stage: int) -> float:
    weights = gradients = 4 * n_parameters
    moments = 8 * n_parameters
    if stage >= 1:
        moments /= n_processes
    if stage >= 2:
        gradients /= n_processes
    if stage >= 3:
        weights /= n_processes
    return weights + gradients + moments


def one_moment_cut(n_parameters: int, n_processes: int, stage: int) -> float:
    if stage == 0 or n_processes == 1:
        return 16 * n_parameters
    return 8 * n_parameters + 4 * n_parameters / n_processes


SOLUTIONS = {
    "bytes_per_process": Solution(
        right=[kept],
        wrong=[
            ("two moments, all in float32", broken(kept, ("moments = 8", "moments = 4"))),
            ("all in float32", broken(kept, ("gradients = 4", "gradients = 2"))),
            ("stage 0 cuts nothing", broken(kept, ("stage >= 1", "stage >= 0"))),
            ("stage 1 is not what you count", broken(kept, ("stage >= 2", "stage >= 1"))),
            ("that is stage 3", broken(kept, ("stage >= 3", "stage >= 2"))),
            ("that is stage 1", broken(kept, ("stage >= 2", "stage >= 3"))),
            ("stage 2, with 3 processes", broken(kept, ("stage >= 1", "stage == 1"))),
            ("less than", broken(kept, ("weights /= n_processes", "weights /= n_processes**2"))),
            ("another one", broken(kept, ("moments /= n_processes", "moments /= n_processes**2"))),
            ("more than one", broken(kept, ("moments /= n_processes", "moments *= n_processes"))),
            ("only one of the two moments", one_moment_cut),
            ("that is stage 2", broken(kept, ("stage >= 3:", "stage > 3:"))),
            ("it raised TypeError", lambda n, processes: 16 * n / processes),
            ("stage 0 cuts nothing", lambda n, processes, stage: 16 * n / processes),
        ],
    ),
}
