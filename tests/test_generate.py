"""Generation against plain routes: the whole text read anew for each token, laws computed one number at a time."""

import importlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.generate import Prefixes, complete, draw, generators, pad_left, sampling_law
from k3_teach.train.text import Bytes
from tests.helpers import tokens, toy

SMALL = dict(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,))      # a KDA and an MLA layer: both kinds of state
at_home = {name: importlib.import_module(f"k3_teach.generate.{name}") for name in ("tokens", "text", "__main__")}


@pytest.fixture(scope="module")
def model():
    return toy(3, **SMALL)


def text_of(steps):
    """[B, n] of what an iterator yields."""
    return torch.stack(list(steps), 1)


def plain(model, ids, n, choose):
    """Without a cache: every token from the whole text before it."""
    for _ in range(n):
        token = choose(model(ids)[0, -1].detach())
        ids = torch.cat((ids, torch.tensor([[token]])), 1)
    return ids[:, -n:]


def greedy(logits):
    return int(logits.argmax())


# --- the law --------------------------------------------------------------------------

def law_by_hand(logits, temperature, top_k, top_p):
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[:1] if temperature == 0 else order[:top_k]
    weight = {i: 1.0 if temperature == 0 else math.exp((logits[i] - logits[order[0]]) / temperature) for i in kept}
    total, most, reached = math.fsum(weight.values()), [], 0.0
    for i in kept:
        if top_p is None or reached < top_p:
            most.append(i)
        reached += weight[i] / total
    total = math.fsum(weight[i] for i in most)
    return [weight[i] / total if i in most else 0.0 for i in range(len(logits))]


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9), st.sampled_from([0, 0.3, 1, 2.5]),
       st.none() | st.integers(1, 10), st.none() | st.integers(1, 99))
def test_the_law_is_the_one_by_hand(logits, temperature, top_k, percent):
    top_p = None if percent is None else percent / 100 + 0.00137          # not on an edge, where rounding decides
    law = sampling_law(torch.tensor(logits, dtype=torch.float64), temperature, top_k, top_p)
    np.testing.assert_allclose(law.numpy(), law_by_hand(logits, temperature, top_k, top_p), atol=1e-14)


def test_ties_are_decided_by_the_number():
    equal = torch.zeros(2, 50)
    for k in (1, 7, 49, 50, 80):
        law = sampling_law(equal, 0.7, top_k=k)
        expected = torch.zeros(50, dtype=torch.float64)
        expected[:k] = 1 / min(k, 50)
        assert_close(law, expected.expand(2, 50))
    assert sampling_law(equal, 0)[1].nonzero().tolist() == [[0]]
    assert sampling_law(equal, top_p=0.5)[0].nonzero().flatten().tolist() == list(range(25))


def test_the_token_that_crosses_is_kept():
    logits = torch.tensor([0.1, 0.5, 0.1, 0.3], dtype=torch.float64).log()
    assert_close(sampling_law(logits, top_p=0.51), torch.tensor([0, 5 / 8, 0, 3 / 8], dtype=torch.float64))
    assert_close(sampling_law(logits, top_p=0.49), torch.tensor([0, 1, 0, 0], dtype=torch.float64))
    assert_close(sampling_law(logits, top_p=1e-300), torch.tensor([0, 1, 0, 0], dtype=torch.float64))
    assert_close(sampling_law(logits, top_k=2, top_p=0.62), torch.tensor([0, 1, 0, 0], dtype=torch.float64))     # 5/8 of what top_k left
    assert_close(sampling_law(logits, 2.0, top_p=0.3), sampling_law(logits / 2, top_p=0.3))


def test_top_p_of_one_keeps_every_token():
    """However small: the sum reaches 1 by rounding long before them."""
    logits = torch.linspace(0, -400, 20, dtype=torch.float64)
    assert torch.equal(sampling_law(logits, top_p=1.0), sampling_law(logits)) and (sampling_law(logits, top_p=1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3, 1.0, 1e300])
