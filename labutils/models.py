"""Build GPT-2 in five sizes, with random or pretrained weights; its loss and its FLOPs."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from labutils import checkpointing
from labutils.data import IGNORED

GPT2_VOCAB = 50257
FP16_ENLARGED = 64.0
SIZES = {  # layers, heads, width, vocabulary
    "gpt2-nano": (4, 4, 128, 2048),
    "gpt2": (12, 12, 768, GPT2_VOCAB),
    "gpt2-medium": (24, 16, 1024, GPT2_VOCAB),
    "gpt2-large": (36, 20, 1280, GPT2_VOCAB),
    "gpt2-xl": (48, 25, 1600, GPT2_VOCAB),
}
SDPA_KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
ACTIVATIONS = {"gelu_new": "gelu_new", "gelu_tanh": "gelu_pytorch_tanh"}


class WeightsUnavailable(RuntimeError):
    """Pretrained weights are neither cached nor reachable. The message names the ways out."""


def vocab_size(model: str) -> int:
    """Return the number of rows of the embedding of the named size."""
    return SIZES[model][3]


def build_model(
    model: str = "gpt2-nano",
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
    """Return Hugging Face's GPT-2 of the named size, float32, on the CPU, in training mode.

    Input and output embedding are one tensor (tied). Random weights are drawn from `seed` and touch no network;
    positions beyond 1024 are allowed. Pretrained ones raise WeightsUnavailable within seconds if they cannot be had.
    `gradient_checkpointing="block"` keeps each block's input only and computes the block again in the backward pass;
    `every_2` and so on do so for units of two blocks or more; `selective` and `offload`: see `checkpointing.Units`.
    `attention`: see `use_attention`. `n_layer` builds another depth than the named one, with random weights.
    """
    GPT2Config, GPT2LMHeadModel = _transformers()
    own_layers, n_head, n_embd, vocab = SIZES[model]
    vocab = -(-vocab // 64) * 64 if pad_vocab else vocab
    shape = {
        "activation_function": ACTIVATIONS[activation],
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "use_cache": use_cache and gradient_checkpointing == "none",  # a block computed again would write it twice
    }
    torch.manual_seed(seed)
    if weights == "pretrained":
        built = _pretrained(model, shape)
    else:
        built = GPT2LMHeadModel(
            GPT2Config(
                n_layer=n_layer or own_layers,
                n_head=n_head,
                n_embd=n_embd,
                vocab_size=vocab,
                n_positions=max(seq_len, 1024),
                bos_token_id=0,
                eos_token_id=0,
                **shape,
            )
        )
    if gradient_checkpointing != "none":
        blocks = built.transformer.h
        built.transformer.h = checkpointing.Units(blocks, gradient_checkpointing, built.config.attn_pdrop)
    use_attention(built, attention)
    return built.train()  # from_pretrained returns eval(), which switches dropout off silently


def _transformers() -> tuple[type, type]:
    """Return Hugging Face's GPT2Config and GPT2LMHeadModel, imported without the warnings meant for others."""
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
        raise WeightsUnavailable(f"weights: pretrained: {error}. Way out: weights: random") from error


def pretrained_tokenizer(model: str) -> Tokenizer:
    """Return GPT-2's own tokenizer (50257 entries), from the cache or the hub. Raises WeightsUnavailable."""
    from huggingface_hub import hf_hub_download

    offline = _require_hub_or_cache(model, "tokenizer.json")
    try:
        path = hf_hub_download(f"openai-community/{model}", "tokenizer.json", local_files_only=offline)
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        raise WeightsUnavailable(f"weights: pretrained: {error}. Way out: weights: random") from error
    return Tokenizer.from_file(path)


