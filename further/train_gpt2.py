"""Train GPT-2 in one file: plain torch, the model on the page, no labutils. Copy it anywhere.

    python train_gpt2.py                                        # what Config says below
    python train_gpt2.py --set corpus=mine.txt steps=500        # a text of your own, of any size
    python train_gpt2.py fp16_config.yaml --set name=half       # a file of the course's configs/
    python train_gpt2.py --resume                               # after a crash, or Ctrl-C
    python train_gpt2.py --sample "The class statement"         # with the model that was left
    torchrun --nproc_per_node 2 train_gpt2.py --set micro_batch_size=2 name=two

Automatic mixed precision, a GradScaler, gradient accumulation, gradient checkpointing and clipping.
One process on a CPU has the losses of `labutils run`, bit for bit; in chunks they agree to
rounding. torchrun shares every step among processes: as many tokens, and without dropout the same
gradient up to rounding. A run keeps in runs/NAME, at its end and at Ctrl-C, its state, its tokens,
a log.jsonl with a line a step, and a model for `GPT2LMHeadModel.from_pretrained`. From the state
the same command with `--resume` continues to the same weights, bit for bit; or with more steps,
other micro-batches, another number of processes.
"""

import argparse
import gc
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
import zipfile
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Literal, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

try:
    import resource
except ImportError:  # Windows
    resource = None

as_written = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
parser.add_argument("config", type=Path, nargs="?", help="a YAML file, as in the course's configs/")
parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
parser.add_argument("--save-every", type=int, default=0, metavar="N", help="steps between states")
parser.add_argument("--resume", action="store_true", help="continue from the last state")
parser.add_argument("--out", type=Path, help="folder of what a run keeps (runs/NAME)")
parser.add_argument("--sample", metavar="TEXT", help="continue a text with that folder's model")
parser.add_argument("--by-block", action="store_true", help="compile one block, for all")
parser.add_argument("--peak-tflops", type=float, help="a card's peak, to print the share reached")
options = parser.parse_args()
with suppress(AttributeError):  # a notebook's output has no encoding
    sys.stdout.reconfigure(errors="replace")

# ---- One process, or one of several that torchrun has started
world = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0)) if world > 1 else 0
kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)


def say(text):
    """Print a line at once, in the first process only."""
    try:
        if rank == 0:
            print(text, flush=True)
    except OSError:  # nobody listens: a closed pipe or terminal costs no training
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def end(code):
    """End the process; the first one ends last, and torchrun and the other processes with it."""
    if rank > 0:
        time.sleep(1)  # torchrun stops the others as soon as one has ended
        sys.exit(code)
    launcher = Path(f"/proc/{os.getppid()}")  # on Linux
    words = (launcher / "cmdline").read_bytes() if world > 1 and launcher.exists() else b""
    if code and re.search(b"torchrun|torch.distributed", words):
        others = (launcher / "task" / launcher.name / "children").read_text().split()
        for number in map(int, [launcher.name, *others]):
            if number != os.getpid():  # they would print 20 lines beneath our last one
                os.kill(number, signal.SIGKILL)
    sys.exit(code)


def refuse(reason):
    """End the process with a reason in place of a traceback; the first process tells it."""
    if rank == 0:
        print(f"{parser.prog}: {reason}", file=sys.stderr, flush=True)
    end(2)


# ---- The config: its keys are those of the course's configs/, where a comment explains each
Count, CountOrOff = Annotated[int, 1, 10**9], Annotated[int, 0, 10**9]
TINY, BELOW_1 = sys.float_info.min, 1 - 2**-53
SHAPES = {  # blocks, heads, width, vocabulary
    "gpt2-nano": (4, 4, 128, 2048),
    "gpt2": (12, 12, 768, 50257),
    "gpt2-medium": (24, 16, 1024, 50257),
    "gpt2-large": (36, 20, 1280, 50257),
    "gpt2-xl": (48, 25, 1600, 50257),
}


