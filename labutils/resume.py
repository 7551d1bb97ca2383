"""The state of a run on disk, from which a killed run continues as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile

import torch
from torch import nn

from labutils.records import RecordError, RunRecord, runs_dir, write_atomically

STATE_VERSION = 1
COPIES = 3  # of the parameters in a state, at most: with AdamW's two moments


class _Part(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def state_files(name: str | None = None) -> list[Path]:
    """Return the saved states in runs/ (of the runs with a name), sorted."""
    return sorted(p for p in runs_dir().glob("*.state") if name in (None, p.stem.rsplit("-", 5)[0]))


class Saver:
    """Saves what decides the steps to come: parameters, optimizer, loss scale, random numbers, the step; and the log.

    The file, `runs/<name>-<experiment>-<repeat>-<id>.state`, is replaced as a whole every `every` steps (0: never); the
    steps done are also the position in the data, which come in the same order in every run. `finish` deletes it.
    `planned` is the record that the run will fill: only states of an equal experiment and repeat are continued (`left`
    are those there are). They are read with `weights_only`: no code in a file runs.
    """

    def __init__(self, planned: RunRecord, every: int, run_id: str) -> None:
        self.every, self.name, self.done, self.state = every, planned.name, 0, None
        self.experiment = f"{planned.name}-{planned.experiment}-"
        self.run = f"{self.experiment}{planned.repeat}"
        self.path = runs_dir() / f"{self.run}-{run_id}.state"
        self.left = [path for path in state_files(self.name) if path.name.startswith(f"{self.run}-")]

    def find(self) -> int:
        """Look for this experiment's furthest state, and return its steps; 0 if there is no state of that name.

        Raises RecordError if one is damaged, or if those there are belong to other experiments.
        """
        files = state_files(self.name)
        for path in self.left:
            state = _read(path)
            if state["step"] >= self.done:
                self.path, self.state, self.done = path, state, state["step"]
        if files and not any(path.name.startswith(self.experiment) for path in files):
            raise RecordError(
                f"{files[-1].name} is of another experiment: config, code, text, device or versions were different. "
                "Put that back, or train from the beginning without --resume"
            )
        return self.done

    def require_room(self, model: nn.Module) -> None:
        """Raise OSError if the disk has no room for two states of the model, the old one and the new."""
        needed = 2 * COPIES * sum(p.numel() * p.element_size() for p in model.parameters()) if self.every else 0
        free = shutil.disk_usage(runs_dir()).free
        if needed > free:
            raise OSError(
                f"save_every: {self.every} needs {needed / 2**30:.1f} GiB in {runs_dir()}, which has "
                f"{free / 2**30:.1f}. Make room, let LABUTILS_RUNS name a folder elsewhere, or set save_every: 0"
            )

    def restore(self, parts: Mapping[str, _Part]) -> int:
        """Put the state that `find` has found into the parts and the random generators; return the steps done."""
        if not self.state:
            return 0
        try:
            for key, part in parts.items():
                part.load_state_dict(self.state["parts"][key])
            torch.set_rng_state(self.state["random"])
            if self.state["random_cuda"] is not None:
                torch.cuda.set_rng_state(self.state["random_cuda"])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(self.path, error) from error
        self.state = None
        return self.done

    def save_if_due(self, parts: Mapping[str, _Part], done: int) -> None:
        """Save the state after `done` steps, if it is time. On a full disk say so, keep the older state, and go on."""
        if not self.every or done % self.every:
            return
        state = {
            "version": STATE_VERSION,
            "step": done,
            "parts": {key: part.state_dict() for key, part in parts.items()},
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        }
        try:
            write_atomically(self.path, lambda file: torch.save(state, file))
            self.done = done
        except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
            print(f"{self.name}: state of step {done} NOT SAVED: {str(error).splitlines()[0]}; the run goes on")

    def finish(self) -> None:
        """Delete the state, which a finished run needs no more, and what a killed process may have left of it."""
        for path in (self.path, *self.path.parent.glob(f".{self.path.name[-40:]}-*")):
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        with ZipFile(path) as file:
            if broken := file.testzip():  # torch does not look at the checksums it has written
                raise ValueError(f"wrong checksum of {broken}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["version"] != STATE_VERSION or not isinstance(state["step"], int):
            raise ValueError(f"version {state['version']!r}, expected {STATE_VERSION}")
    except OSError:
        raise
    except Exception as error:  # whatever a damaged zip file or pickle makes of torch's readers
        raise _damaged(path, error) from error
    return state


def _damaged(path: Path, error: Exception) -> RecordError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return RecordError(f"{path.name} is damaged, or no saved state ({type(error).__name__}: {reason[:100]}); delete it")
