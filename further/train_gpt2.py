"""Train GPT-2 as a file of `configs/` says, in one script: no labutils, nothing hidden.

    python further/train_gpt2.py configs/fp16_config.yaml --set steps=20
    torchrun --nproc_per_node 2 further/train_gpt2.py configs/fp32_config.yaml \\
        --set micro_batch_size=2 --save-every 20

Automatic mixed precision, a GradScaler, gradient accumulation, gradient checkpointing and clipping.
One process on a CPU has the losses of `labutils run`, bit for bit; in chunks they agree to
rounding. torchrun shares every step among processes: as many tokens, and without dropout the same
gradient up to rounding. With `--save-every` a run keeps its state, from which the same command
with `--resume` continues, and leaves a model for `GPT2LMHeadModel.from_pretrained`.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sysconfig
import time
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

as_written = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
parser.add_argument("config", type=Path, help="a YAML file, as in configs/")
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
    parser.exit(2, f"{parser.prog}: {reason}\n" if rank == 0 else None)


# ---- The config: the file, then what it says for a CPU, then --set
SCHEMA = json.loads((Path(__file__).parents[1] / "configs/schema.json").read_text())
KEYS = SCHEMA["properties"]
TYPES = {"integer": int, "number": float, "boolean": bool}


def typed(part):
    """Return {key: value} of {key: text}. What is no such value stays, for `check` to refuse."""
    for key, text in part.items():
        with suppress(KeyError, OverflowError, ValueError):  # 512.0 and yes are values, too
            value = TypeAdapter(TYPES[KEYS[key]["type"]]).validate_python(text)
            part[key] = value if math.isfinite(value) else text
    return part


class Loader(yaml.BaseLoader):  # every value is a text: for YAML itself 6e-4 is no number
    """A reader of YAML that does not let a later line replace an earlier one."""

    def construct_mapping(self, node, deep=False):
        names = [name.value for name, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            refuse(f"{options.config}: {twice[0]} is given twice")
        return super().construct_mapping(node, deep)


def check(values, where):
    """Refuse values that the schema does not allow: all of them, with what could be meant."""
    reasons = []
    for error in Draft202012Validator(SCHEMA).iter_errors(values):
        given, allowed = error.instance, error.schema.get("enum", [])
        if error.validator == "additionalProperties":
            given, allowed = min(given.keys() - KEYS.keys(), default="when_cpu"), KEYS
        near = get_close_matches(str(given).lower(), map(str, allowed), n=1)
        place = ": ".join([str(where), *error.path])
        reasons.append(f"{place}: {error.message}" + "".join(f"; did you mean {n}?" for n in near))
    if reasons:
        refuse("\n".join(reasons))


if wrong := [pair for pair in options.set if "=" not in pair]:
    refuse(f"--set {wrong[0]}: expected KEY=VALUE, as in --set steps=20")
overrides = typed(dict(pair.split("=", 1) for pair in options.set))
try:
    in_file = yaml.load(options.config.read_text(encoding="utf-8-sig"), Loader)
except OSError as error:
    files = " ".join(map(str, sorted(Path("configs").glob("*.yaml"))))
    refuse(f"{options.config}: {error.strerror}; there are {files or 'none in configs/'}")
except (yaml.YAMLError, ValueError) as error:
    refuse(f"{options.config}: expected lines of `key: value`: {error}")
for_cpu = in_file.pop("when_cpu", {}) if isinstance(in_file, dict) else None
if not isinstance(for_cpu, dict):
    refuse(f"{options.config}: expected lines of `key: value`, and under when_cpu, too")
check(typed(in_file) | {"when_cpu": typed(for_cpu)}, options.config)
changes = (for_cpu if kind == "cpu" else {}) | overrides
config = in_file | changes
HERE = {  # where this script has code for less than labutils
    "weights": ["random"],
    "precision": ["fp32", "tf32", "fp16", "bf16", "16bit"],
    "optimizer": ["adamw"],
    "optimizer_impl": ["fused"],
    "optimizer_in_backward": [False],
    "use_cache": [False],
    "attention": ["auto"],
    "compile": ["off", "default"],
    "gradient_checkpointing": ["none", "block"],
    "memory_limit_gib": [0],
    "expandable_segments": [False],
}
for key, choices in HERE.items():
    KEYS[key]["enum"] = choices
check(config, "this script")

steps, warmup = config["steps"], config["lr_warmup_steps"]
if warmup > steps:
    refuse(f"lr_warmup_steps: {warmup} are more than the {steps} steps; 0 is no warm-up")
seq_len, micro_batch_size = config["seq_len"], config["micro_batch_size"]
tokens_per_step = config["tokens_per_step"]
grad_accum_steps, left_over = divmod(tokens_per_step, seq_len * micro_batch_size * world)
if left_over:
    product = f"{seq_len} (seq_len) × {micro_batch_size} (micro_batch_size) × {world} (processes)"
    sizes = [n for n in range(1, micro_batch_size) if tokens_per_step % (seq_len * n * world) == 0]
    way_out = f"; try --set micro_batch_size={sizes[-1]}" if sizes else ""
    refuse(f"tokens_per_step {tokens_per_step} is no multiple of {product}{way_out}")
targets_per_step = tokens_per_step // seq_len * (seq_len - 1)  # none is a first token

precision = config["precision"]
is_old = kind == "cuda" and torch.cuda.get_device_capability() < (8, 0)  # no TF32; BF16 is slow
if precision == "16bit":
    precision = "fp16" if is_old else "bf16"
if precision == "tf32" and (is_old or kind == "cpu"):
    refuse("precision: tf32 needs an NVIDIA GPU of 2020 (Ampere) or later; use fp16")
uses_amp = precision in ("fp16", "bf16")
amp_dtype = torch.float16 if precision == "fp16" else torch.bfloat16
if precision == "tf32":  # matrix products round their float32 inputs to 10 bits of mantissa
    torch.backends.cuda.matmul.fp32_precision = "tf32"

save_every = options.save_every
if save_every < 0 or (options.resume and save_every == 0):
    refuse("--save-every N needs an N of 1 or more, and --resume goes with it")
folder = options.out or Path("runs") / config["name"]
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

# ---- The processes meet, each with a card of its own
if kind == "cuda":
    n_cards, n_here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if n_here > n_cards:
        refuse(f"{n_here} processes need a card each; torch sees {n_cards}")
    torch.cuda.set_device(device)
if world > 1:
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")


# ---- The text: a file of your own, or what ships with Python
def documents():
    """Yield texts: Python's language reference and the source of its library, or pieces of the file
    that end with a line, as far as they are needed; and beside each what ends it: [0], or [].
    """
    if config["corpus"] != "stdlib":
        beside = Path() if "corpus" in overrides else options.config.parent
        try:
            with (beside / config["corpus"]).open(encoding="utf-8-sig") as file:
                while piece := file.read(2**20) + file.readline(2**20):
                    if "\0" in piece:
                        refuse(f"corpus: {file.name} is not text (it has NUL characters)")
                    yield piece, []
            yield "", [0]
        except (OSError, ValueError) as error:
            refuse(f"corpus: {error}; name one UTF-8 text file")
        return
    yield "\n\n".join(topics[name] for name in sorted(topics)), [0]
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(library.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(library).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 1000:
                yield text, [0]


say("training a tokenizer on the text")
END = "<|endoftext|>"
vocab_size = 2048 if config["model"] == "gpt2-nano" else 50257
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END],  # it gets the first number, 0
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
# a tokenizer learns from a word in a time that grows with its length squared: long ones are cut
LONG_WORD = r"([^\W\d_]{1000}|\d{1000}|(?:[^\w\s]|_){1000}|\s{1000})"
tokenizer.train_from_iterator(re.split(LONG_WORD, next(documents())[0]), trainer)
# every tenth sequence is held out, so a run needs a ninth more than it trains on
tokens_needed = steps * tokens_per_step * 10 // 9 + 10 * seq_len
ids = []
for text, end in documents():
    ids += tokenizer.encode(text).ids + end
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
    generator = torch.Generator().manual_seed(config["seed"])
    while True:
        order = torch.randperm(len(training), generator=generator)
        for start in range(0, len(order) - micro_batch_size + 1, micro_batch_size):
            yield training[order[start : start + micro_batch_size]]


# ---- The model
def attend(module, q, k, v, mask, dropout=0.0, scaling=None, **_):
    """Causal attention that never builds the mask (T, T): then torch can choose flash attention."""
    is_causal = q.shape[2] > 1  # a single query, when text is written, may see every key
    mixed = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=is_causal, scale=scaling
    )
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", attend)
shapes = {
    "gpt2-nano": {"n_layer": 4, "n_head": 4, "n_embd": 128},
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
shape = GPT2Config(
    **shapes[config["model"]],
    n_positions=max(seq_len, 1024),
    vocab_size=math.ceil(vocab_size / 64) * 64 if config["pad_vocab"] else vocab_size,
    activation_function=config["activation"].replace("gelu_tanh", "gelu_pytorch_tanh"),
    attn_implementation="causal",
    use_cache=False,
    **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], config["dropout"]),
    **dict.fromkeys(["bos_token_id", "eos_token_id"], 0),
)
torch.manual_seed(config["seed"])
model = GPT2LMHeadModel(shape).to(device)
if config["gradient_checkpointing"] == "block":  # keep a block's input, compute the rest again
    for block in model.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class Loss(torch.nn.Module):
    """Next-token cross-entropy of ids (B, T), summed over B · (T - 1) targets."""

    def __init__(self):
        super().__init__()
        self.model = model

    def of_rows(self, hidden, targets):
        """Return the sum for rows of hidden states (rows, width)."""
        logits = self.model.lm_head(hidden).float()  # (rows, vocabulary)
        return F.cross_entropy(logits, targets, reduction="sum")

    def forward(self, ids):
        targets = F.pad(ids, (0, 1), value=-100)[:, 1:].flatten()  # (B·T,); -100: has no target
        hidden = self.model.transformer(input_ids=ids).last_hidden_state.flatten(0, 1)
        rows = config["loss_chunk_tokens"] or len(hidden)
        if rows >= len(hidden):
            return self.of_rows(hidden, targets)
        loss = 0  # few rows of logits exist at once; backward computes them again
        for chunk in zip(hidden.split(rows), targets.split(rows), strict=True):
            loss = loss + checkpoint(self.of_rows, *chunk, use_reentrant=False)
        return loss


def add_up(_, bucket):
    """Give every process the sum of the gradients in a bucket: DDP's own hook gives their mean."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


