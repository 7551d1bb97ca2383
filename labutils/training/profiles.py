"""torch.profiler and a clock on any piece of code: time and bytes of each operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from labutils.memory.device_memory import free_memory
from labutils.memory.kinds import PRODUCT_KINDS, kind_of

WARM_UP = 2  # calls that are left out: they choose kernels and allocate


def record(
    call: Callable[[], object], device: torch.device, n: int = 2, *, memory: bool = False
) -> profile:
    """Return a profile of `n` calls after WARM_UP others, with the shapes of inputs.

    `memory` records bytes as well, which takes time: do not read times from such a profile.
    """
    return _record(call, device, n, profile_memory=memory)


def record_stacks(call: Callable[[], object], device: torch.device) -> profile:
    """Return a profile of one call with the Python lines of each operation."""
    # without `verbose` the stacks stay empty in some versions of torch
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    return _record(call, device, 1, with_stack=True, experimental_config=verbose)


def _record(call: Callable[[], object], device: torch.device, n: int, **options) -> profile:
    free_memory()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=1, warmup=WARM_UP - 1, active=n)
    with profile(activities=activities, schedule=plan, record_shapes=True, **options) as found:
        for _ in range(WARM_UP + n):
            call()
            found.step()
    return found


def own_ms(found: profile, device: torch.device) -> dict[str, tuple]:
    """Return {operation: (ms of its own, calls)}, largest first.

    On a GPU the time is that of the operation's kernels. Kernels and the profiler's own
    annotations are listed by torch as well: they are left out, so no time counts twice.
    """
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return _sums(found, by, 1e-3)


def _sums(found: profile, by: str, unit: float) -> dict[str, tuple]:
    sums: dict[str, tuple[float, int]] = {}
    for event in found.key_averages():
        if event.device_type != torch.autograd.DeviceType.CPU or event.is_user_annotation:
            continue
        if event.key.startswith("ProfilerStep"):
            continue
        name = event.key.removeprefix("aten::")
        value, calls = sums.get(name, (0.0, 0))
        sums[name] = (value + unit * getattr(event, by), calls + event.count)
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def ms_by_kind(own: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Return {kind of operation: ms} from what `own_ms` returns.

    Kinds are those of `memory.kinds`. What only looks at memory anew counts as elementwise.
    """
    found: dict[str, float] = {}
    for name, (ms, _) in own.items():
        kind = kind_of(name)
        found[kind] = found.get(kind, 0.0) + ms
    return found


def product_ms(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return (milliseconds in matrix products, in all operations) of profiled calls."""
    own = own_ms(record(call, device, 3), device)
    by_kind = ms_by_kind(own)
    return sum(by_kind.get(kind, 0.0) for kind in PRODUCT_KINDS), sum(by_kind.values())
