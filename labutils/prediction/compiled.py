"""What a compiled step asks of a device, by torch's own compiler, without a card and without data.

TorchDynamo, AOTAutograd and TorchInductor take the step as they would there: what autograd keeps,
what is fused, in which order kernels run, and which buffer takes another's place is their answer.
Inductor writes Python that allocates, frees, and calls kernels and libraries. The kernels are left
out; the rest runs on fake tensors, inside the log that an eager step has (`prediction.trace`).

All of this is private to torch. Where a release differs, or a step cannot be compiled, NoPlan is
raised, and the caller counts the step as if it were not compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import _pop_mode_temporarily
from torch.utils._pytree import tree_map_only

from labutils.config.card import Gpu
from labutils.techniques.compiling import silence_known_warnings, with_own_code

ON_CARD = torch.device("cuda", 0)
# of Inductor: one function, each time anew, without checks of strides
SWITCHED_OFF = "fx_graph_cache", "graph_partition", "size_asserts", "alignment_asserts"
CALL = re.compile(r"(?ms)^def call\(args\):\n.*?(?=^\S)")
CPU_KERNEL = re.compile(r"\bcpp_fused\w*")
NOT_HERE = {  # in generated code: what needs a card, or data
    "torch.cuda.set_device(0)": "pass",
    "with torch.cuda._DeviceGuard(0):": "if True:",
    "torch.ops.higher_order.run_": "run_",
}


class NoPlan(Exception):
    """The compiler has refused a step, or is not as it is known here."""


def original(part: Any) -> Any:
    """Return what `torch.compile` was given to make a function or a model, None if it did not."""
    if isinstance(part, nn.Module):
        return vars(part).get("_modules", {}).get("_orig_mod")
    return getattr(part, "_torchdynamo_orig_callable", None)


def planned(part: Any, gpu: Gpu | None) -> Any:
    """Return a loss or a model as `torch.compile` would run it on a card, or without one on a CPU:
    it takes fake tensors, and allocates and frees what compiled code would.
    """
    from torch._inductor.compile_fx import compile_fx  # seconds, which an eager step does not pay

    silence_known_warnings()
    backend = partial(compile_fx, inner_compile=partial(_plan, gpu))
    plan = torch.compile(with_own_code(part), backend=backend, dynamic=False)
    if not isinstance(part, nn.Module):
        return plan
    model: Any = torch.compile(part, backend="eager")  # only to have all that a compiled model has
    model.forward = plan
    return model


def as_traced(part: Any, gpu: Gpu | None, is_compiled: bool) -> Any:
    """Return what `torch.compile` has made as a plan, or as it was before; all else as it is."""
    plain = original(part)
    if plain is None:
        return part
    return planned(plain, gpu) if is_compiled else plain


def plans_made() -> int:
    """Return how many graphs torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, the log looks away; whatever is raised there becomes NoPlan."""
    try:
        with _pop_mode_temporarily():
            yield
    except Exception as error:
        first, *_ = str(getattr(error, "inner_exception", error)).strip().splitlines() or [""]
        raise NoPlan(f"{type(error).__name__}: {first}") from error


def _plan(gpu: Gpu | None, graph: torch.fx.GraphModule, inputs: list, **how: Any) -> Any:
    """Return what Inductor would load for a graph of a forward or a backward pass."""
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering

    fake: Any = detect_fake_mode(inputs)
    plan: Any = ModuleType("plan")

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        with fake:
            layout = tensor.size(), tensor.stride()
            return torch.empty_strided(*layout, dtype=tensor.dtype, device=ON_CARD)

    def load(lowered: GraphLowering, code: Any) -> ModuleType:
        plan.__file__, plan.call = plan.__name__, _call_of(code.value, lowered.constants)
        return plan

    if gpu:  # what was traced on the CPU, by CUDA's rules, is on the card from here on
        inputs = tree_map_only(torch.Tensor, moved, inputs)
        for node in graph.graph.nodes:
            arguments = node.args, node.kwargs
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: ON_CARD, arguments)
            if "val" in node.meta:
                node.meta["val"] = tree_map_only(torch.Tensor, moved, node.meta["val"])
    with (
        config.patch(dict.fromkeys(SWITCHED_OFF, False)),
        patch.object(GraphLowering, "_compile_to_module_lines", load),
        # shapes are known already, and these want the device itself, for tensors without data too
        patch.object(compile_fx, "fake_tensor_prop", lambda *_, **__: fake),
        patch.object(torch.Tensor, "__invert__", lambda x: torch.bitwise_not(x)),
        patch.object(torch.Tensor, "copy_", lambda x, *how: torch.ops.aten.copy_(x, *how)),
        _card_without_kernels(gpu) if gpu else nullcontext(),
    ):
        as_is = compile_fx.compile_fx_inner(graph, inputs, **how)
    return vars(plan).get("call", as_is)  # a graph without operations is not compiled


def _call_of(code: str, constants: dict[str, torch.Tensor]) -> Callable[[list], Any]:
    """Return the function in generated code that allocates, frees, and calls libraries."""
    from torch._inductor.select_algorithm import extern_kernels

    def empty(*layout: Any) -> torch.Tensor:
        return torch.empty_strided(*layout[:2], dtype=layout[2])

    def view(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    def from_state(_: Any, operation: Callable, *args: Any, **kwargs: Any) -> Any:
        return operation(*args, **kwargs)

    def with_state(*call: Any, **kwargs: Any) -> Any:
        return torch.empty(16, dtype=torch.uint8), from_state(None, *call, **kwargs)

    text = CALL.findall(code)[0]
    for there, here in NOT_HERE.items():
        text = text.replace(there, here)
    world: dict[str, Any] = {
        name: lambda *_: None for name in (*CPU_KERNEL.findall(text), "get_raw_stream")
    }
    world |= {name: torch.empty_like(value) for name, value in constants.items()}
    world |= {f"empty_strided_{where}": empty for where in ("cuda", "cpu", "cpu_pinned")}
    world |= {"torch": torch, "aten": torch.ops.aten, "extern_kernels": extern_kernels}
    world |= {"reinterpret_tensor": view, "copy_if_misaligned": lambda tensor: tensor}
    world |= {"run_and_save_rng_state": with_state, "run_with_rng_state": from_state}
    world |= {"device": torch.device, "inf": float("inf"), "nan": float("nan")}
    exec(text, world)
    world["call"]._boxed_call = True  # it empties its list of arguments, so that they can die
    return world["call"]


@contextmanager
def _card_without_kernels(gpu: Gpu) -> Iterator[None]:
    """Inside, Inductor plans for a card, there or not, and writes no kernel for it."""
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    major, minor = gpu.capability
    facts = {
        "multi_processor_count": gpu.n_sms,
        "major": major,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": gpu.threads_per_sm,
        "max_threads_per_block": 1024,
        "warp_size": 32,
    }
    properties = SimpleNamespace(**facts, minor=minor, name="planned")  # asked for with CUDA
    summary = DeviceProperties(type="cuda", index=0, cc=10 * major + minor, **facts)
    get_rng_state = torch.cuda.get_rng_state  # whose state torch saves around the compiler
    if not torch.cuda.is_available():
        get_rng_state = partial(torch.empty, 16, dtype=torch.uint8)
    interface: Any = type("Planned", (device_interface.CudaInterface,), {})
    interface.get_device_properties = staticmethod(lambda *_: properties)
    interface.get_compute_capability = staticmethod(lambda *_: summary.cc)
    interface.is_bf16_supported = staticmethod(lambda *_, **__: gpu.has_bf16)

    def call_kernel(kernel: Any, *_: Any, deallocate_ws: bool = True, **__: Any) -> None:
        for workspace in kernel.args.workspace_args:
            V.graph.wrapper_code.generate_workspace_allocation(workspace)
        if deallocate_ws:
            kernel.deallocate_workspaces()

    device_interface.get_interface_for_device("cuda")  # so that all are registered
    with (
        patch.dict(device_interface.device_interfaces, {"cuda": interface, "cuda:0": interface}),
        patch.object(DeviceProperties, "create", lambda _: summary),
        patch.object(torch.cuda, "get_device_properties", lambda _=None: properties),
        patch.object(torch.cuda, "get_device_capability", lambda _=None: gpu.capability),
        patch.object(torch.cuda, "get_rng_state", get_rng_state),
        patch.object(scheduler, "has_triton", lambda *_: True),
        patch.object(TritonScheduling, "define_kernel", lambda *_: "left_out"),
        patch.multiple(TritonKernel, codegen_kernel=lambda *_, **__: "", call_kernel=call_kernel),
    ):
        yield
