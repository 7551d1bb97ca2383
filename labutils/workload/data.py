"""Offline text → byte-level BPE → packed, seeded `(B, T)` batches, and a padded variant.

The text is on every machine with Python: CPython's language reference (`pydoc_data.topics`), then
the standard library's source, read only as far as a run needs. It differs between Python versions,
so its hash is in every record. GPT-2's own tokenizer and weights are fetched here too, if asked.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from labutils.config.choices import MODELS
from labutils.config.schema import Config
from labutils.techniques.loss import IGNORED

END_OF_TEXT = "<|endoftext|>"
# A run of letters, of digits, of signs or of spaces is one word to a tokenizer, which learns from a
# word in a time that grows with its length squared. So it learns from pieces of very long ones.
LONG_WORD = re.compile(r"([^\W\d_]{1000}|\d{1000}|(?:[^\w\s]|_){1000}|\s{1000})")
PIECE = 2**20  # characters of an own text that are read at a time; the first ones make its tokens
HELD_OUT_EVERY = 10  # every tenth block of seq_len tokens is never trained on
HELD_OUT_SEQUENCES = 16  # the same ones, whatever the batch


class DataError(ValueError):
    """A text that cannot serve as corpus. The message says what to do."""


class WeightsUnavailable(RuntimeError):
    """Pretrained weights are neither cached nor reachable. The message names the ways out."""


@dataclass(frozen=True)
class Corpus:
    """Tokenized text: `ids` (n_tokens,) int32, its tokenizer, and a hash of both."""

    ids: np.ndarray
    tokenizer: Tokenizer
    digest: str

    def split(self, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (training, held-out) blocks, each `(n_blocks, seq_len)` int64; every tenth block
        is held out.

        Raises DataError if there is not one block of each.
        """
        n_blocks = len(self.ids) // seq_len
        if n_blocks < HELD_OUT_EVERY:
            raise DataError(
                f"the corpus has {len(self.ids)} tokens: too short for sequences of {seq_len}, "
                f"which need {HELD_OUT_EVERY * seq_len}. Use a longer text (or one that repeats "
                "itself less), a smaller seq_len, or `corpus: stdlib`."
            )
        ids = torch.from_numpy(self.ids[: n_blocks * seq_len].astype(np.int64))
        blocks = ids.view(n_blocks, seq_len)
        held_out = torch.arange(n_blocks) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return blocks[~held_out], blocks[held_out]


@dataclass
class Data:
    """Text as batches. `batches` never ends; both kinds are dicts of tensors on the CPU."""

    batches: Iterator[dict[str, torch.Tensor]]  # micro-batches to train on
    held_out: list[dict[str, torch.Tensor]]  # micro-batches to evaluate on
    corpus: Corpus
    micro_batches_per_epoch: int


def build_data(config: Config) -> Data:
    """Return a resolved config's text as batches, with enough of it for its steps if there is."""
    trained = config.steps * config.tokens_per_step
    # one block of ten is not trained on; `min_tokens` adds ten, since the last ten may be cut short
    with_held_out = trained * HELD_OUT_EVERY // (HELD_OUT_EVERY - 1)
    tokenizer = None
    if config.weights == "pretrained":
        tokenizer = Tokenizer.from_file(str(hub_folder(config.model) / "tokenizer.json"))
    corpus = load_corpus(
        config.corpus,
        vocab_size=MODELS[config.model].vocabulary,
        min_tokens=with_held_out + config.seq_len * HELD_OUT_EVERY,
        tokenizer=tokenizer,
    )
    blocks, held_out = corpus.split(config.seq_len)
    # Not the config's seed: runs that differ in it are evaluated on the same text.
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
    evaluation = held_out[order[:HELD_OUT_SEQUENCES]].split(config.micro_batch_size)
    return Data(
        batches=batches(blocks, config.micro_batch_size, config.seed),
        held_out=[{"input_ids": ids, "labels": ids} for ids in evaluation],
        corpus=corpus,
        micro_batches_per_epoch=len(blocks) // config.micro_batch_size,
    )


@cache
def hub_folder(model: str) -> Path:
    """Return the folder with GPT-2's own weights and tokenizer, from the model hub or its cache.

    Raises WeightsUnavailable, within seconds, if they cannot be had.
    """
    from huggingface_hub import get_session, hf_hub_url, snapshot_download, try_to_load_from_cache

    repository, largest = f"openai-community/{model}", "model.safetensors"
    cached = try_to_load_from_cache(repository, largest)
    if isinstance(cached, str):
        return Path(cached).parent
    try:
        get_session().head(hf_hub_url(repository, largest), timeout=4)  # else it tries for minutes
        files = ["config.json", largest, "tokenizer.json"]
        return Path(snapshot_download(repository, allow_patterns=files))
    except Exception as error:  # of the network library's own kinds
        raise WeightsUnavailable(
            f"weights: pretrained needs {repository}, which is not in the local cache, and the "
            f"model hub cannot be used ({error}). Ways out: `weights: random` (no download); run "
            "once with a connection; or copy a filled cache and point HF_HOME at it."
        ) from error