def test_the_law_at_the_extremes(dtype, temperature):
    logits = torch.tensor([[-torch.inf, 3e4, -3e4, 3e4], [0, -1e-30, 0, 0]]).to(dtype)
    for options in ({}, dict(top_k=3), dict(top_p=0.9)):
        law = sampling_law(logits, temperature, **options)
        assert law.dtype == torch.float64 and (law >= 0).all() and law[0, 0] == 0
        assert_close(law.sum(-1), torch.ones(2, dtype=torch.float64))
    assert logits.dtype == dtype and logits[1, 0] == 0                       # what was given is not written to


def test_frequencies_follow_the_law(model):
    """4000 rows with neighbouring seeds, two tokens each: every pair within four sigma, so neighbours are independent too."""
    pair = toy(1, vocab_size=4, **SMALL)
    ids, n, options = tokens(1, 3, 5, vocab=4), 4000, dict(temperature=1.5, top_k=3, top_p=0.9)
    got = text_of(k3.generate(pair, ids.expand(n, 3), 2, seed=0, **options))
    counts = np.bincount((4 * got[:, 0] + got[:, 1]).numpy(), minlength=16)
    law = sampling_law(pair(ids)[0, -1].detach(), **options)
    rest = [sampling_law(pair(torch.cat((ids, torch.tensor([[x]])), 1))[0, -1].detach(), **options) for x in range(4)]
    joint = (law[:, None] * torch.stack(rest)).flatten().numpy()
    assert (counts[joint == 0] == 0).all() and (joint > 0.05).sum() >= 4
    assert (np.abs(counts / n - joint) <= 4 * np.sqrt(joint * (1 - joint) / n)).all()


# --- tokens ---------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_the_argmax_of_the_whole_text(seed):
    whole, ids = toy(seed), tokens(1, 5, seed)
    expected = plain(whole, ids, 8, greedy)
    assert torch.equal(text_of(k3.generate(whole, ids, 8, temperature=0)), expected)
    assert torch.equal(text_of(k3.generate(whole, ids, 8, temperature=3.0, top_k=1)), expected)
    assert torch.equal(text_of(k3.generate(whole, ids, 8, temperature=3.0, top_p=1e-9)), expected)


def test_a_sample_is_that_of_the_whole_text(model):
    ids, options, generator = tokens(1, 5), dict(temperature=0.8, top_k=20, top_p=0.95), torch.Generator().manual_seed(4)
    expected = plain(model, ids, 12, lambda logits: draw(sampling_law(logits, **options), generator))
    run = lambda seed: text_of(k3.generate(model, ids, 12, seed=seed, **options))
    assert torch.equal(run(4), expected) and torch.equal(run(4), run(4)) and not torch.equal(run(4), run(5))
    torch.manual_seed(9)
    free = run(None)
    assert not torch.equal(free, run(None))
    torch.manual_seed(9)
    assert torch.equal(free, run(None))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2 ** 40), st.sampled_from([None, 1, 2, 5]),
       st.sampled_from([dict(temperature=0), dict(top_k=9), dict(temperature=2.0, top_p=0.8)]))
def test_a_row_says_what_it_says_alone(model, lengths, seed, chunk, options):
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in lengths]
    ids, mask = pad_left(prompts)
    got = text_of(k3.generate(model, ids, 6, seed=seed, attention_mask=mask, prefill_chunk=chunk, **options))
    for i, p in enumerate(prompts):
        assert torch.equal(got[i:i + 1], text_of(k3.generate(model, torch.tensor([p]), 6, seed=seed + i, **options)))


class Watched:
    """A model that notes how many tokens it reads at once."""

    def __init__(self, model):
        self.model, self.config, self.new_cache, self.read = model, model.config, model.new_cache, []

    def __call__(self, ids, **options):
        self.read.append(ids.shape[1])
        return self.model(ids, **options)


def test_every_token_comes_before_the_next_is_computed(model):
    watched, ids = Watched(model), tokens(2, 7)
    steps = k3.generate(watched, ids, 4, prefill_chunk=3)
    assert watched.read == []
    for expected in ([3, 3, 1], [3, 3, 1, 1], [3, 3, 1, 1, 1], [3, 3, 1, 1, 1, 1]):
        token = next(steps)
        assert token.dtype == torch.int64 and token.shape == (2,) and watched.read == expected
    assert list(steps) == [] and watched.read == expected               # the last one is never read
    assert list(k3.generate(watched, ids, 0)) == [] and watched.read == expected