@dataclass
class Config:
    """A run, where a file and --set say nothing else; two numbers are the bounds of a value."""

    name: str = "gpt2"
    note: str = ""
    seed: Annotated[int, 0, 2**31 - 1] = 0
    model: Literal["gpt2-nano", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    weights: Literal["random", "pretrained"] = "random"
    corpus: str = "stdlib"
    seq_len: Annotated[int, 2, 32768] = 512
    micro_batch_size: Count = 4
    tokens_per_step: Count = 4096
    steps: Count = 60
    learning_rate: Annotated[float, TINY, 10] = 6e-4
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    lr_warmup_steps: CountOrOff = 5
    weight_decay: Annotated[float, 0, 1] = 0.1
    max_grad_norm: Annotated[float, 0, 1e6] = 1.0
    eval_every: CountOrOff = 0
    precision: Literal["fp32", "tf32", "fp16", "bf16", "16bit"] = "16bit"
    init_scale: Annotated[float, TINY, 2.0**60] = 65536.0
    growth_interval: Count = 2000
    optimizer: Literal["adamw"] = "adamw"
    optimizer_impl: Literal["fused"] = "fused"
    optimizer_in_backward: Literal[False] = False
    dropout: Annotated[float, 0, BELOW_1] = 0.1
    activation: Literal["gelu_new", "gelu_tanh"] = "gelu_new"
    use_cache: Literal[False] = False
    attention: Literal["auto"] = "auto"
    pad_vocab: Literal[False, True] = False
    loss_chunk_tokens: CountOrOff = 0
    compile: Literal["off", "default"] = "off"
    gradient_checkpointing: Literal["none", "block"] = "none"
    memory_limit_gib: Annotated[float, 0, 0] = 0.0
    expandable_segments: Literal[False] = False


WHEN_CPU = {"model": "gpt2-nano", "seq_len": 128, "tokens_per_step": 512, "precision": "fp32"}
WHEN_CPU |= {"learning_rate": 2e-3}
KEYS = get_type_hints(Config, include_extras=True)
SWITCH = dict.fromkeys(["true", "on", "yes", "y", "t", "1"], True)
SWITCH |= dict.fromkeys(["false", "off", "no", "n", "f", "0"], False)
mistakes = []


def did_you_mean(word, choices):
    """Return a question that names the choice most like a word, or nothing."""
    return "".join(f"; did you mean {near}?" for near in get_close_matches(word, choices, n=1))


def value_of(key, text):
    """Return what a text says of a key. Raises ValueError with what was expected."""
    first, *others = allowed = get_args(KEYS[key]) or [str]
    if first in (int, float):
        low, high = others
        with suppress(ValueError):  # no number
            number = float(text)
            if low <= number <= high and number == first(number):
                return first(number)
        a_number = "a whole number" if first is int else "a number"
        raise ValueError(f"expected {a_number} from {low:.10g} to {high:.10g}, got {text!r}")
    if first is str:
        return text
    value = SWITCH.get(text.lower(), text) if isinstance(first, bool) else text
    if value in allowed:
        return value
    choices = [str(choice) for choice in allowed]
    near = did_you_mean(text.lower(), choices)
    raise ValueError(f"expected {' or '.join(choices)}, got {text!r}{near}")


def values_of(part, where):
    """Return {key: value} of {key: text}, and note what is wrong."""
    values = {}
    for key, text in part.items():
        if key not in KEYS:
            mistakes.append(f"{where}: there is no {key}{did_you_mean(key, KEYS)}")
        elif not isinstance(text, str):
            mistakes.append(f"{where}: {key}: expected one value, got {text!r}")
        else:
            try:
                values[key] = value_of(key, text)
            except ValueError as error:
                mistakes.append(f"{where}: {key}: {error}")
    return values


class Loader(yaml.BaseLoader):  # every value is a text: for YAML itself 6e-4 is no number
    """A reader of YAML that does not let a later line replace an earlier one."""

    def construct_mapping(self, node, deep=False):
        names = [name.value for name, _ in node.value]
        twice = sorted({name for name in names if names.count(name) > 1})
        mistakes.extend(f"{options.config}: {name} is given twice" for name in twice)
        return super().construct_mapping(node, deep)


if wrong := [pair for pair in options.set if "=" not in pair]:
    refuse(f"--set {wrong[0]}: expected KEY=VALUE, as in --set steps=20")
overrides = values_of(dict(pair.split("=", 1) for pair in options.set), "--set")
in_file, for_cpu = {}, WHEN_CPU
if options.config:
    try:
        in_file = yaml.load(options.config.read_text(encoding="utf-8-sig"), Loader) or {}
    except OSError as error:
        refuse(f"{options.config}: {error.strerror}")
    except (yaml.YAMLError, ValueError) as error:
        refuse(f"{options.config}: expected lines of `key: value`: {error}")
    for_cpu = in_file.pop("when_cpu", "") or {} if isinstance(in_file, dict) else ""
    if not isinstance(for_cpu, dict):
        refuse(f"{options.config}: expected lines of `key: value`, under when_cpu too")
    in_file, for_cpu = values_of(in_file, options.config), values_of(for_cpu, "when_cpu")
if mistakes:
    refuse("\n".join(mistakes))
changes = (for_cpu if kind == "cpu" else {}) | overrides
config = Config(**in_file | changes)
if not re.fullmatch(r"\w[\w.+=-]{0,59}", config.name):
    refuse(f"name: expected letters, digits and . + - _ =, at most 60, got {config.name!r}")
folder = options.out or Path("runs") / config.name
if options.sample is not None:
    try:
        facts = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        config = Config(**facts["train_gpt2"] | {"precision": "fp32"})
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(f"--sample: {folder} has no model of this script's ({error!r})")

steps, warmup, seq_len = config.steps, config.lr_warmup_steps, config.seq_len
if warmup > steps:
    refuse(f"lr_warmup_steps: {warmup} are more than the {steps} steps; 0 is no warm-up")
micro_batch_size, tokens_per_step = config.micro_batch_size, config.tokens_per_step
grad_accum_steps, left_over = divmod(tokens_per_step, seq_len * micro_batch_size * world)
if left_over:
    product = f"{seq_len} (seq_len) × {micro_batch_size} (micro_batch_size) × {world} (processes)"
    sizes = [n for n in range(1, micro_batch_size) if tokens_per_step % (seq_len * n * world) == 0]
    way_out = f"; try --set micro_batch_size={sizes[-1]}" if sizes else ""
    refuse(f"tokens_per_step {tokens_per_step} is no multiple of {product}{way_out}")
targets_per_step = tokens_per_step // seq_len * (seq_len - 1)  # none is a first token

precision = config.precision
is_old = kind == "cuda" and torch.cuda.get_device_capability() < (8, 0)  # no TF32; BF16 is slow
if precision == "16bit":
    precision = "fp16" if is_old else "bf16"
if precision == "tf32" and (is_old or kind == "cpu"):
    refuse("precision: tf32 needs an NVIDIA GPU of 2020 (Ampere) or later; use fp16")
uses_amp = precision in ("fp16", "bf16")
amp_dtype = torch.float16 if precision == "fp16" else torch.bfloat16
if precision == "tf32":  # matrix products round their float32 inputs to 10 bits of mantissa
    torch.backends.cuda.matmul.fp32_precision = "tf32"

# ---- The model, with the names that Hugging Face gives its parts
n_layer, n_head, width, vocab_size = SHAPES[config.model]
n_positions = max(seq_len, 1024)
n_trained = 1024 if config.weights == "pretrained" else seq_len  # of the positions
if config.weights == "pretrained" and (vocab_size != 50257 or config.pad_vocab or seq_len > 1024):
    refuse("weights: pretrained are GPT-2's: no gpt2-nano, pad_vocab false, seq_len at most 1024")
n_rows = math.ceil(vocab_size / 64) * 64 if config.pad_vocab else vocab_size  # of the logits


class Linear(nn.Module):
    """x (…, n_in) → (…, n_out); unlike nn.Linear's its weight is (n_in, n_out), as OpenAI's."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Each position reads itself and those before it; no mask (T, T) is built."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Linear(width, 3 * width), Linear(width, width)

    def forward(self, x):  # (B, T, width)
        heads = (*x.shape[:2], n_head, width // n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        p = config.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return F.dropout(self.c_proj(mixed.transpose(1, 2).reshape(x.shape)), p)


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x):
        x = self.c_fc(x)
        if config.activation == "gelu_tanh":
            x = F.gelu(x, approximate="tanh")
        else:  # gelu_new, the same in many small kernels, each of which keeps what it reads
            x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3.0))))
        return F.dropout(self.c_proj(x), config.dropout, self.training)


class Block(nn.Module):
    """Attention and MLP, each of a normalized input, and added to it."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def initialize(module):
    """Draw weights as GPT-2's: those that write to the sum of all blocks are smaller."""
    if isinstance(module, (Linear, nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, (Attention, MLP)):
        nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * n_layer))