loss_sum = Loss()
training_loss = loss_sum if config["compile"] == "off" else torch.compile(loss_sum, dynamic=False)
if world > 1:
    training_loss = DistributedDataParallel(training_loss, gradient_as_bucket_view=True)
    training_loss.register_comm_hook(None, add_up)
if rank > 0:  # the weights are equal; dropout must not be
    torch.manual_seed(config["seed"] + rank)

# ---- The optimizer, and the scaler
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and layer norms: no decay
decay = config["weight_decay"]
groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=config["learning_rate"], betas=(0.9, 0.95), fused=True)
# FP16 has no numbers for the smallest gradients, so the loss is enlarged. Disabled, it does nothing
scaling = {"init_scale": config["init_scale"], "growth_interval": config["growth_interval"]}
scaler = torch.amp.GradScaler(kind, **scaling, enabled=precision == "fp16")

# ---- The state on disk: what decides the steps to come
series = torch.zeros(4, steps, device=device)
losses, norms, scales, skips = series  # views of its rows
parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
changes_nothing = {"name", "note", "corpus", "eval_every"}
identity = {key: config[key] for key in config.keys() - changes_nothing}
identity |= {"device": kind, "text": hashlib.sha256(sequences.numpy()).hexdigest()}


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
    state |= {name: part.state_dict() for name, part in parts.items()}
    beside = folder / "state.part"
    try:
        torch.save(state, beside)
        beside.replace(state_file)
    except (OSError, RuntimeError) as error:  # a full disk, say: the state before it stays
        beside.unlink(missing_ok=True)
        say(f"step {done} NOT SAVED, the run goes on: {error}")


