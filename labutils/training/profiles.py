"""torch.profiler on any piece of code: the time of each operation.

Taught in 04, section 5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from labutils.memory.device_memory import free_memory
from labutils.memory.kinds import PRODUCT_KINDS, kind_of

WARM_UP = 2  # calls that are left out: they choose kernels and allocate


def record(
    call: Callable[[], object], device: torch.device, n: int = 2, *, stacks: bool = False
) -> profile:
    """Return a profile of `n` calls after WARM_UP others, with the shapes of inputs.

    `stacks` records the Python lines of each operation as well, which takes time.
    """
    free_memory()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=WARM_UP - 1, active=n),
        record_shapes=True,
        with_stack=stacks,
        acc_events=True,  # there is one cycle; else torch warns that it clears those before
        # without `verbose` the stacks stay empty in some versions of torch
        experimental_config=torch._C._profiler._ExperimentalConfig(verbose=stacks),
    ) as profiled:
        for _ in range(WARM_UP + n):
            call()
            profiled.step()
    return profiled


def own_ms(profiled: profile, device: torch.device) -> dict[str, tuple[float, int]]:
    """Return {operation: (ms of its own, calls)}, largest first.

    On a GPU the time is that of the operation's kernels. Kernels and the profiler's own
    annotations are listed by torch as well: they are left out, so no time counts twice.
    """
    sums: dict[str, tuple[float, int]] = {}
    for event in profiled.key_averages():
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        # with stacks: "module.py(12): function", "<built-in function id>", "nn.Module: Linear_0"
        is_python = "(" in event.key or event.key.startswith(("<", "nn.Module"))
        is_note = event.is_user_annotation or event.key.startswith("ProfilerStep")
        if is_kernel or is_python or is_note:
            continue
        us = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        name = event.key.removeprefix("aten::")
        ms, calls = sums.get(name, (0.0, 0))
        sums[name] = (ms + us / 1000, calls + event.count)
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def product_ms(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return (milliseconds in matrix products, in all operations) of profiled calls."""
    own = own_ms(record(call, device, 3), device)
    in_products = [ms for name, (ms, _) in own.items() if kind_of(name) in PRODUCT_KINDS]
    return sum(in_products), sum(ms for ms, _ in own.values())