class GPT2(nn.Module):
    """Ids (B, T) → the sum of the cross-entropy of B · (T - 1) next tokens."""

    def __init__(self):
        super().__init__()
        parts = {"wte": nn.Embedding(n_rows, width), "wpe": nn.Embedding(n_positions, width)}
        parts["h"] = nn.ModuleList(Block() for _ in range(n_layer))
        self.transformer = nn.ModuleDict(parts | {"ln_f": nn.LayerNorm(width)})
        self.transformer.apply(initialize)
        self.lm_head = nn.Linear(width, n_rows, bias=False)
        initialize(self.lm_head)  # labutils' model draws these numbers as well, for nothing
        self.lm_head.weight = self.transformer.wte.weight  # tied

    def hidden(self, ids):
        """Return what the last norm makes of ids: (B, T, width)."""
        part = self.transformer
        x = part.wte(ids) + part.wpe(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, config.dropout, self.training)
        for block in part.h:
            if config.gradient_checkpointing == "block":  # keep its input, compute the rest again
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return part.ln_f(x)

    def loss_of(self, hidden, targets):
        """Return the sum for rows of hidden states (rows, width)."""
        logits = self.lm_head(hidden).float()  # (rows, vocabulary)
        return F.cross_entropy(logits, targets, reduction="sum")

    def forward(self, ids):
        targets = F.pad(ids, (0, 1), value=-100)[:, 1:].flatten()  # (B·T,); -100: has no target
        hidden = self.hidden(ids).flatten(0, 1)
        rows = config.loss_chunk_tokens or len(hidden)
        if rows >= len(hidden):
            return self.loss_of(hidden, targets)
        loss = 0  # few rows of logits exist at once; backward computes them again
        for chunk in zip(hidden.split(rows), targets.split(rows), strict=True):
            loss = loss + checkpoint(self.loss_of, *chunk, use_reentrant=False)
        return loss


