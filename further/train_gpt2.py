"""Train GPT-2 in one file: plain torch, the model on the page, no labutils. Copy it anywhere.

    python train_gpt2.py                                        # what Config says below
    python train_gpt2.py fp16_config.yaml --set steps=20        # a file of the course's configs/
    torchrun --nproc_per_node 2 train_gpt2.py fp32_config.yaml \\
        --set micro_batch_size=2 --save-every 20

Automatic mixed precision, a GradScaler, gradient accumulation, gradient checkpointing and clipping.
One process on a CPU has the losses of `labutils run`, bit for bit; in chunks they agree to
rounding. torchrun shares every step among processes: as many tokens, and without dropout the same
gradient up to rounding. With `--save-every` a run keeps its state, from which the same command
with `--resume` continues to the same weights, bit for bit; or with more steps, other micro-batches,
another number of processes. It leaves a model for `GPT2LMHeadModel.from_pretrained`.
"""

import argparse
import gc
import hashlib
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
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
parser.add_argument("--out", type=Path, help="folder of the state and the model (runs/NAME)")
parser.add_argument("--peak-tflops", type=float, help="a card's peak, to print the share reached")
options = parser.parse_args()

# ---- One process, or one of several that torchrun has started
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)


def say(text):
    """Print a line at once, in the first process only."""
    if rank == 0:
        print(text, flush=True)


def refuse(reason):
    """End the process with a reason in place of a traceback; the first process tells it."""
    if rank > 0:
        time.sleep(1)  # torchrun stops the others as soon as one has ended
        sys.exit(2)
    print(f"{parser.prog}: {reason}", file=sys.stderr, flush=True)
    launcher = Path(f"/proc/{os.getppid()}/cmdline")  # on Linux
    words = launcher.read_bytes() if world > 1 and launcher.exists() else b""
    if re.search(b"torchrun|torch.distributed", words):  # it would print 20 lines beneath this one
        os.kill(os.getppid(), signal.SIGKILL)
    sys.exit(2)


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


# ---- A step of training
def train_step(step):
    """Update the weights once, with the gradient of the mean loss over all targets of a step."""
    rate = config.learning_rate
    if step < warmup:
        rate = rate * (step + 1) / warmup
    elif config.lr_schedule == "cosine":  # down to a tenth
        progress = (step - warmup) / (steps - warmup)
        rate = rate * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = rate
    scales[step] = scaler.scale(one)
    for i in range(grad_accum_steps):
        waits = world > 1 and i + 1 < grad_accum_steps  # gradients are exchanged once a step
        with training_loss.no_sync() if waits else nullcontext():
            with torch.autocast(kind, dtype=amp_dtype, enabled=uses_amp):
                ids = next(stream).to(device)
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
save_every = options.save_every
if save_every < 0 or (options.resume and save_every == 0):
    refuse("--save-every N needs an N of 1 or more, and --resume goes with it")
folder = options.out or Path("runs") / config.name
state_file = folder / "state.pt"
if save_every:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        in_folder = {path.name for path in folder.iterdir()} - {"state.part"}
    except OSError as error:
        refuse(f"--out {folder}: {error.strerror}")
    if in_folder and not options.resume:
        refuse(f"{folder} has a run already; --resume continues it, --out names another folder")
    if in_folder and not state_file.exists():
        refuse(f"{folder} has no state to resume from, but other files; --out names another folder")
state = None
if options.resume and state_file.exists():
    try:  # weights_only: no code in a file runs
        if damaged := zipfile.ZipFile(state_file).testzip():
            raise ValueError(f"{damaged} is damaged")
        state = torch.load(state_file, map_location="cpu", weights_only=True)
        before, _, _ = state["identity"], state["series"], state["random"]
    except Exception as error:  # of many kinds, if the file is damaged
        refuse(f"{state_file} cannot be read; delete it to begin anew ({error})")
if kind == "cuda":
    n_cards, n_here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if n_here > n_cards:
        refuse(f"{n_here} processes need a card each; torch sees {n_cards}")
    torch.cuda.set_device(device)
if world > 1:
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")


# ---- GPT-2's own weights and tokenizer, if they are wanted
pretrained = None
if config.weights == "pretrained":
    from huggingface_hub import snapshot_download

    try:
        hub = f"openai-community/{config.model}"
        pretrained = Path(snapshot_download(hub, local_files_only=True))
        for name in ("model.safetensors", "tokenizer.json"):
            (pretrained / name).stat()  # a cache may have a part of them
    except OSError as error:
        refuse(f"weights: {hub} is not in the cache that HF_HOME names; use random ({error})")