def restore():
    """Take up the last state, if there is one; return how many steps it has done."""
    if not state_file.exists():
        say(f"{folder} has no state: from the beginning")
        return 0
    try:  # weights_only: no code in a file runs
        state = torch.load(state_file, map_location="cpu", weights_only=True)
        before = state["identity"]
    except Exception as error:  # of many kinds, if the file is damaged
        refuse(f"{state_file} cannot be read; delete it to begin anew ({error})")
    for key, value in identity.items():
        if before.get(key) != value:
            refuse(f"{folder} has a run whose {key} was {before.get(key)}, now it is {value}")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    series.copy_(state["series"])
    if rank < len(state["random"]):  # of more processes than before, the new keep their own
        on_cpu, on_cuda = state["random"][rank]
        torch.set_rng_state(on_cpu)
        if kind == "cuda":
            torch.cuda.set_rng_state(on_cuda)
    return state["done"]


# ---- Training
def train_step(step):
    """Update the weights once, with the gradient of the mean loss over all targets of a step."""
    rate = config["learning_rate"]
    if step < warmup:
        rate = rate * (step + 1) / warmup
    elif config["lr_schedule"] == "cosine":  # down to a tenth
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
    if config["max_grad_norm"]:
        norms[step] = clip_grad_norm_([*matrices, *vectors], config["max_grad_norm"])
    scaler.step(optimizer)  # skipped if a gradient is inf or NaN
    scaler.update()  # then the scale falls; after many good steps it rises
    skips[step] = scaler.scale(one) < scales[step]
    optimizer.zero_grad(set_to_none=True)
    if world > 1:
        dist.all_reduce(losses[step])