def test_int32_prompts(model):
    ids = tokens(2, 7)
    assert torch.equal(*(text_of(k3.generate(model, i, 5, temperature=0)) for i in (ids, ids.int())))


@pytest.mark.parametrize("left_at", [1, 3, 6])
def test_going_on_is_not_having_stopped(model, left_at):
    """Two rows, one of them padded; left early, by a closed iterator or by a count."""
    ids, mask = pad_left([tokens(1, 4)[0].tolist(), tokens(1, 7, 1)[0].tolist()])
    whole = text_of(k3.generate(model, ids, 10, seed=8, attention_mask=mask))
    cache, chances = model.new_cache(2), generators(8, 2)
    steps = k3.generate(model, ids, 10, seed=chances, attention_mask=mask, cache=cache)
    first = torch.stack([next(steps) for _ in range(left_at)], 1)
    steps.close()
    assert len(cache) == 7 + left_at - 1
    rest = text_of(k3.generate(model, first[:, -1:], 10 - left_at, seed=chances, cache=cache))
    assert torch.equal(torch.cat((first, rest), 1), whole) and len(cache) == 7 + 9


def test_the_cache_has_seen_all_but_the_newest(model):
    ids, cache, plain_cache = tokens(1, 5), model.new_cache(), model.new_cache()
    text = text_of(k3.generate(model, ids, 6, seed=1, cache=cache))
    model(torch.cat((ids, text[:, :-1]), 1), cache=plain_cache)
    for a, b in zip(cache.states, plain_cache.states):
        for x, y in zip(a.tensors(), b.tensors()):
            assert_close(x, y, atol=1e-12, rtol=1e-12)


def test_stop_ends_a_row_and_the_last_row_ends_all(model):
    ids = tokens(3, 6)
    whole = text_of(k3.generate(model, ids, 12, seed=2))
    a, b, c = whole.tolist()
    assert a[2] not in a[:2] + b + c and a.index(a[2]) == 2
    got = text_of(k3.generate(model, ids, 12, seed=2, stop=a[2]))
    assert got[0].tolist() == a[:3] + [-1] * 9 and torch.equal(got[1:], whole[1:])      # the stop is said; the neighbours notice nothing
    got = text_of(k3.generate(model, ids, 12, seed=2, stop=[a[2], tuple(b[4:7]), [c[0]]]))
    assert got.shape[1] == 7                                                            # the last to end is row 1
    assert got[0].tolist() == a[:3] + [-1] * 4 and got[1].tolist() == b[:7] and got[2].tolist() == c[:1] + [-1] * 6
    halves = [[a[2], 255 - a[3]], [255 - a[1], a[2]]]
    assert torch.equal(text_of(k3.generate(model, ids, 12, seed=2, stop=halves)), whole)     # half of a sequence is none


def test_what_follows_a_stop_leaves_the_others_alone(model):
    """After it, the rows that go on can do so by themselves."""
    ids, cache = tokens(2, 6), model.new_cache(2)
    whole = text_of(k3.generate(model, ids, 12, seed=2))
    chances = generators(2, 2)
    first = text_of(k3.generate(model, ids, 5, seed=chances, cache=cache, stop=[int(whole[0, 1])]))
    assert first[0, 2:].tolist() == [-1, -1, -1]
    cache.reorder(torch.tensor([1]))
    rest = text_of(k3.generate(model, first[1:, -1:], 7, seed=chances[1], cache=cache))
    assert torch.equal(torch.cat((first[1:], rest), 1), whole[1:])