def load_corpus(
    corpus: str = "stdlib",
    *,
    vocab_size: int = 2048,
    min_tokens: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Return the text named by `corpus` ("stdlib" or a path to UTF-8 text) as token ids.

    Without a `tokenizer`, a BPE of at most `vocab_size` entries is trained on the first document,
    or the first PIECE of a file (a short one yields fewer), in a second or two. The text is read
    part by part until it has `min_tokens` tokens or ends. Raises DataError for a text that is
    missing, empty or not UTF-8.
    """
    if corpus == "stdlib":
        parts = ((document, END_OF_TEXT) for document in _stdlib_documents())
    else:
        parts = _own_text(Path(corpus))
    first = next(parts)
    if not first[0]:
        raise DataError(f"corpus: {corpus} is empty; name one UTF-8 text file")
    tokenizer = tokenizer or _trained_tokenizer(first[0], vocab_size)
    digest = hashlib.sha256(tokenizer.to_str().encode())
    ids, n_tokens = [], 0
    for text, end in itertools.chain([first], parts):
        ids.append(_token_ids(text, tokenizer, end))
        digest.update(text.encode())
        n_tokens += len(ids[-1])
        if n_tokens >= min_tokens:
            break
    return Corpus(np.concatenate(ids), tokenizer, digest.hexdigest()[:12])


def sequences(length: int, min_tokens: int = 20_000) -> torch.Tensor:
    """Return training sequences of the offline text: `(n, length)` int64 token ids, on the CPU.

    The text has at least `min_tokens` tokens. Sequences that are held out are not among them.
    """
    train, _ = load_corpus(min_tokens=min_tokens).split(length)
    return train


def batches(
    blocks: torch.Tensor, micro_batch_size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield packed micro-batches for ever: `input_ids` and `labels`, both `(micro_batch_size,
    seq_len)` int64.

    `blocks` is `(n_blocks, seq_len)`. Each epoch is a new seeded order; the tail that fills no
    batch is left out. Labels equal inputs: the loss shifts them by one position, so a sequence has
    seq_len - 1 targets. Raises DataError if there are fewer blocks than `micro_batch_size`.
    """
    if len(blocks) < micro_batch_size:
        raise DataError(
            f"the corpus has {len(blocks)} training sequences, fewer than micro_batch_size = "
            f"{micro_batch_size}. Use a longer text, or a smaller micro_batch_size or seq_len."
        )
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        full = len(order) // micro_batch_size * micro_batch_size
        for chosen in order[:full].split(micro_batch_size):
            ids = blocks[chosen]
            yield {"input_ids": ids, "labels": ids}


def padded_window(
    blocks: torch.Tensor, lengths: list[int], micro_batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """Return a window of sequences of given lengths, each padded to T on the right.

    `blocks` is `(n_blocks, T)` token ids; sequence i is the first `lengths[i]` tokens of block i.
    Each micro-batch has `input_ids`, `attention_mask` and `labels`, all `(micro_batch_size, T)`
    int64; labels of padding are -100. Raises ValueError for lengths that the blocks do not have.
    """
    n_blocks, seq_len = blocks.shape
    if len(lengths) > n_blocks or min(lengths) < 1 or max(lengths) > seq_len:
        raise ValueError(f"lengths are 1 to {seq_len}, at most {n_blocks} of them; got {lengths}")
    ids = blocks[: len(lengths)]  # (B, T)
    positions = torch.arange(seq_len, device=blocks.device)
    mask = positions < torch.tensor(lengths, device=blocks.device)[:, None]
    labels = ids.masked_fill(~mask, IGNORED)
    names = "input_ids", "attention_mask", "labels"
    parts = [tensor.split(micro_batch_size) for tensor in (ids, mask.long(), labels)]
    return [dict(zip(names, batch, strict=True)) for batch in zip(*parts, strict=True)]


def _stdlib_documents() -> Iterator[str]:
    """Yield the language reference as one document, its topics in alphabetical order, then each
    module of the standard library, in sorted order.
    """
    with suppress(ImportError):  # a Python packaged without its documentation
        from pydoc_data.topics import topics

        yield "\n\n".join(topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_path("stdlib"))
    # pydoc_data has the topics of above once more; tests are left out, likely since a packaged
    # Python may lack them
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 1000:
                yield text


def _own_text(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (piece, "") for the pieces of a file, which end with a line; then ("", END_OF_TEXT)."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            while piece := file.read(PIECE) + file.readline(PIECE):  # a line may be endless, too
                if "\0" in piece:
                    message = f"corpus: {path} is not text (it has NUL characters)"
                    raise DataError(f"{message}; name one UTF-8 text file")
                yield piece, ""
        yield "", END_OF_TEXT
    except UnicodeDecodeError as error:
        is_utf_16 = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        kind = "UTF-16" if is_utf_16 else f"not UTF-8 (byte {error.object[error.start]:#x})"
        raise DataError(f"corpus: {path} is {kind}; save it as UTF-8 text") from None
    except OSError as error:
        message = f"corpus: {path} cannot be read ({error}); name one UTF-8 text file"
        raise DataError(message) from None


@lru_cache(maxsize=8)
def _trained_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # all 256 bytes: what is not in the text it learns from would vanish from later text
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LONG_WORD.split(text), trainer)
    return tokenizer


@lru_cache(maxsize=1024)
def _token_ids(text: str, tokenizer: Tokenizer, end: str) -> np.ndarray:
    return np.asarray(tokenizer.encode(text).ids + tokenizer.encode(end).ids, dtype=np.int32)


# no warning from processes that fork later
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
