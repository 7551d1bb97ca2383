"""What several test modules share."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch
from torch import nn

import labutils as lab
from labutils import machine
from labutils.config.choices import CHECKPOINTING
from labutils.config.schema import resolve
from labutils.prediction.memory import Prediction, predicted

REPO = Path(__file__).resolve().parent.parent
slow = pytest.mark.slow
slowest = pytest.mark.slowest
CPU = torch.device("cpu")
POLICIES = [row.name for row in CHECKPOINTING.values() if row.is_on]
# The smallest run: three steps of two sequences.
TINY = {"steps": 3, "lr_warmup_steps": 0}
TINY |= {"seq_len": 16, "micro_batch_size": 2, "tokens_per_step": 32}


class SharedKeys(nn.Module):
    """Attention in which groups of four queries share keys and values, as in newer models."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(512, 512), nn.Linear(512, 512)
        self.keys, self.values = nn.Linear(512, 128), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, 512)
        q, k, v = (
            layer(x).unflatten(-1, (-1, 64)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))


def mean_of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def cross_entropy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss as most loops have it, of whatever dtype the logits are."""
    logits = model(x).flatten(0, 1)
    targets = torch.zeros(len(logits), dtype=torch.int64, device=x.device)
    return nn.functional.cross_entropy(logits, targets)


def modules_with_rules() -> dict[str, tuple[nn.Module, Callable]]:
    """Return modules, of `(4, 512, 512)`, and losses for which CUDA has kernels that a CPU lacks."""
    normed = nn.Sequential(nn.Linear(512, 512), nn.RMSNorm(512), nn.Linear(512, 4096))
    return {
        "shared keys": (nn.Sequential(SharedKeys(), SharedKeys()), mean_of_squares),
        "cross entropy": (normed, cross_entropy),
    }


def read_notebook(path: str) -> nbformat.NotebookNode:
    """Return a notebook as it stands on disk, committed or not."""
    return nbformat.read(REPO / path, as_version=4)


def code_of(path: str) -> dict[str, str]:
    """Return {id: source} of a notebook's code cells."""
    cells = read_notebook(path).cells
    return {cell.id: cell.source for cell in cells if cell.cell_type == "code"}


def without_onednn() -> AbstractContextManager:
    """Measure memory inside: the same bytes on every CPU.

    With AVX-512 or AMX oneDNN copies the weight of a 16-bit product into a layout of its own. That
    is a library's workspace, which predictions leave out; beside a small model it is one or two per
    cent of the peak.
    """
    return torch.backends.mkldnn.flags(enabled=False, allow_tf32=None, fp32_precision=None)


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code that has `lab` and `torch` in a process of its own."""
    command = [sys.executable, "-W", "default", "-c", f"import labutils as lab, torch\n{code}"]
    options = {"capture_output": True, "text": True, "cwd": REPO, "timeout": 600}
    return subprocess.run(command, env=os.environ | environment, **options)


def gradient_of(device: torch.device, precision: str, **options: object) -> torch.Tensor:
    """Return the gradient of the small GPT-2, with the same weights, text and dropout each time."""
    ids = lab.sequences(64)[:2].to(device)
    model = lab.build_model(**options).to(device)
    torch.manual_seed(1)
    with lab.autocast(precision, device):
        loss = lab.lm_loss_sum(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    return lab.flat_gradient(model)


def fill_hub_cache(folder: Path, name: str = "gpt2-nano") -> nn.Module:
    """Make a model hub's cache, as it lies on disk under HF_HOME; "gpt2" in it has the size `name`.

    Return its model.
    """
    repository = folder / "hub" / "models--openai-community--gpt2"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    model = lab.build_model(name, seed=5)
    model.save_pretrained(repository / "snapshots" / "abc")
    lab.load_corpus().tokenizer.save(str(repository / "snapshots" / "abc" / "tokenizer.json"))
    return model


def write_small_text(folder: Path) -> Path:
    """Write a text on which a tokenizer is trained at once; return its path."""
    path = folder / "small.txt"
    path.write_text(" ".join(f"the {i * i}th word" for i in range(400)), encoding="utf-8")
    return path


def two_layers(seed: int = 0) -> nn.Module:
    """A network that is not GPT: 4 → 8 → 1, float32."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def regression_batches(n: int, size: int = 6, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """`n` batches of `x` (size, 4) and `y` (size, 1)."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return [{"x": draw(size, 4), "y": draw(size, 1)} for _ in range(n)]


def squared_error_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]).float() - batch["y"]).square().sum()


def predicted_on(device: str, config: lab.Config) -> Prediction:
    """What a config's run asks of a card."""
    card = machine.card_of(device)
    return predicted(resolve(config, card).config, card)


def count_rows(batch: dict[str, torch.Tensor]) -> int:
    return len(batch["y"])


def said_by_cell(capsys: pytest.CaptureFixture, path: str, cell: str, **names: object) -> str:
    """Run a cell of a notebook with these names, instead of its own lines `name = None`; return
    what it prints.
    """
    source = code_of(path)[cell]
    for name in names:
        source = re.sub(rf"(?m)^{name} = None.*$", "", source)
    exec(source, names)
    return capsys.readouterr().out


def interrupted(words: str, *arguments: str) -> tuple[str, str, int]:
    """Run a command until it has said these words; return what Ctrl-C then makes it say, and end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "labutils", *arguments],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background shell may have ignored it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    printed = ""
    while words not in printed:
        printed += (character := process.stdout.read(1))
        assert character, process.stderr.read()
    process.send_signal(signal.SIGINT)
    return *process.communicate(timeout=600), process.returncode