def test_logits_that_are_not_numbers():
    broken, ids = toy(3, **SMALL), tokens(2, 5)
    first = text_of(k3.generate(broken, ids, 3, temperature=0))
    row = broken.embed_tokens.weight[first[1, 1]].clone()
    assert first[1, 1] not in ids and first[1, 1] not in first[:, 0]
    with torch.no_grad():
        broken.embed_tokens.weight[first[1, 1]] = torch.nan          # harmless until row 1 reads its second token
    cache = broken.new_cache(2)
    steps = k3.generate(broken, ids, 3, temperature=0, cache=cache)
    assert torch.equal(torch.stack((next(steps), next(steps)), 1), first[:, :2]) and len(cache) == 6
    with pytest.raises(k3.InputError, match="the largest logit for new token 3 is nan; .* checkpoint"):
        next(steps)
    assert len(cache) == 6
    with torch.no_grad():
        broken.embed_tokens.weight[first[1, 1]] = row
    assert torch.equal(text_of(k3.generate(broken, first[:, 1:2], 1, temperature=0, cache=cache)), first[:, 2:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_prompt_that_ends_in_no_number_leaves_nothing_behind(value):
    broken = toy(3, **SMALL)
    with torch.no_grad():
        broken.norm.weight.fill_(value)
    cache = broken.new_cache()
    with pytest.raises(k3.InputError, match="for new token 1 is nan"):
        next(k3.generate(broken, tokens(1, 9), 3, cache=cache, prefill_chunk=4))
    assert len(cache) == 0
    with pytest.raises(k3.InputError, match="the largest logit is"):
        k3.speculate(broken, broken, tokens(1, 3), 3, 2)


def test_an_interruption_leaves_the_cache_as_it_was(model, monkeypatch):
    """Even between reading a token and handing out the next one."""
    def interrupt(law, generator=None):
        raise KeyboardInterrupt
    ids, cache = tokens(1, 5), model.new_cache()
    steps = k3.generate(model, ids, 6, cache=cache, seed=1)
    next(steps)
    monkeypatch.setattr(at_home["tokens"], "draw", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert len(cache) == 5


def test_calls_that_cannot_be_meant(model):
    ids, limit = torch.tensor([[1, 2, 3], [4, 5, 6]]), model.config.max_position_embeddings
    full, other = model.new_cache(2), toy(1).new_cache(2)
    model(ids, cache=full)
    nobody = torch.tensor([[True] * 3, [False] * 3])
    for change, message in (
            (dict(ids=ids[:, :0]), "with at least one token"), (dict(ids=ids[:0]), "with at least one token"), (dict(ids=ids[0]), r"int64 tensor \[B, T\]"),
            (dict(ids=ids.double()), "ids is torch.float64"), (dict(ids=[[1, 2]]), "ids is list"), (dict(ids=ids + 250), "251 to 256; token ids must be from 0 to 255"),
            (dict(ids=-ids), "-6 to -1"), (dict(max_new_tokens=-1), "max_new_tokens is -1; it must be an integer of at least 0"),
            (dict(max_new_tokens=2.0), "max_new_tokens is 2.0"), (dict(max_new_tokens=None), "max_new_tokens is None"),
            (dict(prefill_chunk=0), "prefill_chunk is 0; it must be an integer of at least 1"), (dict(prefill_chunk=1.5), "prefill_chunk is 1.5"),
            (dict(max_new_tokens=limit - 2), rf"0 tokens in the cache, 3 of the prompt and {limit - 2} new ones are {limit + 1}; the model takes at most {limit}"),
            (dict(cache=full, max_new_tokens=limit - 5), "3 tokens in the cache, 3 of the prompt"),
            (dict(ids=ids[:, :1].expand(2, limit + 1)), f"{limit + 1} of the prompt"),
            (dict(temperature=-0.1), "temperature is -0.1; it must be a number of at least 0"), (dict(temperature=math.inf), "temperature is inf"),
            (dict(temperature=math.nan), "temperature is nan"), (dict(temperature="1"), "temperature is '1'"), (dict(temperature=None), "temperature is None"),
            (dict(temperature=True), "temperature is True"), (dict(top_k=0), "top_k is 0; it must be an integer of at least 1"), (dict(top_k=2.0), "top_k is 2.0"),
            (dict(top_k=True), "top_k is True"), (dict(top_p=0), "top_p is 0; it must be above 0 and at most 1"), (dict(top_p=1.01), "top_p is 1.01"),
            (dict(top_p=math.nan), "top_p is nan"), (dict(top_p="0.9"), "top_p is '0.9'"), (dict(attention_mask=nobody), "row 1 of attention_mask is all padding"),
            (dict(attention_mask=nobody[:, :2]), r"attention_mask is torch.bool of shape \[2, 2\]"), (dict(attention_mask=nobody.flip(0)), "row 0 of"),
            (dict(attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]])), "on the left"), (dict(cache=other), "the cache is for 9 layers"), (dict(cache={}), "cache is dict"),
            (dict(cache=model.new_cache(3)), "the cache holds 3 rows; ids has 2"), (dict(seed=-1), "seed is -1; it must be an integer from 0"),
            (dict(seed=1.5), "seed is 1.5"), (dict(seed=True), "seed is True"), (dict(seed=[1]), "a list of 2, one for each row"), (dict(seed=[[1], 2]), "seed is"),
            (dict(seed=torch.Generator()), "a list of 2"), (dict(stop=[256]), r"stop holds \[256\]; .* from 0 to 255"), (dict(stop=[[1], [2, -1]]), r"stop holds \[2, -1\]"),
            (dict(stop=[[]]), r"stop holds \[\]"), (dict(stop=300), r"stop holds \[300\]"), (dict(stop=None), r"stop holds \[None\]"), (dict(stop="ab"), "stop holds 'a'")):
        with pytest.raises(k3.InputError, match=message):
            k3.generate(**(dict(model=model, ids=ids, max_new_tokens=2) | change))     # at once, before the first token is asked for
    assert len(full) == 3
    model.train()
    with pytest.raises(k3.InputError, match=r"model.eval\(\)"):
        k3.generate(model, ids, 2)
    model.eval()
    assert text_of(k3.generate(model, ids, limit - 3, temperature=0, stop=range(256))).shape == (2, 1)       # the longest that is allowed


