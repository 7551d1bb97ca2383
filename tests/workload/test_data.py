from __future__ import annotations

from itertools import islice

import pytest
import torch

import labutils as lab
from labutils.workload.data import DataError


def test_stdlib_corpus_is_text_and_its_digest_is_stable():
    corpus = lab.load_corpus(min_tokens=1000)
    assert corpus.ids.max() < 2048
    assert "statement" in corpus.tokenizer.decode(corpus.ids[:200].tolist())
    assert corpus.digest == lab.load_corpus(min_tokens=1000).digest
    assert corpus.digest != lab.load_corpus(min_tokens=len(corpus.ids) + 1).digest


def test_corpus_grows_until_it_has_enough():
    small, large = lab.load_corpus(min_tokens=1), lab.load_corpus(min_tokens=200_000)
    assert len(large.ids) >= 200_000
    assert (large.ids[: len(small.ids)] == small.ids).all()


def test_batches_are_packed_and_seeded():
    blocks, _ = lab.load_corpus().split(32)
    first, again, other = (list(islice(lab.batches(blocks, 4, seed), 3)) for seed in (0, 0, 1))
    assert first[0]["input_ids"].shape == (4, 32)
    assert first[0]["input_ids"].dtype == torch.int64
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True)
    )
    assert not torch.equal(first[0]["input_ids"], other[0]["input_ids"])


def test_an_epoch_sees_every_block_once():
    blocks = torch.arange(12).view(12, 1)
    epoch = torch.cat([b["input_ids"] for b in islice(lab.batches(blocks, 3, 0), 4)])
    assert sorted(epoch.flatten().tolist()) == list(range(12))


def test_held_out_blocks_are_never_trained_on():
    corpus = lab.load_corpus()
    train, held_out = corpus.split(64)
    assert len(train) + len(held_out) == len(corpus.ids) // 64
    assert len(held_out) == (len(corpus.ids) // 64) // 10
    rebuilt = torch.cat([train[:9], held_out[:1]]).flatten()
    assert torch.equal(rebuilt, torch.from_numpy(corpus.ids[:640]).long())


def test_documents_are_told_apart_by_an_end_of_text_token():
    one = lab.load_corpus(min_tokens=1)
    more = lab.load_corpus(min_tokens=len(one.ids) + 1)
    end = one.tokenizer.token_to_id("<|endoftext|>")
    assert one.ids[-1] == end
    assert (more.ids == end).sum() == 2


def test_digest_and_cache_know_the_tokenizer():
    small, large = (lab.load_corpus(min_tokens=1, vocab_size=n) for n in (300, 2048))
    assert (small.tokenizer.get_vocab_size(), large.tokenizer.get_vocab_size()) == (300, 2048)
    assert small.digest != large.digest


def test_own_text_works(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("Zwölf Boxkämpfer jagen Viktor. 你好。 " * 400, encoding="utf-8")
    blocks, held_out = lab.load_corpus(str(text)).split(16)
    assert len(blocks) and len(held_out)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"\xff\xfe\x00a", "not UTF-8"),
    ],
)
def test_unusable_text_is_a_clear_error(tmp_path, content, expected):
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=expected):
        lab.load_corpus(str(path))


def test_short_text_is_a_clear_error(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("only a few words here")
    with pytest.raises(DataError, match="too short for sequences of 64"):
        lab.load_corpus(str(path)).split(64)
    with pytest.raises(DataError, match="fewer than micro_batch_size"):
        next(lab.batches(torch.zeros(2, 8), 3, 0))
    with pytest.raises(DataError, match=r"folder|directory|cannot read"):
        lab.load_corpus(str(tmp_path))
