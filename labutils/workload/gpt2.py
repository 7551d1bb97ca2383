"""GPT-2 in five sizes, with random or pretrained weights."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from labutils.config.choices import ACTIVATIONS, CHECKPOINTING, MODELS, WEIGHTS, Model
from labutils.techniques import checkpointing
from labutils.techniques.attention import use_attention


class WeightsUnavailable(RuntimeError):
    """Pretrained weights are neither cached nor reachable. The message names the ways out."""


def vocab_size(model: str) -> int:
    """Return the number of rows of the embedding of the named size."""
    return MODELS[model].vocabulary


def build_model(
    model: str | Model = "gpt2-nano",
    *,
    seq_len: int = 1024,
    seed: int = 0,
    weights: str = "random",
    dropout: float = 0.1,
    activation: str = "gelu_new",
    use_cache: bool = False,
    attention: str = "auto",
    pad_vocab: bool = False,
    gradient_checkpointing: str = "none",
    n_layer: int | None = None,
) -> nn.Module:
    """Return Hugging Face's GPT-2 of a named size, float32, on the CPU, in training mode.

    A row of one's own in place of a name builds any other size.

    Input and output embedding are one tensor (tied). Random weights are drawn from `seed` and touch
    no network; positions beyond 1024 are allowed. `n_layer` builds another depth than the named
    one, with random weights. `gradient_checkpointing` is a policy: see
    `CheckpointedBlocks`; `attention` a kernel: see `use_attention`.
    Raises ValueError for an unknown name, and WeightsUnavailable, within seconds, if pretrained
    weights cannot be had.
    """
    row = model if isinstance(model, Model) else MODELS[model]
    policy = CHECKPOINTING[gradient_checkpointing]
    switches = {
        "activation_function": ACTIVATIONS[activation].in_transformers,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "use_cache": use_cache and not policy.is_on,  # a block computed again would write it twice
    }
    torch.manual_seed(seed)
    if WEIGHTS[weights].name == "pretrained":
        built = _pretrained(row.name, switches)
    else:
        built = _random(row, n_layer, seq_len, pad_vocab, switches)
    if policy.is_on:
        checkpointing.set_checkpointing(built, policy.name)
    use_attention(built, attention)
    return built.train()  # from_pretrained returns eval(), which switches dropout off silently


# The keys of a config that `build_model` takes: a new switch of the model is one more argument.
MODEL_KEYS = [key for key in inspect.signature(build_model).parameters if key != "n_layer"]


def _random(
    row: Model, n_layer: int | None, seq_len: int, pad_vocab: bool, switches: dict[str, Any]
) -> nn.Module:
    GPT2Config, GPT2LMHeadModel = _transformers()
    padded = -(-row.vocabulary // 64) * 64
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=n_layer or row.n_layer,
            n_head=row.n_head,
            n_embd=row.width,
            vocab_size=padded if pad_vocab else row.vocabulary,
            n_positions=max(seq_len, 1024),
            bos_token_id=0,
            eos_token_id=0,
            **switches,
        )
    )


def _transformers() -> tuple[type, type]:
    """Return Hugging Face's GPT2Config and GPT2LMHeadModel, imported without the warnings meant for
    others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a progress bar without ipywidgets, say
        from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2Config, GPT2LMHeadModel


def _pretrained(model: str, shape: dict) -> nn.Module:
    """Return the hub's weights, from the cache or, if the hub answers, over the network."""
    offline = _require_hub_or_cache(model, "model.safetensors")
    try:
        return _transformers()[1].from_pretrained(
            f"openai-community/{model}", local_files_only=offline, dtype=torch.float32, **shape
        )
    except OSError as error:
        raise WeightsUnavailable(
            f"weights: pretrained: {error}. Way out: weights: random"
        ) from error


def pretrained_tokenizer(model: str) -> Tokenizer:
    """Return GPT-2's own tokenizer (50257 entries), from the cache or the hub.

    Raises WeightsUnavailable.
    """
    from huggingface_hub import hf_hub_download

    offline = _require_hub_or_cache(model, "tokenizer.json")
    try:
        path = hf_hub_download(
            f"openai-community/{model}", "tokenizer.json", local_files_only=offline
        )
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        raise WeightsUnavailable(
            f"weights: pretrained: {error}. Way out: weights: random"
        ) from error
    return Tokenizer.from_file(path)


def _require_hub_or_cache(model: str, file: str) -> bool:
    """Return True if cached, False if the hub offers the file within four seconds; else raise
    WeightsUnavailable.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    repository = f"openai-community/{model}"
    if isinstance(try_to_load_from_cache(repository, file), str):
        return True
    # The time limit is a thread's: the client's own does not end a name look-up that hangs, nor its
    # repeated attempts.
    asked = Future()
    threading.Thread(
        target=_settle,
        args=(asked, lambda: get_hf_file_metadata(hf_hub_url(repository, file), timeout=3)),
        daemon=True,
    ).start()
    try:
        asked.result(timeout=4)
    except Exception as error:
        raise WeightsUnavailable(
            f"weights: pretrained needs {repository}, which is not in the local cache, and the "
            "model hub cannot be "
            f"used ({type(error).__name__}). Ways out: `weights: random` (the default, no "
            "download); run once with a "
            "connection, and the weights are cached; or copy a filled cache and point HF_HOME at "
            "it."
        ) from error
    return False


def _settle(future: Future, work: Callable[[], object]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