def _require_hub_or_cache(model: str, file: str) -> bool:
    """Return True if cached, False if the hub offers the file within four seconds; else raise WeightsUnavailable."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    repository = f"openai-community/{model}"
    if isinstance(try_to_load_from_cache(repository, file), str):
        return True
    # The time limit is a thread's: the client's own does not end a name look-up that hangs, nor its repeated attempts.
    asked = Future()
    threading.Thread(
        target=_settle, args=(asked, lambda: get_hf_file_metadata(hf_hub_url(repository, file), timeout=3)), daemon=True
    ).start()
    try:
        asked.result(timeout=4)
    except Exception as error:
        raise WeightsUnavailable(
            f"weights: pretrained needs {repository}, which is not in the local cache, and the model hub cannot be "
            f"used ({type(error).__name__}). Ways out: `weights: random` (the default, no download); run once with a "
            "connection, and the weights are cached; or copy a filled cache and point HF_HOME at it."
        ) from error
    return False


def _settle(future: Future, work: Callable[[], object]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def use_attention(model: nn.Module, kind: str) -> None:
    """Choose how a Hugging Face model attends; without padding no causal mask exists as a tensor, but in `eager`.

    `eager` is Hugging Face's own, with (T, T) matrices and mask; `sdpa` its own call of fused kernels. The others call
    torch's scaled_dot_product_attention here: its `math`, memory-`efficient` or `flash` kernel, which raises
    RuntimeError where it does not exist, or the one that torch prefers (`auto`). Under a tracer (torch.compile, or on
    fake tensors) transformers' `sdpa` builds the mask as a tensor, which rules flash attention out; and before every
    eager step it looks for packed sequences on the device, for which the CPU waits.
    """
    from transformers import AttentionInterface

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
        with nullcontext() if kind == "auto" else sdpa_kernel(SDPA_KERNELS[kind]):
            out = F.scaled_dot_product_attention(
                query,  # (B, heads, T, width of a head)
                key,
                value,
                attention_mask,
                dropout_p=dropout,
                is_causal=attention_mask is None and query.shape[2] > 1,
                scale=scaling,
            )
        return out.transpose(1, 2).contiguous(), None

    def with_4d_mask(module, args, inputs):
        """Join padding (B, T) and causality as (B, 1, T, T), True where a position may be read; none without padding.

        transformers hands a 4-D mask on as it is, and for an attention without a mask function builds none of its own.
        """
        padding = inputs.get("attention_mask")
        if padding is not None and padding.ndim == 2 and module.config._attn_implementation == name:
            keys = padding.shape[1]
            given = next(t for t in (*args, inputs.get("input_ids"), inputs.get("inputs_embeds")) if t is not None)
            queries = keys if inputs.get("past_key_values") is None else given.shape[1]
            causal = torch.ones(keys, keys, dtype=torch.bool, device=padding.device).tril()[-queries:]
            inputs["attention_mask"] = causal & padding.bool()[:, None, None, :]
        return args, inputs

    name = kind if kind in ("eager", "sdpa") else f"labutils_{kind}"
    if name != kind:
        AttentionInterface.register(name, attend)
        model.base_model.register_forward_pre_hook(with_4d_mask, with_kwargs=True)
    model.config._attn_implementation = name


def lm_loss_sum(model: nn.Module, batch: dict[str, torch.Tensor], chunk_tokens: int = 0) -> torch.Tensor:
    """Return the next-token cross-entropy, *summed* over the targets of a `(B, T)` batch: a float32 scalar.

    Labels are shifted here: position t is scored on token t + 1. A sum, not a mean, so that micro-batches of unequal
    lengths can be added and divided once by the total number of targets (transformers pull request 34191).
    With `chunk_tokens`, at most so many rows of logits exist at a time: see `ChunkedLoss`.
    """
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch.get("attention_mask")}
    targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()  # (B·T,); the last position has none
    if not chunk_tokens:
        return _loss_of_logits(model(**inputs).logits.flatten(0, 1), targets)
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)  # (B·T, width)

    if torch.is_grad_enabled():
        return ChunkedLoss.apply(hidden, model.lm_head.weight, targets, chunk_tokens)
    pieces = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return sum(_loss_of_logits(model.lm_head(rows), some_targets) for rows, some_targets in pieces)


class ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of `hidden @ weight.T`, in chunks of rows whose logits die before the next are computed.

    The derivative of a row's loss by its logits is softmax minus one-hot: known as soon as the logits are. So each
    chunk's gradients are computed at once, in the forward pass, and nothing is computed twice; backward multiplies
    them by the derivative of what became of the loss. Kept in between are (N, width) and (vocabulary, width) numbers,
    not (N, vocabulary). In FP16 the gradients by logits are enlarged by a constant, or small ones would be lost before
    any loss scale comes. The idea is that of Liger Kernel's fused linear cross-entropy (Hsu et al. 2024, 2410.10989).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_tokens):
        device, needs_weight = hidden.device.type, ctx.needs_input_grad[1]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.enlarged = FP16_ENLARGED if dtype == torch.float16 else 1.0
        with torch.autocast(device, enabled=False):
            x, w = hidden.to(dtype), weight.to(dtype)
            d_hidden, d_weight = torch.empty_like(x), torch.zeros_like(weight) if needs_weight else None
            loss = torch.zeros((), device=hidden.device)
            pieces = (tensor.split(chunk_tokens) for tensor in (x, targets, d_hidden))
            for rows, some_targets, d_rows in zip(*pieces, strict=True):
                valid = some_targets != IGNORED
                at = some_targets.clamp(min=0)[:, None]
                logits = (rows @ w.T).float()  # (rows, vocabulary)
                picked, largest = logits.gather(1, at), logits.amax(dim=1, keepdim=True)
                exponentials = logits.sub_(largest).exp_()  # in place: one such buffer is enough
                total = exponentials.sum(dim=1, keepdim=True)
                loss += ((total.log() + largest - picked)[:, 0] * valid).sum()
                softmax = exponentials.div_(total)
                d_logits = softmax.scatter_add_(1, at, torch.full_like(total, -1.0)).mul_(ctx.enlarged * valid[:, None])
                d_logits = d_logits.to(dtype)
                del logits, exponentials, softmax
                d_rows.copy_(d_logits @ w)
                if needs_weight:
                    d_weight += (d_logits.T @ rows).to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.hidden_dtype = hidden.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        d_hidden, d_weight = ctx.saved_tensors
        gradient = gradient / ctx.enlarged
        d_weight = d_weight.mul_(gradient) if d_weight is not None else None
        return d_hidden.to(ctx.hidden_dtype).mul_(gradient), d_weight, None, None


def _loss_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def count_targets(batch: dict[str, torch.Tensor]) -> int:
    """Return the number of shifted target tokens in a `(B, T)` batch: what `lm_loss_sum` sums over."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return the model FLOPs of one training step (forward and backward) per token: 6·N + 12·L·d·T.

    N counts parameters without position embeddings. Kaplan et al. 2020 (2001.08361), PaLM appendix B (2204.02311).
    Recomputation is not counted, nor is what the optimizer does.
    """
    config = model.config
    n_params = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    return 6.0 * n_params + 12.0 * config.n_layer * config.n_embd * seq_len


os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