def read_weights(file):
    """Return a file's weights by our names: GPT-2's own have no prefix, all have tied ones once."""
    read = load_file(file)
    read = {f"transformer.{name.removeprefix('transformer.')}": read[name] for name in read}
    read["lm_head.weight"] = read["transformer.wte.weight"]
    return {name: read[name] for name in model.state_dict()}  # not GPT-2's masks


@torch.compiler.set_stance("force_eager")  # other shapes: each would be compiled
@torch.no_grad()
def written(text, n):
    """Return n tokens that follow a text, each drawn by the probabilities the model gives it."""
    model.eval()
    ids = torch.tensor([tokenizer.encode(text or END).ids], device=device)  # (1, T)
    n_before = ids.shape[1]
    for _ in range(n):
        logits = model.lm_head(model.hidden(ids[:, -seq_len:])[:, -1])
        words = logits[:, : tokenizer.get_vocab_size()]  # the others are padding
        ids = torch.cat([ids, torch.multinomial(words.softmax(-1), 1)], dim=1)
    return tokenizer.decode(ids[0, n_before:].tolist())


END = "<|endoftext|>"
if options.sample is not None:
    n_positions, prompt = n_trained, options.sample.encode(errors="replace").decode()
    model = GPT2().to(device)
    try:
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        model.load_state_dict(read_weights(folder / "model" / "model.safetensors"))
    except Exception as error:  # tokenizers' and safetensors' own kinds
        refuse(f"--sample: {folder / 'model'} is damaged ({error})")
    say(prompt + written(prompt, 100))
    raise SystemExit


# ---- A step of training
def rate_of(step):
    """Return the learning rate of a step: a warm-up, then constant or half a cosine."""
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.lr_schedule == "constant":
        return config.learning_rate
    progress = (step - warmup) / (steps - warmup)  # down to a tenth
    return config.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def train_step(step):
    """Update the weights once, with the gradient of the mean loss over all targets of a step."""
    for group in optimizer.param_groups:
        group["lr"] = rate_of(step)
    scales[step] = scaler.scale(one)
    for i in range(grad_accum_steps):
        waits = world > 1 and i + 1 < grad_accum_steps  # gradients are exchanged once a step
        with training_loss.no_sync() if waits else nullcontext():
            with torch.autocast(kind, dtype=amp_dtype, enabled=uses_amp):
                ids = ids_of(next(stream)).to(device)
                loss = training_loss(ids) / targets_per_step  # of the whole step: sums add up
            scaler.scale(loss).backward()  # adds to the gradients of earlier micro-batches
        losses[step] += loss.detach()
    scaler.unscale_(optimizer)  # what is clipped must be the true gradients
    if config.max_grad_norm:
        norms[step] = clip_grad_norm_([*matrices, *vectors], config.max_grad_norm)
    scaler.step(optimizer)  # skipped if a gradient is inf or NaN
    scaler.update()  # then the scale falls; after many good steps it rises
    skips[step] = scaler.scale(one) < scales[step]
    optimizer.zero_grad(set_to_none=True)
    if world > 1:
        dist.all_reduce(losses[step])


# ---- The folder, and the state that is in it; then the processes meet
def one_line(error):
    """Return the first line of what an error says: torch's may have a hundred."""
    return str(error).strip().partition("\n")[0]


def is_kept(place, write):
    """Write a file or a folder beside the last one, then rename it: whenever a run dies, one is
    whole. Tell whether it could be written: on a full disk, say, the run goes on without.
    """
    beside = place.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(beside)
        shutil.rmtree(place, ignore_errors=True)  # if it is a folder
        beside.replace(place)
    except Exception as error:  # safetensors and torch have kinds of their own
        free = shutil.disk_usage(folder if folder.exists() else ".").free / 2**20
        say(f"{place} NOT SAVED, with {free:,.1f} MiB of disk free: {one_line(error)}")
        shutil.rmtree(beside) if beside.is_dir() else beside.unlink(missing_ok=True)
        return False
    return True


