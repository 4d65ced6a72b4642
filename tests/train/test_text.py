"""The corpus, the tokenizers, and batches that depend on seed and step alone."""

import argparse

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import k3_teach as k3
from k3_teach.train.text import BLOCK, BPE, Bytes, Data, corpus, load_tokenizer


@pytest.fixture(scope="module")
def topics():
    return corpus()


@pytest.fixture(scope="module")
def bpe(topics):
    return BPE.train(topics, 400)


def test_topics_is_a_manual_without_repetitions(topics):
    from pydoc_data.topics import topics as pages
    assert 250_000 < len(topics) < 0.95 * sum(map(len, pages.values()))
    paragraphs = [" ".join(p.split()) for p in topics.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert "execution of a block with" in " ".join(topics.split())
    # Nothing is lost: every paragraph of the manual is there once.
    assert set(paragraphs) >= {" ".join(p.split()) for p in pages["with"].split("\n\n") if p.strip()}


@pytest.mark.slow
def test_library_has_the_manual_first_and_docstrings_behind(topics):
    library = corpus("library")
    assert library.startswith(topics) and len(library) > len(topics) + 500_000
    words = " ".join(library.split())
    assert " ".join(argparse.__doc__.split()[:6]) in words
    assert " ".join(argparse.ArgumentParser.__doc__.split()[:8]) in words


def test_a_file_of_the_reader(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("naïve\n\nline", encoding="utf-8-sig")     # with the mark that some editors put first
    assert corpus(file) == corpus(str(file)) == "naïve\n\nline"


@pytest.mark.parametrize("content, error", [(b"\xff\xfe\x00", "not a text"), (b"  \n", "holds no text"), (None, "not a text")])
def test_a_file_that_is_no_text(tmp_path, content, error):
    file = tmp_path / "x"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(k3.InputError, match=error):
        corpus(file)


@given(st.text())
def test_bytes_give_the_text_back(text):
    tokenizer = Bytes()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text


@given(text=st.text())
def test_bpe_gives_the_text_back(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert b"".join(map(bpe.token_bytes, ids)) == text.encode()
    assert all(0 <= i < bpe.vocab_size for i in ids)


def test_bpe_has_the_size_that_was_asked_for_and_shortens(topics, bpe):
    assert bpe.vocab_size == 400
    assert len(bpe.encode(topics)) < 0.6 * len(topics.encode())
    assert {len(bpe.token_bytes(i)) for i in range(256)} == {1}
    assert len({bpe.token_bytes(i) for i in range(400)}) == 400


def test_bpe_is_the_same_every_time(topics, bpe):
    assert BPE.train(topics, 400).tokenizer.to_str() == bpe.tokenizer.to_str()


def test_tokenizers_in_a_folder(tmp_path, bpe):
    assert type(load_tokenizer(tmp_path)) is Bytes
    Bytes().save(tmp_path)
    assert type(load_tokenizer(tmp_path)) is Bytes
    bpe.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("while True") == bpe.encode("while True")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(k3.InputError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


def test_an_encoding_that_is_not_of_bytes(tmp_path):
    from tokenizers import Tokenizer, models
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a b": 0}, [])).save(str(file))
    with pytest.raises(k3.InputError, match="not a byte-level encoding"):
        load_tokenizer(tmp_path)


def test_bpe_needs_all_bytes():
    with pytest.raises(k3.InputError, match="vocab_size is 255; bytes alone are 256"):
        BPE.train("text", 255)


def test_split_keeps_every_block_on_one_side(topics):
    data = Data(topics, Bytes(), validation=0.1, seed=3)
    assert len(data.train) + len(data.validation) == len(topics.encode())
    assert 0.08 < len(data.validation) / len(topics.encode()) < 0.12
    both = data.tokenizer.decode(data.train), data.tokenizer.decode(data.validation)
    blocks = [topics[i:i + BLOCK] for i in range(0, len(topics), BLOCK)]
    assert all((block in both[0]) != (block in both[1]) for block in blocks)
    assert data.bytes_per_token == 1.0
    assert not torch.equal(data.validation, Data(topics, Bytes(), seed=4).validation)
    assert torch.equal(data.validation, Data(topics, Bytes(), seed=3).validation)


def test_bytes_per_token_counts_the_validation_text(topics, bpe):
    data = Data(topics, bpe)
    size = len(data.tokenizer.decode(data.validation).encode())
    assert data.bytes_per_token == pytest.approx(size / len(data.validation), rel=1e-3)
    assert 1.5 < data.bytes_per_token < 3


def test_batches_are_pieces_of_the_text_by_seed_and_step(topics):
    data = Data(topics, Bytes())
    ids = data.batch(5, rows=4, length=64, seed=1)
    text = data.tokenizer.decode(data.train)
    assert ids.shape == (4, 64) and ids.dtype == torch.int64
    assert all(Bytes().decode(row)[8:-8] in text for row in ids)
    assert torch.equal(ids, data.batch(5, 4, 64, 1))
    assert not torch.equal(ids, data.batch(6, 4, 64, 1)) and not torch.equal(ids, data.batch(5, 4, 64, 2))
    assert not torch.equal(data.batch(1, 4, 64, 0), data.batch(0, 4, 64, 1))


def test_a_batch_can_be_any_piece_also_the_first_and_the_last():
    data = Data("ab" * BLOCK, Bytes(), validation=0.5)
    data.train = torch.arange(6)
    starts = {int(row[0]) for step in range(40) for row in data.batch(step, 4, 4)}
    assert starts == {0, 1, 2}


def test_pieces_of_the_validation_text_follow_each_other(topics):
    data = Data(topics, Bytes())
    pieces = data.pieces(100)
    assert torch.equal(pieces.flatten(), data.validation[:len(pieces) * 100])
    assert len(data.validation) - pieces.numel() < 100


@pytest.mark.parametrize("length", [1, 0, 10 ** 9])
def test_pieces_that_there_are_not(topics, length):
    data = Data(topics, Bytes())
    for call in (lambda: data.batch(0, 1, length), lambda: data.pieces(length)):
        with pytest.raises(k3.InputError, match=f"length is {length}; it must be from 2 to"):
            call()


def test_a_text_that_cannot_be_split():
    with pytest.raises(k3.InputError, match="must have more than 4000"):
        Data("short", Bytes())
    for share in (0, 1, -0.5):
        with pytest.raises(k3.InputError, match="between 0 and 1"):
            Data("a" * 9 * BLOCK, Bytes(), validation=share)
