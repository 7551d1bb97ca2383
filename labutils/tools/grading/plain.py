"""An answer as plain data, which can be sent to another process without bringing code along."""

from __future__ import annotations

from typing import Any

from labutils.tools.grading.tampering import TamperingError

PLAIN = (bool, int, float, complex, str, type(None))
MOST_ITEMS = 10_000


def plain(value: Any) -> Any:
    """Return an answer as lists of plain data that JSON can hold, with the name of its class.

    Arrays and tensors become lists. Raises TypeError, and `TamperingError` for a class of the
    submission's own: it could be equal to anything.
    """
    return _plain(value, [MOST_ITEMS])


def _plain(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise TypeError(f"the answer has more than {MOST_ITEMS} parts")
    kind = type(value)
    if kind in PLAIN:
        return ["complex", value.real, value.imag] if kind is complex else value
    if kind in (list, tuple, set, frozenset, range):
        name = {frozenset: "set", range: "list"}.get(kind, kind.__name__)
        return [name, *(_plain(part, left) for part in value)]
    if kind is dict:
        return ["dict", *([_plain(key, left), _plain(value[key], left)] for key in value)]
    if kind.__module__.split(".")[0] in ("torch", "numpy") and hasattr(kind, "tolist"):
        return _plain(value.tolist(), left)
    if any(part.__module__ == "__main__" for part in kind.__mro__):
        raise TamperingError(f"its answer is of a class of its own: class {kind.__name__}")
    raise TypeError(f"the answer is a {kind.__name__}, not a plain value")


def unpacked(data: Any) -> Any:
    """Return the answer that `plain` packed."""
    if not isinstance(data, list):
        return data
    name, *parts = data
    if name == "complex":
        return complex(*parts)
    if name == "dict":
        return {unpacked(key): unpacked(value) for key, value in parts}
    return {"list": list, "tuple": tuple, "set": set}[name](unpacked(part) for part in parts)
