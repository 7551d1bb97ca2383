"""The capstone's task: a large model, a small budget, a loss to reach; and a trial of a config.

Bytes and milliseconds of the large model are predicted for a card. The loss comes from a real run
of a small twin on this machine: the same techniques and learning rate, a smaller model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labutils.config.card import CONTEXT_GIB
from labutils.config.choices import OPTIMIZERS, PRECISIONS
from labutils.config.reader import config_of, find_config, load_config
from labutils.config.resolve import resolve
from labutils.config.schema import Config
from labutils.files import runs_dir, write_atomically
from labutils.machine import here
from labutils.memory.ledger import gib
from labutils.prediction.memory import needed_gib, predict_memory
from labutils.prediction.time import predict_time
from labutils.session import run_experiment
from labutils.training.records import RunRecord
from labutils.workload.gpt2 import build_model

CARD, BUDGET_GIB = "rtx4060", 5.5
SLOWER = 1.1  # times the predicted step of the start
LOSS_GAP = 0.02  # of the twin's held-out loss: rounding and clipping stay below, a stall does not
START = "fp32_config"  # in configs/
TASK: dict[str, Any] = {
    "model": "gpt2-medium",
    "weights": "random",
    "corpus": "stdlib",
    "seed": 0,
    "seq_len": 1024,
    "tokens_per_step": 8192,
    "steps": 60,
    "learning_rate": 5e-5,  # a rate for fine-tuning: updates are small beside the weights
    "lr_schedule": "constant",
    "dropout": 0.0,
}
AT_START = {"micro_batch_size": 8}
TWIN: dict[str, Any] = {
    "model": "gpt2-nano",
    "seq_len": 128,
    "tokens_per_step": 512,
    "compile": "off",
    "memory_limit_gib": 0,
    "expandable_segments": False,
    "eval_every": 0,
    "save_every": 0,
}
TWIN_SEQUENCES, TWIN_CHUNK = 4, 128
CARD_STEPS = 4


@dataclass(frozen=True)
class Trial:
    """What is known of a reader's config: of the large model predicted, of its twin measured.

    Sizes are in GiB, times in ms, losses are the twin's held-out ones. `kept_gib` are weights,
    gradients and moments where all gradients exist. `stalled` is the share of the twin's weights
    that an update of the learning rate's size leaves where they are. `loss` is None if the twin was
    not run, and `twin_note` says what it does not show.
    """

    config: Config
    is_autocast: bool
    changed_task: tuple[str, ...]
    needed_gib: float
    kept_gib: float
    largest: tuple[str, str, float]  # category at the peak, phase, GiB
    step_ms: float
    limit_ms: float
    budget_gib: float = BUDGET_GIB
    stalled: float = 0.0
    loss: float | None = None
    target_loss: float | None = None
    twin_note: str = ""

    @property
    def fits(self) -> bool:
        """Whether the budget is enough, context and margin included, as predicted."""
        return self.needed_gib <= self.budget_gib


def write_start(name: str = "capstone") -> Path:
    """Write the file from which a reader starts into runs/, unless it is there; return its path."""
    path = runs_dir() / f"{name}.yaml"
    if not path.exists():
        write_atomically(path, start_text(name).encode())
    return path


def start_text(name: str) -> str:
    """Return the YAML of the start: the fp32 config with the task's values, for no CPU."""
    text = find_config(START).read_text(encoding="utf-8").partition("when_cpu:")[0]
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).rstrip() + "\n"
    text = re.sub(r" *# \[\*\]$", "", text, flags=re.M).replace("# [*] ", "# ")
    for key, value in {"name": name, "note": '"capstone"', **TASK, **AT_START}.items():
        line = f"{key}: {value}".ljust(24)
        text, n_found = re.subn(rf"(?m)^{key}: (\"[^\"]*\"|\S+) *", f"{line} ", text)
        if n_found != 1:
            raise ValueError(f"configs/{START}.yaml has {n_found} lines of {key}")
    head = f"# {name}.yaml: the capstone. Lines that must stay as they are:\n# {', '.join(TASK)}.\n"
    return head + re.sub(r" +$", "", text, flags=re.M)


