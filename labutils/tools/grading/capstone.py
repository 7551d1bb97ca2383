"""Judge the capstone's answer, a config file, by training its small twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from labutils.tools.grading.judge import verdict
from labutils.tools.grading.process import Limits, Outcome, in_own_process
from labutils.training import capstone

SECONDS = 600  # of processor time, for predictions and two short training runs


def judge_config(content: bytes, limits: Limits) -> Outcome:
    """Return the outcome of a config file's bytes."""
    return in_own_process(_judge, (content,), replace(limits, seconds=SECONDS))


def _judge(content: bytes) -> Outcome:
    path = Path("capstone.yaml").resolve()
    path.write_bytes(content)
    try:
        trial = capstone.try_config(path, torch.device("cpu"))
    except ValueError as error:  # what a config's reader says of a bad file
        return Outcome("wrong", str(error)[:500])
    return verdict("capstone", (), trial)
