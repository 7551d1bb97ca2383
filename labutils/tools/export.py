"""A config as one script that needs no labutils: the same training, bit for bit on a CPU, in lines
a reader can keep.

`script.txt` holds the script with every technique; a config keeps some of its lines. Behind `#?`
stand facts, all of which must hold (`!` negates one): at the end of a line for that line, on a line
of its own for what follows, up to the next such line. Where a line that opens a block is dropped by
the former, the block moves out.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template

import torch

from labutils.config.cards import CARDS
from labutils.config.choices import (
    ACTIVATIONS,
    ATTENTION,
    CHECKPOINTING,
    COMPILE_MODES,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
)
from labutils.config.resolve import resolve
from labutils.config.schema import Config, ConfigError
from labutils.machine import here
from labutils.techniques import checkpointing, compiling, optimizers
from labutils.techniques.loss import FP16_ENLARGED
from labutils.techniques.optimizers import BLOCK, round_stochastically
from labutils.tools.exportable import require_written
from labutils.workload import data
from labutils.workload.build import HELD_OUT_SEQUENCES, tokens_to_read
from labutils.workload.gpt2 import vocab_size

SCRIPT = Path(__file__).with_name("script.txt")
IMPORTS = """\
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel"""
# characters of a token, on average, with room: a text this many times longer has tokens enough
LONGEST_TOKEN = 8
LIBRARY_TOKENS = 1_000_000  # fewer than Python's library has


def script(config: Config, device_type: str) -> str:
    """Return the source of a script that trains `config` on a `device_type` of "cpu" or "cuda",
    without labutils.

    Each step's loss is that of `run_experiment`, bit for bit on a CPU with as many threads and
    without `compile`. It runs all `steps`, also where `run_experiment` runs fewer because the
    precision is slow; it writes no record and measures no memory. Raises ConfigError for values
    that do not agree on that device, or for `stdlib` if Python's own reference is missing here;
    PrecisionUnsupported if the device is here and lacks the precision.
    """
    is_here = device_type == "cpu" or torch.cuda.is_available()
    card = here.card(torch.device(device_type)) if is_here else CARDS["a100"]
    c = resolve(config, card, to_train=True).config
    require_written(c)
    if c.corpus == "stdlib" and not data.topic_texts():
        raise ConfigError(
            f"{c.name}: `corpus`: this Python came without its reference (pydoc_data); name a text "
            "file"
        )
    template = Template(_keep(SCRIPT.read_text(encoding="utf-8"), _facts(c, device_type)))
    values = _values(c, device_type)
    code = template.substitute(values | {"note": "", "about": "", "imports": ""})
    text = template.substitute(values, imports=_imports(code))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def _facts(c: Config, device_type: str) -> dict[str, bool]:
    """Return what the tags of `script.txt` name."""
    reference = len("\n\n".join(data.topic_texts()))
    stdlib, small = c.corpus == "stdlib", not OPTIMIZERS[c.optimizer].has_implementations
    precision, optimizer = PRECISIONS[c.precision], OPTIMIZERS[c.optimizer]
    policy = CHECKPOINTING[c.gradient_checkpointing]
    return {
        "tf32": precision.tf32,
        "fp16": precision.loss_scale,
        "pure_bf16": precision.weights == "bfloat16",
        "block": policy.repeats and policy.blocks_per_unit == 1,
        "every_n": policy.blocks_per_unit > 1,
        "selective": policy.keeps_products,
        "offload": policy.to_host,
        "cuda": device_type == "cuda",
        "own_text": not stdlib,
        "more_text": stdlib and reference < LONGEST_TOKEN * tokens_to_read(c),
        "one_epoch": stdlib and tokens_to_read(c) < LIBRARY_TOKENS,
        "pretrained": c.weights == "pretrained",
        "pad_vocab": c.pad_vocab,
        "long": c.seq_len > 1024,  # than GPT2Config's own number of positions
        "amp": precision.autocast,
        "half": precision.is_16bit,
        "limited": device_type == "cuda" and c.memory_limit_gib > 0,
        "expandable": device_type == "cuda" and c.expandable_segments,
        "kernel": bool(ATTENTION[c.attention].kernel),
        "attend": _attends(c),
        "chunks": c.loss_chunk_tokens > 0,
        "compiled": COMPILE_MODES[c.compile].is_on,
        "small_adamw": small,
        "bits8": optimizer.moment_bits == 8,
        "bits16": optimizer.moment_bits == 16,
        "in_backward": c.optimizer_in_backward,
        "needs_order": not (small and c.optimizer_in_backward),
        "clears": not c.optimizer_in_backward and (not small or precision.loss_scale),
        "warmup": c.lr_warmup_steps > 0,
        "cosine": c.lr_schedule == "cosine" and c.steps > c.lr_warmup_steps,
        "accumulates": c.grad_accum_steps > 1,
        "drops": c.dropout > 0,
        "clips": c.max_grad_norm > 0,
        "evaluates": c.eval_every > 0,
    }


def _attends(c: Config) -> bool:
    """Return whether the script calls torch's attention itself, and not through transformers."""
    needs_no_mask = c.attention == "auto" and COMPILE_MODES[c.compile].is_on
    return bool(ATTENTION[c.attention].kernel) or needs_no_mask


