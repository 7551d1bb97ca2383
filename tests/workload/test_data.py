from itertools import islice

import pytest
import torch

import labutils as lab
from labutils.workload import data
from labutils.workload.data import DataError


def test_stdlib_corpus_is_text_and_its_digest_is_stable_and_knows_the_tokenizer():
    corpus = lab.load_corpus(min_tokens=1000)
    assert corpus.ids.max() < 2048
    assert "statement" in corpus.tokenizer.decode(corpus.ids[:200].tolist())
    small = lab.load_corpus(min_tokens=1000, vocab_size=300)
    assert small.tokenizer.get_vocab_size() == 300
    assert small.digest != corpus.digest == lab.load_corpus(min_tokens=1000).digest


def test_a_corpus_grows_by_documents_until_it_has_enough():
    small = lab.load_corpus(min_tokens=1)
    large = lab.load_corpus(min_tokens=len(small.ids) + 1)
    assert (large.ids[: len(small.ids)] == small.ids).all() and large.digest != small.digest
    end = small.tokenizer.token_to_id("<|endoftext|>")
    assert small.ids[-1] == large.ids[-1] == end and (large.ids == end).sum() == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a".encode("utf-16"), "is UTF-16; save it as UTF-8 text"),
        (b"\xfe\xff\0a", "is UTF-16; save it as UTF-8 text"),
        ("a".encode("utf-16-le"), "is not text .*; name one UTF-8 text file"),
        ("ä".encode("latin-1"), r"is not UTF-8 \(byte 0xe4\); save it"),
        (b"", "is empty; name one UTF-8 text file"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"only a few words here", "too short for sequences of 64"),
    ],
)
def test_an_unusable_text_is_a_clear_error(tmp_path, content, expected):
    path = tmp_path / "x.txt"
    with pytest.raises(DataError, match=r"cannot be read .*No such file"):
        lab.load_corpus(str(path))
    path.write_bytes(content)
    with pytest.raises(DataError, match=expected):
        lab.load_corpus(str(path)).split(64)


def test_an_own_text_is_read_as_far_as_a_run_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 100)
    path, lines = tmp_path / "x.txt", [f"{n} is the number of this line\n" for n in range(1000)]
    path.write_bytes("".join(lines).encode() + b"\xff")  # where it is not read, it may be damaged
    some = lab.load_corpus(str(path), min_tokens=200)
    assert 200 <= len(some.ids) < 300
    read = some.tokenizer.decode(some.ids.tolist())
    assert "".join(lines).startswith(read) and read.endswith("\n")  # pieces end with a line
    with pytest.raises(DataError, match="byte 0xff"):
        lab.load_corpus(str(path), min_tokens=10**6)
    path.write_text("x" * 1000)  # a line without an end
    assert len(lab.load_corpus(str(path), min_tokens=1, vocab_size=257).ids) == 200
    path.write_text("".join(lines))
    whole = lab.load_corpus(str(path), min_tokens=10**6)
    end = whole.tokenizer.token_to_id("<|endoftext|>")
    assert whole.ids[-1] == end and (whole.ids == end).sum() == 1
    assert (whole.ids[: len(some.ids)] == some.ids).all()


def test_a_text_that_is_one_word_is_learned_in_pieces(tmp_path):
    path = tmp_path / "x.txt"
    for character in "a7=":
        path.write_text(character * 200_000)
        assert len(lab.load_corpus(str(path)).ids) > 200_000 / 1000
    random = torch.randint(4, (100_000,), generator=torch.Generator().manual_seed(0))
    path.write_text("".join("ACGT"[i] for i in random.tolist()))
    assert len(lab.load_corpus(str(path)).ids) < 100_000 / 4


def test_an_ordinary_text_is_learned_as_a_whole():
    """So its tokens are those of earlier records."""
    documents = islice(data._stdlib_documents(), 100)
    assert all(data.LONG_WORD.split(document) == [document] for document in documents)
    # long without a space, yet many words
    sentences = "深度学习是机器学习的分支。" * 200 + "a1" * 2000
    assert data.LONG_WORD.split(sentences) == [sentences]


def test_fewer_sequences_than_a_micro_batch_are_a_clear_error():
    with pytest.raises(DataError, match="fewer than micro_batch_size"):
        next(lab.batches(torch.zeros(2, 8), 3, 0))