# ---- The text: a file of your own, or what ships with Python
def documents():
    """Yield texts: Python's language reference and the source of its library, or pieces of the file
    that end with a line, as far as they are needed; and beside each what ends it, or nothing.
    """
    if config.corpus != "stdlib":
        is_of_file = options.config and "corpus" not in overrides
        beside = options.config.parent if is_of_file else Path()
        try:
            with (beside / config.corpus).open(encoding="utf-8-sig") as file:
                while piece := file.read(2**20) + file.readline(2**20):
                    if "\0" in piece:
                        refuse(f"corpus: {file.name} is not text (it has NUL characters)")
                    yield piece, ""
            yield "", END
        except (OSError, ValueError) as error:
            refuse(f"corpus: {error}; name one UTF-8 text file")
        return
    yield "\n\n".join(topics[name] for name in sorted(topics)), END
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(library.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(library).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 1000:
                yield text, END


END = "<|endoftext|>"
# a tokenizer learns from a word in a time that grows with its length squared: long ones are cut
LONG_WORD = r"([^\W\d_]{1000}|\d{1000}|(?:[^\w\s]|_){1000}|\s{1000})"


def trained_tokenizer():
    """Return byte pairs of the text's first piece."""
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
    tokenizer.train_from_iterator(re.split(LONG_WORD, next(documents())[0]), trainer)
    return tokenizer


tokenizer = (
    Tokenizer.from_file(str(pretrained / "tokenizer.json")) if pretrained else trained_tokenizer()
)
# every tenth sequence is held out, so a run needs a ninth more than it trains on
tokens_needed = steps * tokens_per_step * 10 // 9 + 10 * seq_len
if state:  # a longer run reads the same text again
    tokens_needed = state.get("tokens_needed", tokens_needed)
ids = []
for text, end in documents():
    ids += tokenizer.encode(text).ids + tokenizer.encode(end).ids
    if len(ids) >= tokens_needed:
        break
if len(ids) < max(10, micro_batch_size * 10 / 9 + 1) * seq_len:
    refuse(f"the text has {len(ids)} tokens: too few for {micro_batch_size} sequences of {seq_len}")
sequences = torch.tensor(ids).unfold(0, seq_len, seq_len)  # (n, T)
is_held_out = torch.arange(len(sequences)) % 10 == 9
training, held_out = sequences[~is_held_out], sequences[is_held_out]
order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
held_out = held_out[order[:16]]


def micro_batches():
    """Yield token ids (B, T) for ever: each epoch in a new order, without the tail."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        order = torch.randperm(len(training), generator=generator)
        for start in range(0, len(order) - micro_batch_size + 1, micro_batch_size):
            yield training[order[start : start + micro_batch_size]]


# ---- The weights, the optimizer, and the scaler
def own_weights():
    """Return GPT-2's own weights by our names: the file has no prefix, and tied ones once."""
    from safetensors.torch import load_file

    read = load_file(pretrained / "model.safetensors")
    read = {f"transformer.{name.removeprefix('transformer.')}": read[name] for name in read}
    read["lm_head.weight"] = read["transformer.wte.weight"]
    return {name: read[name] for name in model.state_dict()}  # not its masks


torch.manual_seed(config.seed)
model = GPT2()
if pretrained:
    model.load_state_dict(own_weights())
model = model.to(device)
training_loss = model if config.compile == "off" else torch.compile(model, dynamic=False)


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

# ---- The state on disk: what decides the steps to come
series = torch.zeros(4, steps, device=device)
losses, norms, scales, skips = series  # views of its rows
parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
identity = asdict(config) | {"device": kind, "processes": world}
identity["text"] = hashlib.sha256(sequences.numpy()).hexdigest()
changes_nothing = {"name", "note", "corpus", "eval_every"}
# of a run that goes on; what these change is said
may_change = {
    "steps": "the rate's schedule, unless it is constant; the text is read as far as at first",
    "micro_batch_size": "the order of sums, and of sequences after an epoch",
    "processes": "the order of sums, and dropout",
}


def save(done):
    """Write the state beside the last one, then rename it: whenever a run dies, one is whole."""
    on_cuda = torch.cuda.get_rng_state() if kind == "cuda" else None
    own = (torch.get_rng_state(), on_cuda)
    random = [own] * world
    if world > 1:
        dist.all_gather_object(random, own)
    if rank > 0:
        return
    state = {"identity": identity, "done": done, "series": series, "random": random}
    state["tokens_needed"] = tokens_needed
    state |= {name: part.state_dict() for name, part in parts.items()}
    beside = folder / "state.part"
    try:
        torch.save(state, beside)
        beside.replace(state_file)
    except (OSError, RuntimeError) as error:  # a full disk, say: the state before it stays
        beside.unlink(missing_ok=True)
        say(f"step {done} NOT SAVED, the run goes on: {error}")


def restore():
    """Take up the last state; return how many steps it has done."""
    changed = {key: before.get(key) for key in identity if before.get(key) != identity[key]}
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


# ---- What is told
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


def report(step, ms):
    """Return what a step gave, and what the steps since the last report cost."""
    rate = optimizer.param_groups[0]["lr"]
    line = f"step {step + 1}/{steps}: loss {losses[step]:.4f}, rate {rate:.1e}"
    if config.max_grad_norm:
        line += f", norm {norms[step]:.2f}"
    if scaler.is_enabled():
        line += f", scale {scales[step]:g} ({skips.sum():g} skipped)"
    line += f", {ms:,.0f} ms, {tokens_per_step / ms * 1000:,.0f} tokens/s"
    if options.peak_tflops:
        tflops = flops_per_token * tokens_per_step / world / ms / 1e9
        line += f", {tflops / options.peak_tflops:.1%} of the peak"
    if kind == "cuda":
        return f"{line}, peak {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"
    if resource:  # it counts KiB, but on a Mac bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        line += f", process {peak / (2**20 if sys.platform == 'darwin' else 2**10):,.0f} MiB"
    return line


def require_sound(n):
    """Refuse weights, or five losses up to step n, that are no numbers: nothing of them is kept."""
    is_sound = get_total_norm([*matrices, *vectors]).isfinite()
    if not (is_sound and losses[max(0, n - 5) : n].isfinite().any()):
        refuse("weights or losses are inf or NaN; try a lower learning_rate, or a longer warm-up")


one = torch.ones((), device=device)
n_params = sum(p.numel() for p in model.parameters())
flops_per_token = 6 * (n_params - model.transformer.wpe.weight.numel())  # PaLM, appendix B
flops_per_token += 12 * n_layer * width * seq_len
reported = first = restore() if state else 0
if options.resume and not state:
    say(f"{folder} has no state: from the beginning")
state = None  # as large as three models
card = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
n_tokens = training.numel()
epochs = steps * tokens_per_step / n_tokens
say(f"{config.model}, {n_params:,} parameters, {precision}, on {world} × {card}")
say(f"a step: {world} × {grad_accum_steps} × {micro_batch_size} sequences of {seq_len} tokens")
say(f"text: {n_tokens:,} tokens, read {epochs:.2f} times; {len(held_out)} sequences are held out")
if changes:
    told = ", ".join(f"{key}={value}" for key, value in changes.items())
    say(f"not as {'the file' if options.config else 'Config'} begins: {told}")
say(f"kept in {folder}" if save_every else "nothing is kept without --save-every")
if first:
    say(f"continues after step {first}")
n_before = first * grad_accum_steps * world  # micro-batches; the processes take the rest in turns
stream = islice(micro_batches(), n_before + rank, None, world)
start = time.perf_counter()
for step in range(first, steps):
    train_step(step)
    n = step + 1
    evaluates = config.eval_every and n % config.eval_every == 0 and n < steps
    saves = save_every and (n % save_every == 0 or n == steps)
    if not (n % 10 == 0 or n in (first + 1, steps) or evaluates or saves):
        continue  # what is printed is read from the device, and the host waits for that
    if kind == "cuda":
        torch.cuda.synchronize()
    say(report(step, 1000 * (time.perf_counter() - start) / (n - reported)))
    require_sound(n)
    if evaluates:
        say(f"step {n}: held-out loss {held_out_loss():.4f}")
    if saves:
        save(n)
    reported, start = n, time.perf_counter()

# ---- What came of it
require_sound(steps)  # of a state that is resumed at its end, too
say(f"held-out loss {held_out_loss():.4f}")
if world > 1:
    del training_loss  # DDP holds the group, whose threads must end before Python does
    gc.collect()  # it is part of circles
    dist.destroy_process_group()
if rank > 0:
    raise SystemExit
if save_every:
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    beside, place = folder / "model.part", folder / "model"
    end = tokenizer.token_to_id(END)
    n_trained = n_positions if pretrained else seq_len  # positions
    left = GPT2LMHeadModel(
        GPT2Config(
            **{"n_layer": n_layer, "n_head": n_head, "n_embd": width, "vocab_size": n_rows},
            n_positions=n_trained,
            activation_function=config.activation.replace("gelu_tanh", "gelu_pytorch_tanh"),
            **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], config.dropout),
            **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"], end),
        )
    )
    weights = model.state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:n_trained]
    left.load_state_dict(weights)
    left.save_pretrained(beside)
    facts = dict.fromkeys(["bos_token", "eos_token", "pad_token"], END)
    facts |= {"tokenizer_object": tokenizer, "model_max_length": n_trained}
    PreTrainedTokenizerFast(**facts).save_pretrained(beside)
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)
    say(f"GPT2LMHeadModel and AutoTokenizer: .from_pretrained({str(place)!r})")


@torch.no_grad()
def written(ids, n):
    """Return ids (1, T) and n more, each drawn by the probabilities that the model gives it."""
    model.eval()
    for _ in range(n):
        logits = model.lm_head(model.hidden(ids[:, -seq_len:])[:, -1])
        words = logits[:, : tokenizer.get_vocab_size()]  # the others are padding
        ids = torch.cat([ids, torch.multinomial(words.softmax(-1), 1)], dim=1)
    return ids


prompt = held_out[:1, :16].to(device)
text = written(prompt, 100)[0].tolist()
say(f"it reads: {tokenizer.decode(text[:16])}")
say(f"it writes: {tokenizer.decode(text[16:])}")
