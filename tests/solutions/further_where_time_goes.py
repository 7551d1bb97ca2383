"""Answers to the exercise of further/where_time_goes, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution

NOTEBOOK = "further/where_time_goes.ipynb"
SECRETS = r"max\(device, host\)"  # what neither hints nor the notebook may say


def two_clocks(operations):
    """Return when the device has done all operations, in µs."""
    host = device = 0.0
    for issuing, computing in operations:
        host += issuing
        device = max(device, host) + computing
    return device


def waits_each_time(operations):
    return sum(issuing + computing for issuing, computing in operations)


def larger_sum(operations):
    return max(sum(one[0] for one in operations), sum(one[1] for one in operations))


def host_only(operations):
    return sum(issuing for issuing, _ in operations)


def device_only(operations):
    return sum(computing for _, computing in operations)


def first_issue_only(operations):
    return operations[0][0] + sum(computing for _, computing in operations)


SOLUTIONS = [
    Solution(
        "two_clocks",
        right=[two_clocks],
        wrong=[
            (waits_each_time, "your host waits"),
            (larger_sum, "a lower bound"),
            (host_only, "may still compute"),
            (device_only, "not issued yet"),
            (first_issue_only, "the device is done after"),
            (lambda operations: None, "a number of microseconds"),
        ],
    ),
]
