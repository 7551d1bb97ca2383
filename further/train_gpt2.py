"""Train GPT-2 as a file of `configs/` says, in one script: no labutils, nothing hidden.

    python further/train_gpt2.py configs/fp16_config.yaml --set steps=20

Automatic mixed precision, a GradScaler, gradient accumulation, gradient checkpointing and clipping.
On a CPU its losses are those of `labutils run`, bit for bit; in chunks they agree to rounding.
"""

import argparse
import json
import math
import sysconfig
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

# ---- The config: the file, then what it says for a CPU, then --set
parser = argparse.ArgumentParser(description="Train GPT-2 as a YAML file of configs/ says.")
parser.add_argument("config", type=Path)
parser.add_argument(
    "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides"
)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
words = yaml.load(options.config.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
when_cpu = words.pop("when_cpu", {})
words |= when_cpu if device == "cpu" else {}
words |= dict(override.split("=", 1) for override in options.overrides)
config = dict(words)
for key, text in words.items():
    with suppress(ValueError):  # a number or a truth value; PyYAML would take 6e-4 for a text
        config[key] = json.loads(text)

HERE = {  # what this script has code for
    "weights": ["random"],
    "precision": ["fp32", "tf32", "fp16", "bf16", "16bit"],
    "optimizer": ["adamw"],
    "optimizer_impl": ["fused"],
    "optimizer_in_backward": [False],
    "attention": ["auto"],
    "gradient_checkpointing": ["none", "block"],
    "compile": ["off", "default"],
}
for key, values in HERE.items():
    if config[key] not in values:
        parser.error(f"{key} is {config[key]!r}; this script has code for {values}")

steps, warmup = config["steps"], config["lr_warmup_steps"]
if warmup > steps:
    parser.error(f"lr_warmup_steps: {warmup} are more than the {steps} steps; 0 is no warm-up")
seq_len, micro_batch_size = config["seq_len"], config["micro_batch_size"]
grad_accum_steps, left_over = divmod(config["tokens_per_step"], seq_len * micro_batch_size)
assert left_over == 0, "tokens_per_step is no multiple of seq_len * micro_batch_size"
targets_per_step = config["tokens_per_step"] // seq_len * (seq_len - 1)  # none is a first token

precision = config["precision"]
if precision == "16bit":  # BF16 where there is hardware for it, else FP16
    has_bf16 = device == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
    precision = "bf16" if has_bf16 else "fp16"
uses_amp = precision in ("fp16", "bf16")
amp_dtype = torch.float16 if precision == "fp16" else torch.bfloat16
if precision == "tf32":  # matrix products round their float32 inputs to 10 bits of mantissa
    assert device == "cuda", "TF32 is a mode of NVIDIA's tensor cores"
    torch.backends.cuda.matmul.fp32_precision = "tf32"


# ---- The text: a file of your own, or what ships with Python
def documents():
    """Yield texts: the file, or Python's language reference and then the source of its library."""
    if config["corpus"] != "stdlib":
        yield (options.config.parent / config["corpus"]).read_text(encoding="utf-8-sig")
        return
    yield "\n\n".join(topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(library.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(library).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 1000:
                yield text


vocab_size = 2048 if config["model"] == "gpt2-nano" else 50257
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=["<|endoftext|>"],  # it gets the first number, 0
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
tokenizer.train_from_iterator([next(documents())], trainer)
# every tenth sequence is held out, so a run needs a ninth more than it trains on
tokens_needed = steps * config["tokens_per_step"] * 10 // 9 + 10 * seq_len
ids = []
for text in documents():
    ids += [*tokenizer.encode(text).ids, 0]
    if len(ids) >= tokens_needed:
        break
sequences = torch.tensor(ids).unfold(0, seq_len, seq_len)  # (n, T)
is_held_out = torch.arange(len(sequences)) % 10 == 9
training, held_out = sequences[~is_held_out], sequences[is_held_out]
order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
held_out = held_out[order[:16]]
assert len(training) >= micro_batch_size, "the text is too short"


def micro_batches():
    """Yield token ids (B, T) for ever: each epoch in a new order, without the tail."""
    generator = torch.Generator().manual_seed(config["seed"])
    while True:
        order = torch.randperm(len(training), generator=generator)
        for start in range(0, len(order) - micro_batch_size + 1, micro_batch_size):
            yield training[order[start : start + micro_batch_size]].to(device)


# ---- The model
def attend(module, q, k, v, mask, dropout=0.0, scaling=None, **_):
    """Causal attention that never builds the mask (T, T): then torch can choose flash attention."""
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


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


def loss_of_rows(hidden, targets):
    """Return the summed cross-entropy of rows of hidden states (rows, width)."""
    logits = model.lm_head(hidden).float()  # (rows, vocabulary)
    return F.cross_entropy(logits, targets, reduction="sum")


def loss_sum(ids):
    """Return the next-token cross-entropy of ids (B, T), summed over B · (T - 1) targets."""
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:].flatten()  # (B·T,); -100: has no target
    hidden = model.transformer(input_ids=ids).last_hidden_state.flatten(0, 1)  # (B·T, width)
    rows = config["loss_chunk_tokens"] or len(hidden)
    if rows >= len(hidden):
        return loss_of_rows(hidden, targets)
    loss = 0  # few rows of logits exist at once; backward computes them again
    for chunk in zip(hidden.split(rows), targets.split(rows), strict=True):
        loss = loss + checkpoint(loss_of_rows, *chunk, use_reentrant=False)
    return loss


# ---- The optimizer, and the scaler
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and layer norms: no decay
decay = config["weight_decay"]
groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=config["learning_rate"], betas=(0.9, 0.95), fused=True)
# FP16 has no numbers for the smallest gradients, so the loss is enlarged. Disabled, it does nothing
scaling = {"init_scale": config["init_scale"], "growth_interval": config["growth_interval"]}
scaler = torch.amp.GradScaler(device, **scaling, enabled=precision == "fp16")

# ---- Training
training_loss = loss_sum if config["compile"] == "off" else torch.compile(loss_sum, dynamic=False)
stream = micro_batches()
losses = torch.zeros(steps, device=device)  # read seldom: the host waits for what it reads
for step in range(steps):
    rate = config["learning_rate"]
    if step < warmup:
        rate = rate * (step + 1) / warmup
    elif config["lr_schedule"] == "cosine":  # down to a tenth
        progress = (step - warmup) / (steps - warmup)
        rate = rate * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = rate
    for _ in range(grad_accum_steps):
        with torch.autocast(device, dtype=amp_dtype, enabled=uses_amp):
            loss = training_loss(next(stream)) / targets_per_step  # of the whole step: sums add up
        scaler.scale(loss).backward()  # adds to the gradients of earlier micro-batches
        losses[step] += loss.detach()
    scaler.unscale_(optimizer)  # what is clipped must be the true gradients
    if config["max_grad_norm"]:
        torch.nn.utils.clip_grad_norm_([*matrices, *vectors], config["max_grad_norm"])
    scaler.step(optimizer)  # skipped if a gradient is inf or NaN
    scaler.update()  # then the scale falls; after many good steps it rises
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0 or step + 1 == steps:
        print(f"step {step + 1}: loss {losses[step]:.4f}")
    if step == 0:  # it allocates, and chooses or compiles kernels: not timed
        start = time.perf_counter()

# ---- What came of it
tokens_per_s = (steps - 1 or math.nan) * config["tokens_per_step"] / (time.perf_counter() - start)
model.eval()  # without dropout
with torch.no_grad(), torch.autocast(device, dtype=amp_dtype, enabled=uses_amp):
    total = sum(float(loss_sum(rows.to(device))) for rows in held_out.split(micro_batch_size))
print(f"{tokens_per_s:,.0f} tokens/s; held-out loss {total / (len(held_out) * (seq_len - 1)):.4f}")
