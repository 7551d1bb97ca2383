"""Exercise of further/speed: which two runs show a cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labutils.checks.core import exercise


@exercise(
    hints=(
        "Write down, for each pair that you consider, every setting in which its runs differ.",
        "Two runs that differ in one setting show what this setting does, and nothing else.",
        "You need not take the run of the claim. Look for two runs that agree in all but the "
        "cause.",
    )
)
def speed_control(
    runs: Mapping[str, Mapping[str, object]], cause: str, pair: Sequence[str] | None
) -> str | None:
    """Check which two of `runs`, {name: {setting: value}}, show what the setting `cause` does."""
    is_list = isinstance(pair, (list, tuple, set)) and len(pair) == 2
    if not is_list or not set(pair) <= set(runs):
        return f'the answer is two of the names {", ".join(runs)}, as in ("A", "B").'
    first, second = (runs[name] for name in pair)
    differing = [setting for setting in first if first[setting] != second[setting]]
    if not differing:
        return "both runs have the same settings. They show the noise, which is no cause."
    others = ", ".join(setting for setting in differing if setting != cause)
    if cause not in differing:
        return f"both runs have the same {cause}. They show what {others} does."
    if others:
        return f"they differ in {cause} and in {others}. The time may come from either."
    return None