def test_speculation_without_drafts_says_the_same(model):
    draft, ids, options = toy(9, **SMALL), tokens(1, 6), dict(temperature=0.8, top_k=40, top_p=0.9)
    text = text_of(k3.generate(model, ids, 9, seed=6, **options))
    assert torch.equal(k3.speculate(model, draft, ids, 9, 0, seed=6, **options)[0][:, 6:], text)
    run = lambda seed: k3.speculate(model, draft, ids, 9, 3, seed=seed, **options)[0]
    assert torch.equal(run(6), run(6)) and torch.equal(run(6), run(torch.Generator().manual_seed(6))) and not torch.equal(run(6), run(7))


# --- strings --------------------------------------------------------------------------

class Replay:
    """In place of `generate`: the tokens of given rows, and what it was asked for."""

    def __init__(self, *rows):
        self.rows, self.stop = rows, None

    def __call__(self, model, ids, max_new_tokens, *, stop, attention_mask=None, **options):
        self.ids, self.mask, self.stop, self.said = ids, attention_mask, stop, 0
        n = max(map(len, self.rows))
        for step in range(min(n, max_new_tokens)):
            self.said += 1
            yield torch.tensor([r[step] if step < len(r) else -1 for r in self.rows])


@pytest.fixture
def replay(monkeypatch):
    def put(*rows):
        rows = Replay(*(r.encode() if isinstance(r, str) else r for r in rows))
        monkeypatch.setattr(at_home["text"], "generate", rows)
        return rows
    return put


def test_letters_come_whole(model, replay):
    replay("aé€🙂b")
    assert list(complete(model, Bytes(), "x", 99)) == ["a", "é", "€", "🙂", "b"]
    replay("aé".encode()[:-1])
    assert list(complete(model, Bytes(), "x", 99)) == ["a", "\ufffd"]               # what is left unfinished
    replay(b"\xffb\xc3z")
    assert "".join(complete(model, Bytes(), "x", 99)) == "\ufffdb\ufffdz"


@given(st.text(max_size=8), st.text(max_size=8))
def test_all_that_was_written_is_the_whole(a, b):
    writers = [at_home["text"]._Writer(Bytes(), []) for _ in "ab"]
    rows = Replay(a.encode(), b.encode())
    steps = rows(None, None, 99, stop=()) if a or b else iter(())
    pieces = list(at_home["text"]._write(steps, writers))
    assert ["".join(row) for row in zip(*pieces)] == ([a, b] if pieces else []) and bool(pieces) == bool(a or b)