save_every = options.save_every
if save_every < 0:
    refuse("--save-every: expected 0 (at the end only) or more steps")
if options.by_block and config.compile == "off":
    refuse("--by-block says how to compile; it needs --set compile=default")
state_file, tokens_file = folder / "state.pt", folder / "tokens.bin"
tokenizer_file, log_file = folder / "tokenizer.json", folder / "log.jsonl"
if rank == 0:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir() if path.suffix != ".part"}
    except OSError as error:
        refuse(f"--out {folder}: {error.strerror}")
    names -= {tokens_file.name, tokenizer_file.name}  # of a run that ended before its first state
    if names and not options.resume:
        refuse(f"{folder} has a run already; --resume continues it, --out names another folder")
    if names - {log_file.name} and not state_file.exists():
        refuse(f"{folder} has no state to resume from, but other files; --out names another folder")
state = None
if options.resume and state_file.exists():
    try:  # weights_only: no code in a file runs
        if damaged := zipfile.ZipFile(state_file).testzip():
            raise ValueError(f"{damaged} is damaged")
        state = torch.load(state_file, map_location="cpu", weights_only=True)
        before, _, _ = state["identity"], state["series"], state["random"]
    except Exception as error:  # of many kinds, if the file is damaged
        refuse(f"{state_file} cannot be read; delete it to begin anew ({one_line(error)})")
if kind == "cuda":
    n_cards, n_here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if n_here > n_cards:
        refuse(f"{n_here} processes need a card each; torch sees {n_cards}")
    torch.cuda.set_device(device)
if world > 1:
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")


def one_says(it):
    """Tell whether it is true in any process. The processes wait for one another, the cards not."""
    if world == 1:
        return it
    flag = torch.tensor(float(it))
    dist.all_reduce(flag)
    return flag.item() > 0


# ---- The text, as numbers in a file: a file of your own, or what ships with Python
hub, cached = f"openai-community/{config.model}", {}
for name in ("tokenizer.json", "model.safetensors") if vocab_size == 50257 else ():
    if isinstance(path := try_to_load_from_cache(hub, name), str):  # else it is not there
        cached[name] = path
pretrained = config.weights == "pretrained"
if pretrained and len(cached) < 2:
    refuse(f"weights: {hub} is not in the cache that HF_HOME names; use random")


