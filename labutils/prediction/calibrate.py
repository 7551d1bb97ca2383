"""What single operations of this machine were measured to take, kept in `runs/calibration/`.

A step's time here is predicted from them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

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
    return _kept(_path(name, folder), TypeAdapter(CpuRates)) or calibrate_cpu()


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
    return _kept(_path(name, folder), TypeAdapter(Speed)) or calibrate_gpu(torch.device("cuda"))


def calibrate_gpu(device: torch.device) -> Speed:
    """Measure a GPU and keep what was measured."""
    found = measure_gpu(device)
    _keep(device_name(device), asdict(found))
    return found


def _path(name: str, folder: Path) -> Path:
    words = "".join(c if c.isalnum() else " " for c in name).lower().split()
    return folder / "calibration" / f"{'-'.join(words)}.json"


def _kept(path: Path, kind: TypeAdapter) -> Any:
    """Return what a file keeps; None if there is none, or none that this version can read."""
    with suppress(OSError, ValidationError):
        return kind.validate_json(path.read_bytes())
    return None


def _keep(name: str, values: dict) -> None:
    # where nothing can be written it is measured again in the next process
    with suppress(OSError):
        write_atomically(_path(name, runs_dir()), json.dumps(values, indent=1).encode())
    _cpu_rates.cache_clear()
    _gpu_speed.cache_clear()