def test_a_string_ends_the_text(model, replay):
    rows = replay("one two. three")
    assert "".join(complete(model, Bytes(), "x", 99, stop=["e. t", ". ", "o. th", 7])) == "one two. " and rows.said == 9 and rows.stop == [7]

    class Words(Bytes):
        def token_bytes(self, token):
            return [b"go on", b". The", b" end"][token]
    rows = replay([0, 1, 2])
    assert list(complete(model, Words(), "x", 99, stop=".")) == ["go on", "."] and rows.said == 2     # what follows in its last token is left out
    assert list(complete(model, Words(), "x", 99, stop=["The", "."])) == ["go on", "."]               # the first of two in one token
    with pytest.raises(k3.InputError, match="empty string"):
        complete(model, Bytes(), "x", 9, stop=["a", ""])


def test_rows_of_text_end_each_for_itself(model, replay):
    rows = replay("ab.cd", "é", "wxyz!")
    got = list(complete(model, Bytes(), ["p", "pp", "é!"], 99, stop=["."]))
    assert ["".join(row) for row in zip(*got)] == ["ab.", "é", "wxyz!"]
    assert rows.ids.tolist() == [[0, 0, 112], [0, 112, 112], [0xC3, 0xA9, 33]]
    assert rows.mask.tolist() == [[False, False, True], [False, True, True], [True, True, True]]


def test_text_is_that_of_the_tokens(model):
    ids = torch.tensor([list(b"The for")])
    expected = Bytes().decode(text_of(k3.generate(model, ids, 30, seed=3))[0].tolist())
    assert "".join(complete(model, Bytes(), "The for", 30, seed=3)) == expected
    rows = complete(model, Bytes(), ["To", "The for"], 30, seed=2)
    assert "".join(row[1] for row in rows) == expected                              # row 1 has the seed 2 + 1


def test_a_token_that_the_tokenizer_does_not_know():
    class Few(Bytes):
        vocab_size = 2
    assert at_home["text"]._Writer(Few(), []).write(2) == "\ufffd"


def test_prompts_that_cannot_be_meant(model):
    class Many(Bytes):
        vocab_size = 300
    for prompt, tokenizer, message in (("", Bytes(), "prompt is ''; it must be a string that is not empty"), (["a", ""], Bytes(), "prompt is ''"),
                                       ([], Bytes(), "must hold a string"), ([1], Bytes(), "prompt is 1"), (None, Bytes(), "prompt is None"),
                                       ("a", Many(), "the tokenizer knows 300 tokens and the model 256"), ("\udcff", Bytes(), "UTF-8")):
        with pytest.raises(k3.InputError, match=message):
            complete(model, tokenizer, prompt, 3)
    with pytest.raises(k3.InputError, match="a cache serves one prompt"):
        complete(model, Bytes(), ["a"], 3, cache=model.new_cache())
    with pytest.raises(k3.InputError, match="top_k is 0"):
        complete(model, Bytes(), "a", 3, top_k=0)


# --- prefixes -------------------------------------------------------------------------

def test_a_shared_beginning_is_read_once(model):
    head = tokens(1, 20)
    a, b, c = (torch.cat((head, tokens(1, 7, seed)), 1) for seed in (1, 2, 3))
    watched = Watched(model)
    prefixes = Prefixes(watched, every=8)
    for ids, stored, read in ((a, 0, [8, 8, 8, 2]), (b, 16, [8, 2]), (a, 26, []), (torch.cat((a, b), 1), 26, [6, 8, 8, 5]), (torch.cat((c, b), 1), 16, [8, 8, 8, 8, 5]),
                              (head[:, :17], 16, []), (head[:, :16], 8, [7]), (head[:, :1], 0, []), (tokens(1, 27, 9), 0, [8, 8, 8, 2])):
        assert prefixes.stored(ids) == stored
        watched.read.clear()
        cache, rest = prefixes.start(ids)
        assert watched.read == read and len(cache) == ids.shape[1] - 1
        fresh = text_of(k3.generate(model, ids, 5, seed=1))
        assert torch.equal(text_of(k3.generate(model, rest, 5, seed=1, cache=cache)), fresh)