def documents():
    """Yield Python's language reference and the source of its library, or a file of your own in
    pieces that end with a line.
    """
    if config.corpus != "stdlib":
        is_of_file = options.config and "corpus" not in overrides
        path = (options.config.parent if is_of_file else Path()) / config.corpus
        if path.exists() and not path.is_file():
            refuse(f"corpus: {path} is no file that can be read twice")
        try:
            with path.open(encoding="utf-8-sig") as file:
                while piece := file.read(2**20) + file.readline(2**20):
                    if "\0" in piece:
                        refuse(f"corpus: {path} is not text (it has NUL characters)")
                    yield piece
                if file.tell() == 0:
                    refuse(f"corpus: {path} is empty")
            yield END
        except UnicodeDecodeError as error:
            is_utf_16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
            kind_of = "UTF-16" if is_utf_16 else f"not UTF-8 (byte {error.object[error.start]:#x})"
            refuse(f"corpus: {path} is {kind_of}; save it as UTF-8 text")
        except OSError as error:
            refuse(f"corpus: {error}; name one UTF-8 text file")
        return
    yield "\n\n".join(topics[name] for name in sorted(topics)) + END
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(library.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(library).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 1000:
                yield text + END


# a tokenizer learns from a word in a time that grows with its length squared: long ones are cut
LONG_WORD = r"([^\W\d_]{1000}|\d{1000}|(?:[^\w\s]|_){1000}|\s{1000})"


def tokenizer_of_the_text():
    """Return GPT-2's own tokenizer, or byte pairs of the text's first piece."""
    if pretrained or (config.corpus != "stdlib" and "tokenizer.json" in cached):
        return Tokenizer.from_file(cached["tokenizer.json"])
    say("training a tokenizer on the text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],  # it gets the first number, 0
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    first = next(documents()).removesuffix(END)
    tokenizer.train_from_iterator(re.split(LONG_WORD, first), trainer)
    return tokenizer


def write_tokenizer(beside):
    """Write a file for `Tokenizer.from_file`."""
    beside.write_text(tokenizer.to_str(), encoding="utf-8")


def write_tokens(beside):
    """Write the text's tokens as far as the run needs them, and meet the other processes."""
    n_tokens, told = 0, time.monotonic()
    with beside.open("wb") as file:
        for text in documents():
            ids = tokenizer.encode_batch_fast([text])[0].ids  # fast: without their places in text
            file.write(np.array(ids, dtype=np.uint16))
            n_tokens += len(ids)
            if n_tokens >= tokens_needed:
                break
            if time.monotonic() > told + 10:
                told = time.monotonic()
                say(f"encoding the text: {n_tokens:,} tokens of at most {tokens_needed:,}")
            one_says(False)


# every tenth sequence is held out, so a run needs a ninth more than it trains on
tokens_needed = steps * tokens_per_step * 10 // 9 + 10 * seq_len
if state:  # a longer run reads the same text again
    tokens_needed = state["tokens_needed"]
is_encoded = tokens_file.exists() and tokenizer_file.exists()
try:
    if rank == 0 and not (state and is_encoded):
        tokenizer = tokenizer_of_the_text()
        if not (is_kept(tokenizer_file, write_tokenizer) and is_kept(tokens_file, write_tokens)):
            end(2)
    while not one_says(rank == 0):  # the others hear from the first with each piece
        pass
except (KeyboardInterrupt, RuntimeError):  # the second in the others
    refuse("stopped while the text was encoded; nothing was trained")
try:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
except Exception as error:  # of tokenizers' own
    refuse(f"{tokenizer_file} cannot be read; delete it to encode the text again ({error})")
n_tokens = tokens_file.stat().st_size // 2
n_sequences = n_tokens // seq_len
if n_sequences < max(10, micro_batch_size * 10 / 9 + 1):
    refuse(f"the text has {n_tokens} tokens: too few for {micro_batch_size} sequences of {seq_len}")
sequences = np.memmap(tokens_file, np.uint16, "r", shape=(n_sequences, seq_len))
n_training = n_sequences - n_sequences // 10


def ids_of(rows):
    """Return the sequences with these numbers: (n, T)."""
    return torch.from_numpy(sequences[rows.numpy()].astype(np.int64))


order = torch.randperm(n_sequences // 10, generator=torch.Generator().manual_seed(0))
held_out = ids_of(order[:16] * 10 + 9)


def micro_batches():
    """Yield numbers of sequences (B,) for ever: each epoch in a new order, without the tail."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        order = torch.randperm(n_training, generator=generator)
        for start in range(0, n_training - micro_batch_size + 1, micro_batch_size):
            rows = order[start : start + micro_batch_size]
            yield rows + rows // 9  # past every tenth


# ---- The weights, the optimizer, and the scaler
torch.manual_seed(config.seed)
model = GPT2()
if pretrained:
    model.load_state_dict(read_weights(cached["model.safetensors"]))
model = model.to(device)
training_loss = model
# gpt2-nano on two cores of an EPYC: 23 s to compile the whole, 15 for a block; steps of 35 ms then,
# or of 35 to 46, and of 44 without
if config.compile != "off" and options.by_block:
    for block in model.transformer.h:
        block.compile(dynamic=False)
elif config.compile != "off":
    training_loss = torch.compile(model, dynamic=False)


def add_up(_, bucket):
    """Give every process the sum of the gradients in a bucket: DDP's own hook gives their mean."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


if world > 1:
    training_loss = DistributedDataParallel(training_loss, gradient_as_bucket_view=True)
    training_loss.register_comm_hook(None, add_up)
if rank > 0:  # the weights are equal; dropout must not be
    torch.manual_seed(config.seed + rank)

matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and layer norms: no decay
decay = config.weight_decay
groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
# FP16 has no numbers for the smallest gradients, so the loss is enlarged. Disabled, it does nothing
scaling = {"init_scale": config.init_scale, "growth_interval": config.growth_interval}
scaler = torch.amp.GradScaler(kind, **scaling, enabled=precision == "fp16")

# ---- What is kept: the state, which decides the steps to come, and the model
series = torch.zeros(4, steps, device=device)
losses, norms, scales, skips = series  # views of its rows
parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
identity = asdict(config) | {"device": kind, "processes": world, "by_block": options.by_block}
with tokens_file.open("rb") as file:
    identity["text"] = hashlib.file_digest(file, "sha256").hexdigest()
changes_nothing = {"name", "note", "eval_every"}
# of a run that goes on; what these change is said
may_change = {
    "steps": "the rate's schedule, unless it is constant; the text is read as far as at first",
    "micro_batch_size": "the order of sums, and of sequences after an epoch",
    "processes": "the order of sums, and dropout",
}


def save(done):
    """Write what decides the steps to come; tell whether it could be written."""
    on_cuda = torch.cuda.get_rng_state() if kind == "cuda" else None
    own = (torch.get_rng_state(), on_cuda)
    random = [own] * world
    if world > 1:
        dist.all_gather_object(random, own)
    if rank > 0:
        return True
    so_far = series[:, :done].clone()
    state = {"identity": identity, "done": done, "series": so_far, "random": random}
    state["tokens_needed"] = tokens_needed
    state |= {name: part.state_dict() for name, part in parts.items()}
    return is_kept(state_file, lambda beside: torch.save(state, beside))


def restore():
    """Take up the last state; return how many steps it has done."""
    changed = {key: before.get(key) for key in identity if before.get(key) != identity[key]}
    if "text" in changed:
        refuse(f"{tokens_file} is not what this run has read; delete it, and name that text again")
    for key in changed.keys() - changes_nothing - may_change.keys():
        refuse(f"{folder} has a run whose {key} was {changed[key]}, now it is {identity[key]}")
    done = state["done"]
    if done > steps:
        refuse(f"{folder} has a run of {done} steps already, more than {steps}")
    for key in changed.keys() & may_change.keys():
        now = identity[key]
        say(f"{key} was {changed[key]}, now it is {now}: this changes {may_change[key]}")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    series[:, :done] = state["series"][:, :done]
    if rank < len(state["random"]):  # of more processes than before, the new keep their own
        on_cpu, on_cuda = state["random"][rank]
        torch.set_rng_state(on_cpu)
        if kind == "cuda":
            torch.cuda.set_rng_state(on_cuda)
    return done


def leave_model(place):
    """Write a folder for `GPT2LMHeadModel.from_pretrained`, and for --sample."""
    place.mkdir(exist_ok=True)
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied
    positions = weights["transformer.wpe.weight"][:n_trained].clone()  # the others are as drawn
    save_file(weights | {"transformer.wpe.weight": positions}, place / "model.safetensors")
    gelu = config.activation.replace("gelu_tanh", "gelu_pytorch_tanh")
    facts = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    facts |= {"n_layer": n_layer, "n_head": n_head, "n_embd": width, "activation_function": gelu}
    facts |= {"vocab_size": n_rows, "n_positions": n_trained, "train_gpt2": asdict(config)}
    facts |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], config.dropout)
    special = "bos_token", "eos_token", "pad_token"
    facts |= dict.fromkeys([f"{name}_id" for name in special], tokenizer.token_to_id(END))
    (place / "config.json").write_text(json.dumps(facts, indent=1))
    shutil.copymode(
        place / "config.json", place / "model.safetensors"
    )  # it was for its owner alone
    limits = {"max_length": n_trained} | {
        name: facts[name] for name in facts if "_token_id" in name
    }
    (place / "generation_config.json").write_text(json.dumps(limits, indent=1))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": n_trained}
    facts |= dict.fromkeys(special, END)
    (place / "tokenizer_config.json").write_text(json.dumps(facts, indent=1))
    shutil.copy(tokenizer_file, place)


# ---- What is told
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def held_out_loss():
    """Return the mean loss per target on held-out text, without dropout."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids in held_out.split(micro_batch_size)[rank::world]:
        with torch.autocast(kind, dtype=amp_dtype, enabled=uses_amp):
            total += model(ids.to(device))
    model.train()
    if world > 1:
        dist.all_reduce(total)
    return total.item() / (len(held_out) * (seq_len - 1))


def log(rows):
    """Append lines to log.jsonl; JSON has no inf and no NaN."""
    rows = [{key: x if math.isfinite(x) else None for key, x in row.items()} for row in rows]
    try:
        with log_file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        say(f"{log_file} NOT SAVED: {error.strerror}")


def tell_held_out(n):
    """Print and log the loss on held-out text."""
    loss = held_out_loss()  # by all processes
    say(f"step {n}: held-out loss {loss:.4f}" if n < steps else f"held-out loss {loss:.4f}")
    if rank == 0:
        log([{"step": n, "held_out_loss": loss}])


def report(first, n, ms):
    """Tell what step n gave, and what the steps after `first` cost; log each of them."""
    costs = {"ms": ms, "tokens_per_s": 1000 * tokens_per_step / ms}
    if kind == "cuda":
        costs["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    elif resource:  # it counts KiB, but on a Mac bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        costs["process_mib"] = peak / 2 ** (20 if sys.platform == "darwin" else 10)
    names, rows = ("loss", "grad_norm", "loss_scale", "skipped"), series[:, first:n].T.tolist()
    steps_told = [{"step": i + 1, "learning_rate": rate_of(i)} for i in range(first, n)]
    told = [dict(zip(names, row, strict=True)) for row in rows]
    for row in told if not config.max_grad_norm else ():
        del row["grad_norm"]  # nothing has measured it
    log(here | row | costs for here, row in zip(steps_told, told, strict=True))
    loss, norm, scale, _ = rows[-1]
    line = f"step {n}/{steps}: loss {loss:.4f}, rate {rate_of(n - 1):.1e}"
    if config.max_grad_norm:
        line += f", norm {norm:.2f}"
    if scaler.is_enabled():
        line += f", scale {scale:g} ({skips.sum():g} skipped)"
    line += f", {ms:,.0f} ms, {costs['tokens_per_s']:,.0f} tokens/s"
    if options.peak_tflops:
        tflops = flops_per_token * costs["tokens_per_s"] / world / 1e12
        line += f", {tflops / options.peak_tflops:.1%} of the peak"
    for name in costs.keys() & {"peak_mib", "process_mib"}:
        line += f", {name.removesuffix('_mib')} {costs[name]:,.0f} MiB"
    say(line)


def require_sound(n):
    """Refuse weights, or five losses up to step n, that are no numbers: nothing of them is kept."""
    is_sound = get_total_norm([*matrices, *vectors]).isfinite()
    if not (is_sound and losses[max(0, n - 5) : n].isfinite().any()):
        refuse("weights or losses are inf or NaN; try a lower learning_rate, or a longer warm-up")


one = torch.ones((), device=device)
n_params = sum(p.numel() for p in model.parameters())
flops_per_token = 6 * (n_params - model.transformer.wpe.weight.numel())  # PaLM, appendix B
flops_per_token += 12 * n_layer * width * seq_len
reported = first = n = restore() if state else 0
if options.resume and not state:
    say(f"{folder} has no state: from the beginning")
state = None  # as large as three models
if rank == 0 and log_file.exists():  # steps after the state are done again
    lines = []
    for line in log_file.read_text(errors="replace").splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):  # half a line
            is_last = "held_out_loss" in line and first == steps  # which is told again
            lines += [line] if json.loads(line)["step"] + is_last <= first else []
    is_kept(log_file, lambda beside: beside.write_text("".join(lines)))
card = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
n_tokens = n_training * seq_len
epochs = steps * tokens_per_step / n_tokens
say(f"{config.model}, {n_params:,} parameters, {precision}, on {world} × {card}")
say(f"a step: {world} × {grad_accum_steps} × {micro_batch_size} sequences of {seq_len} tokens")
say(f"text: {n_tokens:,} tokens, read {epochs:.2f} times; {len(held_out)} sequences are held out")
if changes:
    told = ", ".join(f"{key}={value}" for key, value in changes.items())
    say(f"not as {'the file' if options.config else 'Config'} begins: {told}")
say(f"kept in {folder}, at the end" + (f" and every {save_every} steps" if save_every else ""))
if first:
    say(f"continues after step {first}")

signals = []  # that ask for the end


def note(number, frame):
    """Remember a wish to end, which a step, or a state half written, is not ended by."""
    signals.append(number)
    signal.signal(number, signal.SIG_DFL)
    say("ends after this step; once more ends it at once")


handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
n_before = first * grad_accum_steps * world  # micro-batches; the processes take the rest in turns
stream = islice(micro_batches(), n_before + rank, None, world)
start, stops, has_state = time.perf_counter(), False, True
for step in range(first, steps):
    train_step(step)
    n = step + 1
    stops = one_says(bool(signals))
    evaluates = config.eval_every and n % config.eval_every == 0 and n < steps
    saves = stops or n == steps or (save_every and n % save_every == 0)
    if not (n % 10 == 0 or n == first + 1 or evaluates or saves):
        continue  # what is printed is read from the device, and the host waits for that
    if kind == "cuda":
        torch.cuda.synchronize()
    ms = 1000 * (time.perf_counter() - start) / (n - reported)
    if rank == 0:
        report(reported, n, ms)
    require_sound(n)
    if evaluates:
        tell_held_out(n)
    if saves:
        has_state = save(n)
    if stops:
        break
    reported, start = n, time.perf_counter()

# ---- What came of it
require_sound(n)  # of a state that is resumed at its end, too
if not stops:
    tell_held_out(n)
if world > 1:
    del training_loss  # DDP holds the group, whose threads must end before Python does
    gc.collect()  # it is part of circles
    dist.destroy_process_group()
if rank > 0:
    end(0)
has_model = is_kept(folder / "model", leave_model)
for number, handler in handlers.items():
    signal.signal(number, handler)
if stops:
    way_on = "the same command with --resume continues" if has_state else "its state is lost"
    say(f"stopped after step {n} of {steps}; {way_on}")
    end(128 + (signals or [signal.SIGTERM])[0])  # another process may have been told
prompt = tokenizer.decode(held_out[0, :16].tolist())
say(f"it reads: {prompt}")
say(f"it writes: {written(prompt, 100)}")
if has_model:
    say(f"GPT2LMHeadModel and AutoTokenizer: .from_pretrained({str(folder / 'model')!r})")
if not (has_model and has_state):
    end(1)