@torch.no_grad()
def held_out_loss():
    """Return the mean loss per target on held-out text, without dropout."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids in held_out.split(micro_batch_size)[rank::world]:
        with torch.autocast(kind, dtype=amp_dtype, enabled=uses_amp):
            total += loss_sum(ids.to(device))
    model.train()
    if world > 1:
        dist.all_reduce(total)
    return total.item() / (len(held_out) * (seq_len - 1))


def report(step, ms):
    """Return what a step gave, and what the steps since the last report cost."""
    rate = optimizer.param_groups[0]["lr"]
    line = f"step {step + 1}/{steps}: loss {losses[step]:.4f}, rate {rate:.1e}"
    if config["max_grad_norm"]:
        line += f", norm {norms[step]:.2f}"
    if scaler.is_enabled():
        line += f", scale {scales[step]:g} ({skips.sum():g} skipped)"
    line += f", {ms:,.0f} ms, {tokens_per_step / ms * 1000:,.0f} tokens/s"
    if options.peak_tflops:
        tflops = flops_per_token * tokens_per_step / world / ms / 1e9
        line += f", {tflops / options.peak_tflops:.1%} of the peak"
    if kind == "cuda":
        return f"{line}, peak {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"
    return f"{line}, process {psutil.Process().memory_info().rss / 2**20:,.0f} MiB"


one = torch.ones((), device=device)
n_params = sum(p.numel() for p in model.parameters())
flops_per_token = 6 * (n_params - model.transformer.wpe.weight.numel())  # PaLM, appendix B
flops_per_token += 12 * shape.n_layer * shape.n_embd * seq_len
reported = first = restore() if options.resume else 0
card = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
n_tokens = training.numel()
epochs = steps * tokens_per_step / n_tokens
say(f"{config['model']}, {n_params:,} parameters, {precision}, on {world} × {card}")
say(f"a step: {world} × {grad_accum_steps} × {micro_batch_size} sequences of {seq_len} tokens")
say(f"text: {n_tokens:,} tokens, read {epochs:.2f} times; {len(held_out)} sequences are held out")
if changes:
    say(f"not as the file begins: {', '.join(f'{key}={changes[key]}' for key in changes)}")
say(f"kept in {folder}" if save_every else "nothing is kept without --save-every")
if first:
    say(f"continues after step {first}")
n_before = first * grad_accum_steps * world  # micro-batches; the processes take the rest in turns
stream = islice(micro_batches(), n_before + rank, None, world)
start = time.perf_counter()
for step in range(first, steps):
    train_step(step)
    n = step + 1
    evaluates = config["eval_every"] and n % config["eval_every"] == 0 and n < steps
    saves = save_every and (n % save_every == 0 or n == steps)
    if not (n % 10 == 0 or n in (first + 1, steps) or evaluates or saves):
        continue  # what is printed is read from the device, and the host waits for that
    if kind == "cuda":
        torch.cuda.synchronize()
    say(report(step, 1000 * (time.perf_counter() - start) / (n - reported)))
    is_sound = get_total_norm([*matrices, *vectors]).isfinite()
    if not (is_sound and losses[max(0, n - 5) : n].isfinite().any()):
        refuse("weights or losses are inf or NaN; try a lower learning_rate, or a longer warm-up")
    if evaluates:
        say(f"step {n}: held-out loss {held_out_loss():.4f}")
    if saves:
        save(n)
    reported, start = n, time.perf_counter()

# ---- What came of it
say(f"held-out loss {held_out_loss():.4f}")
if world > 1:
    del training_loss  # DDP holds the group, whose threads must end before Python does
    dist.destroy_process_group()
if rank > 0:
    raise SystemExit
# while it trained, nobody would have read what is cached
model.config.use_cache = model.generation_config.use_cache = True
if save_every:
    beside, place = folder / "model.part", folder / "model"
    disable_progress_bar()
    model.save_pretrained(beside)
    as_fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    as_fast.save_pretrained(beside)
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)
    say(f"GPT2LMHeadModel and AutoTokenizer: .from_pretrained({str(place)!r})")
prompt = held_out[:1, :16].to(device)
without_text = list(range(tokenizer.get_vocab_size(), shape.vocab_size)) or None  # padding
choice = {"do_sample": True, "suppress_tokens": without_text, "pad_token_id": 0}
choice |= {"max_new_tokens": 100, "attention_mask": torch.ones_like(prompt)}
text = model.eval().generate(prompt, **choice)
say(f"it reads: {tokenizer.decode(prompt[0].tolist())}")
say(f"it writes: {tokenizer.decode(text[0, prompt.shape[1] :].tolist())}")
