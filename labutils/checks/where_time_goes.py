"""Exercise of further/where_time_goes: a host and a device that wait for each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from labutils.checks.core import exercise

Operations = Sequence[tuple[float, float]]  # (µs on the host, µs on the device) of each
LATE_HOST = ((10.0, 2.0), (10.0, 2.0), (10.0, 2.0))
LATE_DEVICE = ((2.0, 10.0), (2.0, 10.0), (2.0, 10.0))
MIXED = ((10.0, 2.0), (1.0, 30.0), (1.0, 1.0), (40.0, 5.0))


@exercise(
    hints=(
        "Keep two times: when the host is free again, and when the device is free again.",
        "The host issues one operation after the other, and it does not wait for the device.",
        "An operation begins when two things have happened: it was issued, and the device is done "
        "with the one before.",
    )
)
def two_clocks(function: Callable[[Operations], float] | None) -> str | None:
    """Check `two_clocks(operations)`: when the device has done all of them, in µs.

    `operations` are pairs: µs that the host needs to issue one, µs that the device computes it.
    """
    mixed = function(MIXED)
    if not isinstance(mixed, (int, float)) or isinstance(mixed, bool):
        return f"a number of microseconds is expected, not {mixed!r}."
    host, device = (sum(times) for times in zip(*MIXED, strict=True))
    if math.isclose(mixed, host + device):
        return "your host waits for the device each time. It issues the next operation at once."
    if math.isclose(function(LATE_DEVICE), sum(issuing for issuing, _ in LATE_DEVICE)):
        return "you return when the host has issued all. The device may still compute."
    if math.isclose(function(LATE_HOST), sum(computing for _, computing in LATE_HOST)):
        return "the device cannot begin what is not issued yet."
    if math.isclose(mixed, max(host, device)):
        return "the larger sum is a lower bound. The device can be idle, and then work for long."
    for operations in (LATE_HOST, LATE_DEVICE, MIXED):
        found, expected = function(operations), _end(operations)
        if not math.isclose(found, expected):
            return f"for {operations} the device is done after {expected:g} µs, not {found:g}."
    return None


def _end(operations: Operations) -> float:
    host = device = 0.0
    for issuing, computing in operations:
        host += issuing
        device = max(device, host) + computing
    return device