def try_config(path: str | Path, device: torch.device) -> Trial | None:
    """Predict a reader's config for CARD; if it fits and is fast, run its twin.

    Returned is None for the start itself.

    Raises ConfigError with a line for each mistake in the file, and PrecisionUnsupported.
    """
    config = load_config(path)
    if _values(config) == _values(_start_config()):
        return None
    config = resolve(config, here.card_of(CARD)).config
    changed = [key for key, value in TASK.items() if getattr(config, key) != value]
    ledger, step_ms = predict_memory(config, CARD), predict_time(config, CARD).step_ms
    category, n_bytes = max(ledger.categories.items(), key=lambda item: item[1])
    trial = Trial(
        config=config,
        is_autocast=PRECISIONS[config.precision].autocast,
        changed_task=tuple(changed),
        needed_gib=needed_gib(ledger, CARD),
        kept_gib=gib(kept_bytes(config)) + CONTEXT_GIB,
        largest=(category, ledger.peak_phase, gib(n_bytes)),
        step_ms=step_ms,
        limit_ms=SLOWER * predict_time(_start_config(), CARD).step_ms,
    )
    if changed or not trial.fits or trial.step_ms > trial.limit_ms:
        return trial
    note, found = run_twin(config, device)
    _, plain = run_twin(_start_config(), device)
    losses = [one.held_out[-1][1] if one.held_out else None for one in (found, plain)]
    return Trial(
        **{
            **vars(trial),
            "loss": losses[0],
            "target_loss": None if losses[1] is None else losses[1] + LOSS_GAP,
            "stalled": stalled_share(config),
            "twin_note": note or ("" if found.outcome == "completed" else found.reason),
        }
    )


def kept_bytes(config: Config) -> int:
    """Return the bytes of weights, gradients and moments of a config's model.

    Gradients are left out where the optimizer takes each one at once.
    """
    with torch.device("meta"):
        n = sum(p.numel() for p in build_model(config.model).parameters())
    weight = torch.finfo(getattr(torch, PRECISIONS[config.precision].weights)).bits // 8
    gradient = 0 if config.optimizer_in_backward else weight
    row = OPTIMIZERS[config.optimizer]
    state = row.state_bytes
    if row.moment_bits == 32:  # torch's own optimizers: moments have the weights' dtype
        state *= weight / 4
    return round(n * (weight + gradient + state))


def run_twin(config: Config, device: torch.device) -> tuple[str, RunRecord]:
    """Return (what the twin does not show, its record): the config's techniques, a small model."""
    twin, note = twin_of(config, device)
    return note, run_experiment(twin, device=device, progress=False)


def run_on_card(trial: Trial, device: torch.device) -> RunRecord | None:
    """Run CARD_STEPS steps of the large model itself under the budget, on a CUDA GPU here.

    None where there is no GPU, or one that is too small for the budget or emulates the precision.
    A record that says out of memory means that the prediction was wrong.
    """
    if device.type != "cuda":
        return None
    here_card, answer = here.card_of(device), here.support(trial.config.precision, device)
    if not answer.ok or answer.slow or here_card.memory_gib < trial.budget_gib:
        return None
    changes = {"steps": CARD_STEPS, "lr_warmup_steps": 1, "name": f"card_{trial.config.name}"}
    changes["memory_limit_gib"] = trial.budget_gib - CONTEXT_GIB
    config = config_of(_values(trial.config) | changes, "the card's run")
    return run_experiment(config, device=device, progress=False)


def twin_of(config: Config, device: torch.device) -> tuple[Config, str]:
    """Return (the twin's config, what it does not show on this device)."""
    parts = config.tokens_per_step // (config.seq_len * config.micro_batch_size)
    changes = TWIN | {"micro_batch_size": max(1, TWIN_SEQUENCES // parts)}
    if config.loss_chunk_tokens:
        changes["loss_chunk_tokens"] = TWIN_CHUNK
    note, answer = "", here.support(config.precision, device)
    if not answer.ok or answer.slow:
        changes["precision"] = plain = load_config(START).precision
        note = f"the twin ran in {plain}: {answer.reason}"
    name = f"twin_{config.name}"
    return config_of(_values(config) | changes | {"name": name}, "the twin"), note


def stalled_share(config: Config) -> float:
    """Return the share of weights that an update as large as the learning rate does not move.

    0 for float32 weights, where updates are rounded stochastically, and for SGD, whose updates
    have no such size. An update of Adam is about as large as the rate, or smaller.
    """
    dtype, row = getattr(torch, PRECISIONS[config.precision].weights), OPTIMIZERS[config.optimizer]
    if dtype == torch.float32 or row.moment_bits < 32 or not row.is_adamw:
        return 0.0
    torch.manual_seed(config.seed)
    model = build_model(TWIN["model"])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).to(dtype)
    moved = (weights.float() - config.learning_rate).to(dtype)
    return (moved == weights).float().mean().item()


def _values(config: Config) -> dict[str, Any]:
    """Return what a config says, but for its name and what stands under `when_cpu`."""
    named = {"name": "x", "note": "x"}
    return config.model_dump(exclude={"when_cpu", "overrides"}) | named


def _start_config() -> Config:
    return config_of(_values(load_config(START)) | TASK | AT_START | {"name": "start"}, START)
