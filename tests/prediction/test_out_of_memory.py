"""Too little memory gives a short answer with ways out, and the memory back."""

import pytest
import torch

from labutils import machine
from labutils.machine import free_host_bytes, usable_cpus
from labutils.memory import device_memory as memory
from labutils.memory.device_memory import without_expandable_segments
from labutils.memory.errors import is_out_of_memory, short_message
from tests.helpers import in_a_process

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 7.60 GiB of which 612.00 "
            "MiB is free. Including non-PyTorch memory, this process has 6.9 GiB memory in use. …",
            "asked for 1.50 GiB more, 612.00 MiB free",
        ),
        (
            "CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which "
            "130.05 GiB is free. 7.10 GiB allowed; Of the allocated memory 6.9 GiB is allocated by PyTorch …",
            "asked for 200.00 MiB more, 7.10 GiB allowed",
        ),
        (
            "[enforce fail at alloc_cpu.cpp:132] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 1125899906842624 bytes. Error code 12 (Cannot allocate memory)",
            "asked for 1,048,576.00 GiB more",
        ),
        ("CUDA driver error: out of memory", "CUDA driver error: out of memory"),
        ("CUDA error: out of memory\nCUDA kernel errors might be …", "CUDA error: out of memory"),
    ],
)
def test_what_was_asked_for_and_what_is_free(text, short):
    error = RuntimeError(text)
    assert is_out_of_memory(error)
    assert short_message(error) == short


def test_only_errors_that_say_so_are_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("…")) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(RuntimeError("my own: out of memory budget"))


@pytest.mark.parametrize(
    ("system", "release", "hip", "answer"),
    [
        ("linux", "6.1.0", None, ""),
        ("win32", "10", None, "not on "),
        ("linux", "5.15-Microsoft-standard-WSL2", None, "not under WSL"),
        ("linux", "6.1.0", "6.4", "not under ROCm"),
    ],
)
def test_expandable_segments_exist_on_linux_only(monkeypatch, system, release, hip, answer):
    monkeypatch.setattr(memory.sys, "platform", system)
    monkeypatch.setattr(memory.platform, "release", lambda: release)
    monkeypatch.setattr(memory.torch.version, "hip", hip)
    assert without_expandable_segments().startswith(answer)
    assert bool(without_expandable_segments()) == bool(answer)


CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import torch, labutils as lab; lab.setup(); config = lab.load_config('fp32').on('cpu')")
before = lab.allocated_bytes(torch.device("cpu"))
assert not shell.run_cell('''
def step():
    activations = torch.ones(2**22)
    return torch.empty(2**50, dtype=torch.uint8)

step()
''').success
assert lab.allocated_bytes(torch.device("cpu")) == before, "the traceback keeps tensors"
assert not shell.run_cell('''
def wait():
    raise KeyboardInterrupt

wait()
''').success, "Run All would go on"
assert shell.run_cell("torch.ones(2).sum().item()").result == 2.0
shell.run_cell("torch.ones(2) @ torch.ones(3)")
"""


def test_a_cell_that_ran_out_of_memory_or_was_stopped_gives_a_short_answer(tmp_path):
    pytest.importorskip("IPython")
    done = in_a_process(CELLS, IPYTHONDIR=str(tmp_path), NO_COLOR="1")
    assert done.returncode == 0, done.stderr[-2000:]
    first = done.stdout[done.stdout.index("Out of memory") :].splitlines()
    assert first[0] == "Out of memory: asked for 1,048,576.00 GiB more"
    assert first[1] == "in line 3 of step: return torch.empty(2**50, dtype=torch.uint8)"
    assert first[2].startswith("For `config` (fp32): Alone fp32 needs 7")
    assert first[3] == "Interrupted in line 2 of wait: raise KeyboardInterrupt"  # one line
    assert "DefaultCPUAllocator" not in done.stdout and done.stdout.count("Interrupt") == 2
    assert "same number of elements" in done.stdout  # other errors look as ever


V2 = {
    "hub/user/cpu.max": "max 100000\n",
    "hub/cpu.max": "100000 100000\n",  # one CPU for all users
    "hub/user/memory.max": f"{GIB}\n",
    "hub/user/memory.current": f"{GIB // 2}\n",
    "hub/user/memory.stat": f"anon 1\ninactive_file {GIB // 8}\n",
    "hub/memory.max": "max\n",
    "hub/memory.current": f"{GIB}\n",
}
V1 = {
    "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "cpu,cpuacct/user/cpu.cfs_quota_us": "150000\n",
    "cpu,cpuacct/user/cpu.cfs_period_us": "100000\n",
    "memory/user/memory.limit_in_bytes": f"{GIB}\n",
    "memory/user/memory.usage_in_bytes": f"{GIB // 2}\n",
    "memory/user/memory.stat": f"cache 3\ntotal_inactive_file {GIB // 8}\n",
}


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [("0::/hub/user\n", V2, 1), ("4:memory:/user\n3:cpu,cpuacct:/user\n0::/\n", V1, 2)],
    ids=["version 2", "version 1"],
)
def test_limits_of_the_control_group_count(tmp_path, monkeypatch, membership, files, cpus):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usable_cpus() == cpus
    assert free_host_bytes() == GIB // 2 + GIB // 8
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert usable_cpus() == 1