def _values(c: Config, device_type: str) -> dict[str, object]:
    """Return what the `$names` of `script.txt` stand for: values, and what follows from them."""
    n_entries, eager = vocab_size(c.model), not COMPILE_MODES[c.compile].is_on
    how = ", ".join(
        f"{key}={value}" for key, value in optimizers.IMPLEMENTATIONS[c.optimizer_impl].items()
    )
    attention = [
        op for op in checkpointing.ATTENTION if ("for_cpu" in str(op)) == (device_type == "cpu")
    ]
    kept = [str(op) for op in checkpointing.MATMULS + ([] if c.dropout else attention)]
    compile_arguments = compiling.mode_and_arguments(
        c.compile, device_type, c.grad_accum_steps > 1
    )[1]
    moments = "betas=(0.9, 0.95)" if OPTIMIZERS[c.optimizer].is_adamw else "momentum=0.9"
    note = "".join(letter for letter in " ".join(c.note.split()) if letter.isprintable())
    about = {
        "cpu": f"Each step's loss is that of the run {c.name} of labutils on a CPU with as many "
        "threads"
        + (", bit for bit" if eager else ", but for what the compiler adds up in another order"),
        "cuda": f"The training of the run {c.name} of labutils on a GPU",
    }[device_type]
    if device_type == "cpu" and c.precision not in ("fp32", "tf32"):
        about += " (and goes on where that stops early, because 16 bits are slow)"
    about += "; written by `labutils export`."
    row = MODELS[c.model]
    shape = {"n_layer": row.n_layer, "n_head": row.n_head, "n_embd": row.width}
    shape |= {"vocab_size": -(-n_entries // 64) * 64 if c.pad_vocab else n_entries}
    shape |= {"bos_token_id": 0, "eos_token_id": 0}  # of the tokenizer that the script trains
    return c.model_dump() | {
        "about": textwrap.fill(about, 120, break_on_hyphens=False),
        "vocab_64": -(-n_entries // 64),
        "note": textwrap.fill(f"{c.model}: {note}".translate({92: "/", 34: "'"}), 117),
        "device_type": device_type,
        "grad_accum_steps": c.grad_accum_steps,
        "block": BLOCK,
        "slab": f"1 << {optimizers.NUMBERS_AT_ONCE.bit_length() - 1}",
        "corpus": repr(c.corpus) if {"'", '"'} & set(c.corpus) else f'"{repr(c.corpus)[1:-1]}"',
        "vocab_size": n_entries,
        "min_tokens": tokens_to_read(c),
        "every": data.HELD_OUT_EVERY,
        "every_less_1": data.HELD_OUT_EVERY - 1,
        "held_out_sequences": HELD_OUT_SEQUENCES,
        "kernel": ATTENTION[c.attention].kernel,
        "blocks_per_unit": CHECKPOINTING[c.gradient_checkpointing].blocks_per_unit,
        "on_host": _source(
            checkpointing.on_host,
            "Copy a tensor to the host; return a function that brings it back.",
        ),
        "activation": ACTIVATIONS[c.activation].in_transformers,
        "attention": "causal" if _attends(c) else {"auto": "sdpa"}.get(c.attention, c.attention),
        "use_cache": c.use_cache and c.gradient_checkpointing == "none",
        "to": ".to(DEVICE, dtype=torch.bfloat16)" if c.precision == "pure_bf16" else ".to(DEVICE)",
        "shape": json.dumps(shape),
        "kept": f"[{', '.join(kept)}]"
        if c.dropout
        else "".join(["[\n", *(f"    {op},\n" for op in kept), "]"]),
        "dtype": f"torch.{PRECISIONS[c.precision].products}",
        "enlarged": FP16_ENLARGED,
        "compile_options": "".join(
            f", {key}={value!r}".replace("'", '"') for key, value in compile_arguments.items()
        ),
        "round_stochastically": _source(
            round_stochastically,
            "Return float32 x as bfloat16, up or down by chance: right on average.",
        ),
        "optimizer": "torch.optim.SGD" if c.optimizer == "sgd" else "torch.optim.AdamW",
        "optimizer_options": f"{moments}, {how}",
        "loss": "loss_sum" if eager else "compiled_loss",
        "sequences": "GRAD_ACCUM_STEPS * MICRO_BATCH_SIZE"
        if c.grad_accum_steps > 1
        else "MICRO_BATCH_SIZE",
    }


def _keep(text: str, facts: Mapping[str, bool]) -> str:
    """Return the lines of `text` whose tags hold, without the tags."""
    # the last: indents of the dropped lines that opened a block
    kept, section, moved_out = (
        [],
        True,
        [],
    )
    for tagged in text.splitlines():
        line, tag, words = (part.rstrip() for part in tagged.partition("#?"))
        holds = all(facts[word.removeprefix("!")] != word.startswith("!") for word in words.split())
        if tag and not line:
            section = holds
        elif section:
            indent = len(line) - len(line.lstrip())
            while moved_out and line and indent <= moved_out[-1]:
                moved_out.pop()
            if holds:
                kept.append(line[4 * len(moved_out) :])
            elif re.search(r":(  #.*)?$", line):
                moved_out.append(indent)
    return "\n".join(kept)


def _source(function: Callable, docstring: str) -> str:
    """Return a function's own source with a shorter docstring: what is tricky exists once."""
    lines = inspect.getsource(function).splitlines()
    old = ast.parse("\n".join(lines)).body[0].body[0]
    return "\n".join([*lines[: old.lineno - 1], f'    """{docstring}"""', *lines[old.end_lineno :]])


def _imports(code: str) -> str:
    """Return the imports of names that `code` uses."""
    kept = []
    for line in IMPORTS.splitlines():
        start, keyword, names = line.rpartition("import ")
        aliases = [(name, name.rpartition(" ")[2]) for name in names.split(", ") if name]
        used = [name for name, alias in aliases if re.search(rf"(?<![\w.]){alias}[.(,)\[]", code)]
        if used or not line:
            kept.append(start + keyword + ", ".join(used))
    return "\n".join(kept)
