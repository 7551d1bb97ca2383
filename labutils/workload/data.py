"""Offline text → byte-level BPE → packed, seeded `(B, T)` batches, and a padded variant.

The text is on every machine with Python: CPython's language reference (`pydoc_data.topics`), then
the standard library's source, read only as far as a run needs. It differs between Python versions,
so its hash is in every record.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from labutils.files import runs_dir, write_atomically
from labutils.techniques.loss import IGNORED

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 10  # every tenth block of seq_len tokens is never trained on


class DataError(ValueError):
    """A text that cannot serve as corpus. The message says what to do."""


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
                "which need at least "
                f"{HELD_OUT_EVERY * seq_len}. Use a longer text, a smaller seq_len, or `corpus: "
                "stdlib`."
            )
        blocks = torch.from_numpy(self.ids[: n_blocks * seq_len].astype(np.int64)).view(
            n_blocks, seq_len
        )
        held_out = torch.arange(n_blocks) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return blocks[~held_out], blocks[held_out]


def load_corpus(
    corpus: str = "stdlib",
    *,
    vocab_size: int = 2048,
    min_tokens: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Return the text named by `corpus` ("stdlib" or a path to UTF-8 text) as token ids.

    Without a `tokenizer`, a BPE of at most `vocab_size` entries is trained on the first document (a
    short one yields fewer) and cached under `runs/cache`. "stdlib" is read document by document
    until it has `min_tokens` tokens or ends. Raises DataError for a text that is missing, empty or
    not UTF-8.
    """
    documents = _stdlib_documents() if corpus == "stdlib" else iter([_own_text(Path(corpus))])
    first = next(documents)
    tokenizer = tokenizer or _trained_tokenizer(first, vocab_size)
    digest = hashlib.sha256(tokenizer.to_str().encode())
    ids, n_tokens = [], 0
    for text in itertools.chain([first], documents):
        ids.append(_token_ids(text, tokenizer))
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
            f"{micro_batch_size}. "
            "Use a longer text, or a smaller micro_batch_size or seq_len."
        )
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for start in range(0, len(order) - micro_batch_size + 1, micro_batch_size):
            ids = blocks[order[start : start + micro_batch_size]]
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
    window = []
    for start in range(0, len(lengths), micro_batch_size):
        part = slice(start, start + micro_batch_size)
        labels = ids[part].masked_fill(~mask[part], IGNORED)
        batch = {"input_ids": ids[part], "attention_mask": mask[part].long(), "labels": labels}
        window.append(batch)
    return window


def topic_texts() -> list[str]:
    """Return the chapters of CPython's language reference as plain texts, in alphabetical order of
    their topics.
    """
    try:
        from pydoc_data.topics import topics
    except (
        ImportError
    ):  # a Python packaged without its documentation: the library's source still serves
        return []
    return [topics[name] for name in sorted(topics)]


def _stdlib_documents() -> Iterator[str]:
    """Yield the language reference as one document, then each module of the standard library, in
    sorted order.
    """
    if texts := topic_texts():
        yield "\n\n".join(texts)
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 1000:
                yield text


def _own_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"corpus: no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"corpus: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise DataError(
            f"corpus: cannot read {path}: {error.strerror}; name one text file"
        ) from None
    if not text.strip():
        raise DataError(f"corpus: {path} is empty")
    return text


@lru_cache(maxsize=8)
def _trained_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    key = hashlib.sha256(f"{vocab_size} {text}".encode()).hexdigest()[:16]
    cached = runs_dir() / "cache" / f"bpe-{key}.json"
    # without a cache each process trains it; a run will say what is wrong with runs/
    with suppress(OSError):
        if cached.exists():
            return Tokenizer.from_str(cached.read_text(encoding="utf-8"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    with suppress(OSError):
        write_atomically(cached, tokenizer.to_str().encode())
    return tokenizer


@lru_cache(maxsize=1024)
def _token_ids(text: str, tokenizer: Tokenizer) -> np.ndarray:
    return np.asarray(
        [*tokenizer.encode(text).ids, tokenizer.token_to_id(END_OF_TEXT)], dtype=np.int32
    )


# no warning from processes that fork later
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