def test_a_difference_before_the_first_point_leaves_nothing(model):
    prefixes, a = Prefixes(model, every=8), tokens(1, 30)
    prefixes.start(a)
    for at, stored in ((0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (28, 24), (29, 29)):
        b = a.clone()
        b[0, at] = (a[0, at] + 1) % 256
        assert prefixes.stored(b) == stored


def test_what_a_caller_does_leaves_the_store_alone(model):
    prefixes, a = Prefixes(model, every=4), tokens(1, 14)
    cache, rest = prefixes.start(a)
    point = cache.snapshot()
    list(k3.generate(model, rest, 20, cache=cache))
    cache.rollback(point)
    model(tokens(1, 30, 5), cache=cache)                            # writes over the rows of the first text
    kept = prefixes.nbytes()
    cache.reorder(torch.tensor([0, 0]))
    assert prefixes.nbytes() == kept
    again, rest = prefixes.start(a)
    assert_close(model(rest, cache=again)[0, -1], model(a)[0, -1], atol=1e-10, rtol=1e-10)


def test_how_much_is_kept(model):
    ids, cache = tokens(1, 33), model.new_cache()
    model(ids[:, :32], cache=cache)
    rows = cache.states[1].rows.nbytes
    state = cache.nbytes() - rows
    for every, points in ((8, 4), (32, 1), (5, 7)):
        prefixes = Prefixes(model, every=every)
        prefixes.start(ids)
        assert prefixes.nbytes() == points * state + rows
        prefixes.start(ids)
        assert prefixes.nbytes() == points * state + rows and len(prefixes.seen) == 1     # nothing twice
        prefixes.start(torch.cat((ids, ids), 1))
        assert len(prefixes.seen) == 1                                                    # the longer text has all points of the shorter
    prefixes = Prefixes(model, every=8, most=2)
    for seed in range(4):
        prefixes.start(tokens(1, 9, seed))
    assert [text for text, *_ in prefixes.seen] == [tokens(1, 9, seed)[0, :8].tolist() for seed in (3, 2)]
    assert Prefixes(model).nbytes() == 0


def test_prefixes_that_cannot_be_meant(model):
    for run, message in ((lambda: Prefixes(model, every=0), "every is 0"), (lambda: Prefixes(model, most=1.5), "most is 1.5"),
                         (lambda: Prefixes(model).start(tokens(2, 3)), "ids has 2 rows"), (lambda: Prefixes(model).start(tokens(1, 0)), "at least one token"),
                         (lambda: Prefixes(model).start(tokens(1, 1).expand(1, 4097)), "takes at most 4096")):
        with pytest.raises(k3.InputError, match=message):
            run()


# --- two names, one command -----------------------------------------------------------

def test_the_function_and_the_package():
    import k3_teach.generate
    package = importlib.import_module("k3_teach.generate")
    assert k3_teach.generate is package.generate is k3.generate and package.complete is complete


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("toy")
    k3.save_checkpoint(model, path)
    return path


def command(*arguments):
    line = [sys.executable, "-W", "error::RuntimeWarning", "-m", "k3_teach.generate", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, encoding="utf-8")


def test_the_command(folder):
    run = command(folder, "The for", "--max-new-tokens", 12, "--temperature", 0.9, "--top-k", 30, "--top-p", 0.95, "--seed", 5)
    assert run.returncode == 0 and run.stderr == ""
    half = k3.load_checkpoint(folder, dtype=torch.float32)
    assert run.stdout == "".join(complete(half, Bytes(), "The for", 12, temperature=0.9, top_k=30, top_p=0.95, seed=5)) + "\n"


def test_the_command_says_what_is_wrong(folder, tmp_path, capsys):
    main = at_home["__main__"].main
    other = tmp_path / "other"
    k3.save_checkpoint(toy(), other)
    (other / "config.json").write_text((folder / "config.json").read_text())
    for arguments, message in (([folder, ""], "prompt is ''"), ([folder, "a", "--top-k", "0"], "top_k is 0"), ([tmp_path / "none", "a"], "no such file"),
                               ([other, "a"], "tensors do not fit the configuration"), ([folder, "a", "--max-new-tokens", "5000"], "the model takes at most 4096")):
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_command_stops_where_it_is_told(folder, capsys, replay):
    replay("one. two")
    at_home["__main__"].main([str(folder), "a", "--stop", "zz", "--stop", "."])
    assert capsys.readouterr().out == "one.\n"
