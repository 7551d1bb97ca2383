"""What single operations of this machine were measured to take, kept in `runs/calibration/`.

A step's time here is predicted from them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
from pydantic import TypeAdapter

from labutils.config.card import Speed
from labutils.files import runs_dir, write_atomically
from labutils.machine.here import device_name
from labutils.prediction.calibrate_cpu import CpuRates, measure_cpu
from labutils.prediction.calibrate_gpu import measure_gpu


def cpu_rates() -> CpuRates:
    """Return what was measured on this CPU. The first time that takes a few seconds."""
    return _cpu_rates(device_name(torch.device("cpu")), runs_dir())


@lru_cache(maxsize=4)
def _cpu_rates(name: str, folder: Path) -> CpuRates:
    path = _path(name, folder)
    if path.exists():
        return CpuRates.model_validate_json(path.read_text())
    return calibrate_cpu()


def calibrate_cpu() -> CpuRates:
    """Measure this CPU and keep what was measured."""
    name = device_name(torch.device("cpu"))
    found = measure_cpu(name)
    _keep(name, found.model_dump())
    return found


def gpu_speed(device: torch.device) -> Speed:
    """Return what was measured on this GPU. The first time that takes a few seconds."""
    return _gpu_speed(device_name(device), runs_dir())


@lru_cache(maxsize=4)
def _gpu_speed(name: str, folder: Path) -> Speed:
    path = _path(name, folder)
    if path.exists():
        return TypeAdapter(Speed).validate_json(path.read_text())
    return calibrate_gpu(torch.device("cuda"))


def calibrate_gpu(device: torch.device) -> Speed:
    """Measure a GPU and keep what was measured."""
    found = measure_gpu(device)
    _keep(device_name(device), asdict(found))
    return found


def _path(name: str, folder: Path) -> Path:
    words = "".join(c if c.isalnum() else " " for c in name).lower().split()
    return folder / "calibration" / f"{'-'.join(words)}.json"


def _keep(name: str, values: dict) -> None:
    write_atomically(_path(name, runs_dir()), json.dumps(values, indent=1).encode())
    _cpu_rates.cache_clear()
    _gpu_speed.cache_clear()
