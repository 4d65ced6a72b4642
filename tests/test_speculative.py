"""The output law of speculative decoding, exactly: every choice is followed both ways."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from k3_teach import speculative
from k3_teach.generate.sampling import draw, sampling_law
from k3_teach.speculative import accept, acceptance, coin, expected_tokens, residual, speculate, speculate_greedy
from tests.helpers import tokens, toy


def law(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_laws(*shape, seed=0, zeros=0.0):
    """Rows that sum to 1; a share of the entries is exactly 0."""
    rng = np.random.default_rng(seed)
    x = rng.exponential(size=shape) * (rng.random(shape) >= zeros)
    x[..., 0] += 1e-3
    return torch.from_numpy(x / x.sum(-1, keepdims=True))


class Tree:
    """Follows every outcome of `draw` and `coin` once: the path is the list of choices made so far."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(speculative, "draw", lambda law, generator=None: self.choose(law.tolist()))
        monkeypatch.setattr(speculative, "coin", lambda chance, generator=None: self.choose([1 - chance, chance]) == 1)

    def choose(self, chances):
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        at = self.depth
        self.depth += 1
        if at == len(self.path):
            self.path.append(0)
            self.widths.append(len(possible))
        choice = possible[self.path[at]]
        self.chance *= chances[choice]
        return choice

    def law_of(self, run):
        """{outcome: probability} of a random function."""
        out, self.path, self.widths = defaultdict(float), [], []
        while True:
            self.depth, self.chance = 0, 1.0
            out[run()] += self.chance
            while self.path and self.path[-1] == self.widths[-1] - 1:
                self.path.pop(), self.widths.pop()
            if not self.path:
                return dict(out)
            self.path[-1] += 1


def one_round(p, q):
    """Draft from q, accept: all tokens of the round."""
    m = len(q)
    drafts = [speculative.draw(q[i]) for i in range(m)]
    kept, token = accept(p, q, torch.tensor(drafts, dtype=torch.long))
    return (*drafts[:kept], token)


@pytest.fixture
def tree(monkeypatch):
    return Tree(monkeypatch)


def test_by_hand():
    p, q = law(0.5, 0.3, 0.2), law(0.2, 0.3, 0.5)
    assert_close(acceptance(p, q), law(0.7)[0])
    assert_close(residual(p, q), law(1, 0, 0))
    assert_close(residual(q, p), law(0, 0, 1))
    assert_close(residual(law(0.5, 0.4, 0.1), law(0.2, 0.2, 0.6)), law(0.6, 0.4, 0))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_one_token_has_the_law_of_the_target(tree, seed, zeros):
    p, q = random_laws(2, 5, seed=seed, zeros=zeros), random_laws(1, 5, seed=seed + 100, zeros=zeros)
    first = np.zeros(5)
    for text, chance in tree.law_of(lambda: one_round(p, q)).items():
        first[text[0]] += chance
    np.testing.assert_allclose(first, p[0].numpy(), atol=1e-12, rtol=0)


def test_a_round_is_a_start_of_the_targets_text(tree):
    """Three drafts of a target without memory: whatever length comes out, each token has its law, and the lengths have the law of the drafts kept."""
    p, q = random_laws(1, 3, seed=1).expand(4, 3), random_laws(1, 3, seed=2).expand(3, 3)
    out = tree.law_of(lambda: one_round(p, q))
    assert math.isclose(sum(out.values()), 1, abs_tol=1e-12)
    rate = np.minimum(p[0].numpy(), q[0].numpy()).sum()
    mean = sum(len(text) * chance for text, chance in out.items())
    assert math.isclose(mean, (1 - rate ** 4) / (1 - rate), abs_tol=1e-12)
    assert math.isclose(mean, expected_tokens(rate, 3), abs_tol=1e-12)


def test_wrong_rules_have_another_law(tree):
    """The check can fail: a rejected draft replaced from p, not from what p lacks, is off by (1 - a) p - (p - q)_+."""
    p, q = law(0.5, 0.3, 0.2), law(0.2, 0.3, 0.5)

    def wrong():
        x = speculative.draw(q)
        return x if speculative.coin(min(1, p[x] / q[x])) else speculative.draw(p)

    out = tree.law_of(wrong)
    np.testing.assert_allclose([out[x] for x in range(3)], [0.35, 0.39, 0.26], atol=1e-12)


def test_equal_laws_are_always_kept(tree):
    p = random_laws(3, 4, seed=3)
    assert_close(acceptance(p, p), torch.ones(3, dtype=torch.float64))
    assert torch.equal(residual(p, p), p)                          # and no NaN
    out = tree.law_of(lambda: one_round(p, p[:2]))
    assert math.isclose(sum(c for text, c in out.items() if len(text) == 3), 1, abs_tol=1e-12)


def test_disjoint_laws_are_never_kept(tree):
    p, q = law(0.5, 0.5, 0, 0), law(0, 0, 0.25, 0.75)
    assert acceptance(p, q) == 0 and torch.equal(residual(p, q), p)
    out = tree.law_of(lambda: one_round(torch.stack((p, p)), q[None]))
    assert set(out) == {(0,), (1,)}


def test_without_drafts_it_is_sampling(tree):
    p = random_laws(1, 4, seed=4)
    out = tree.law_of(lambda: one_round(p, p[:0]))
    np.testing.assert_allclose([out[(x,)] for x in range(4)], p[0].numpy(), atol=1e-15, rtol=0)


@given(st.integers(0, 10 ** 6), st.integers(2, 40), st.sampled_from([0.0, 0.3, 0.9]))
@settings(deadline=None)
def test_what_holds_of_any_two_laws(seed, V, zeros):
    p, q = random_laws(2, V, seed=seed, zeros=zeros), random_laws(2, V, seed=seed + 1, zeros=zeros)
    rate, r = acceptance(p, q), residual(p, q)
    assert_close(rate, 1 - (p - q).abs().sum(-1) / 2, atol=1e-12, rtol=0)      # total variation
    assert r.isfinite().all() and (r >= 0).all() and ((r == 0) | (p > q) | (p == q).all(-1, keepdim=True)).all()
    assert_close(torch.minimum(p, q) + (1 - rate)[:, None] * r, p, atol=1e-12, rtol=0)


def within_four_sigma(counts, law, n):
    """By chance one frequency in 16,000 is not."""
    law = np.asarray(law)
    return (np.abs(np.asarray(counts) / n - law) < 4 * np.sqrt(law * (1 - law) / n)).all()


def test_the_two_places_where_chance_enters():
    p, n, generator = law(0.1, 0.6, 0.3), 20_000, torch.Generator().manual_seed(0)
    counts = np.bincount([draw(p, generator) for _ in range(n)], minlength=3)
    assert within_four_sigma(counts, p, n)
    assert within_four_sigma([sum(coin(0.2, generator) for _ in range(n))], [0.2], n)


def test_frequencies_of_rounds():
    p, q, n, generator = law(0.1, 0.6, 0.3), law(0.4, 0.1, 0.5), 5_000, torch.Generator().manual_seed(0)
    counts, kept = np.zeros(3), 0
    for _ in range(n):
        draft = draw(q, generator)
        k, token = accept(torch.stack((p, p)), q[None], torch.tensor([draft]), generator)
        counts[draft if k else token] += 1
        kept += k
    assert within_four_sigma(counts, p, n)
    assert within_four_sigma([kept], [0.5], n)          # min(p, q) = 0.1, 0.1, 0.3


def test_the_generator_fixes_everything():
    p, q = random_laws(4, 6, seed=5), random_laws(3, 6, seed=6)
    run = lambda seed: accept(p, q, torch.tensor([0, 1, 2]), torch.Generator().manual_seed(seed))
    assert all(run(seed) == run(seed) for seed in range(20))
    assert len({run(seed) for seed in range(20)}) > 3


def test_coin_at_its_ends():
    generator = torch.Generator().manual_seed(0)
    assert all(coin(1.0, generator) and not coin(0.0, generator) for _ in range(1000))


@pytest.mark.parametrize("rate, drafts, tokens", [(0.8, 7, (1 - 0.8 ** 8) / 0.2), (0.5, 1, 1.5), (1, 4, 5), (0, 4, 1), (0.3, 0, 1)])
def test_expected_tokens(rate, drafts, tokens):
    assert math.isclose(expected_tokens(rate, drafts), tokens, rel_tol=1e-14)


def test_what_is_no_law_is_refused():
    p, q = random_laws(3, 4), random_laws(2, 4, seed=1)
    drafts = torch.tensor([0, 1])
    for wrong, message in (((p[:2], q, drafts), r"must be \[m\+1, V\]"), ((p, q, drafts[:1]), r"must be \[m\+1, V\]"),
                           ((p, q, drafts[None]), r"must be \[m\+1, V\]"), ((random_laws(3, 3), q, drafts), "the same in p and q"),
                           ((2 * p, q, drafts), "must be a law"), ((p, -q, drafts), "must be a law"), ((p, q * torch.nan, drafts), "must be a law"),
                           ((p.long(), q, drafts), "must be a float"), ((p, q, torch.tensor([0, 4])), "no probability")):
        with pytest.raises(k3.InputError, match=message):
            accept(*wrong)
    with pytest.raises(k3.InputError, match="draft 0 is 1; its q gives that token no probability"):
        accept(p, torch.stack((law(1, 0, 0, 0), q[1])), torch.tensor([1, 1]))
    for rate, m in ((1.1, 2), (-0.1, 2), (0.5, -1), (math.nan, 1)):
        with pytest.raises(k3.InputError, match="from 0 to 1"):
            expected_tokens(rate, m)


# --- with two models ------------------------------------------------------------------

SMALL = dict(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,))      # a KDA and an MLA layer: both kinds of state


def noisy(model, seed, scale):
    """A draft that often agrees: the target's own weights, moved a little."""
    near = k3.K3Model(model.config, dtype=torch.float64).eval()
    near.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return near


def one_by_one(model, ids, num_tokens):
    """Greedy decoding without a cache."""
    for _ in range(num_tokens):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_the_targets_own_text(seed):
    target = toy(seed, **SMALL)
    ids = tokens(1, 7, seed)
    expected = one_by_one(target, ids, 16)
    used = {}
    for name, draft in (("other", toy(seed + 50, **SMALL)), ("near", noisy(target, seed, 0.02)), ("same", target)):
        for m in (0, 1, 3, 7):
            out, used[name, m] = speculate_greedy(target, draft, ids, 16, m)
            assert torch.equal(out, expected), (name, m)
    assert used["other", 0] == used["near", 0] == 16
    assert [used["same", m] for m in (1, 3, 7)] == [8, 4, 2]      # all drafts kept: m + 1 tokens each time
    assert 4 <= used["near", 3] < 16 and used["near", 7] > 2       # some kept, some not: rollback was needed
    assert used["near", 3] <= used["other", 3]


def verifications_without_caches(target, draft, ids, num_tokens, m):
    """How often greedy speculation verifies, if both models read everything anew for each token."""
    text, at, end, count = one_by_one(target, ids, num_tokens), ids.shape[1], ids.shape[1] + num_tokens, 0
    while at < end:
        n = min(m, end - at - 1)
        same = (one_by_one(draft, text[:, :at], n) == text[:, :at + n])[0, at:]
        at, count = at + int(same.cumprod(0).sum()) + 1, count + 1
    return count


@pytest.mark.parametrize("seed", range(3))
def test_the_draft_reads_the_text_too(seed):
    """A wrong cache of the draft would leave the law as it is, but keep fewer drafts."""
    target, ids = toy(seed, **SMALL), tokens(1, 7, seed)
    draft = noisy(target, seed, 0.05)
    expected = verifications_without_caches(target, draft, ids, 30, 4)
    assert 6 < expected < 30
    assert speculate_greedy(target, draft, ids, 30, 4)[1] == expected


def test_greedy_with_the_whole_toy():
    """Nine layers, two blocks of depth reads, experts; a draft of two layers."""
    target, draft, ids = toy(), toy(1, **SMALL), tokens(1, 7)
    assert torch.equal(speculate_greedy(target, draft, ids, 8, 2)[0], one_by_one(target, ids, 8))


class Watched:
    """A model that notes how many tokens it reads at once."""

    def __init__(self, model):
        self.model, self.config, self.new_cache, self.read = model, model.config, model.new_cache, []

    def __call__(self, ids, cache):
        self.read.append(ids.shape[1])
        return self.model(ids, cache=cache)


def test_what_the_target_reads():
    """All kept: the prompt, then m + 1 at once, and nothing twice. None kept: each rejected pass is followed by one over the one token that it left."""
    target = toy(0, **SMALL)
    same = Watched(target)
    speculate_greedy(same, target, tokens(1, 7), 8, 3)
    assert same.read == [6, 4, 4]
    own = one_by_one(target, tokens(1, 7), 8)
    draft = toy(0, **SMALL)
    with torch.no_grad():
        draft.lm_head.weight.neg_()                                # its best is the target's worst
    worst = Watched(target)
    out, count = speculate_greedy(worst, draft, tokens(1, 7), 4, 2)
    assert torch.equal(out, own[:, :11]) and count == 4
    assert worst.read == [6, 3, 1, 3, 1, 2, 1, 1]


@pytest.fixture(scope="module")
def pair():
    """Two models of three tokens that disagree, with a KDA and an MLA layer each."""
    return toy(1, vocab_size=3, **SMALL), toy(2, vocab_size=3, **SMALL)


def law_of_continuations(model, ids, n, *options):
    """{tokens: probability} from the definition, without a cache."""
    if not n:
        return {(): 1.0}
    p, out = sampling_law(model(ids)[0, -1].detach(), *options).tolist(), {}
    for x, chance in enumerate(p):
        rest = law_of_continuations(model, torch.cat((ids, torch.tensor([[x]])), 1), n - 1, *options)
        out.update({(x, *tail): chance * c for tail, c in rest.items()})
    return out


@pytest.mark.parametrize("n, drafts, temperature", [(2, 1, 1.0), (2, 1, 0.5), (2, 5, 2.0), (3, 2, 1.0), (2, 0, 1.0)])
def test_the_text_has_the_law_of_the_target(tree, pair, n, drafts, temperature):
    """Exactly, over every run that there can be: drafts, rejections, rollback, and the rounds after it."""
    target, draft = pair
    ids = tokens(1, 3, 5, vocab=3)
    expected = law_of_continuations(target, ids, n, temperature)
    out = tree.law_of(lambda: tuple(speculate(target, draft, ids, n, drafts, temperature)[0][0, 3:].tolist()))
    assert set(out) == set(expected)
    for text in expected:
        assert math.isclose(out[text], expected[text], abs_tol=1e-12)
    other = law_of_continuations(draft, ids, n, temperature)
    assert sum(abs(expected[text] - other[text]) for text in expected) / 2 > 0.1      # the draft's law is another


@pytest.mark.parametrize("top_k, top_p", [(2, None), (None, 0.7), (2, 0.9), (None, 0.45)])
def test_a_cut_law_is_kept_too(tree, pair, top_k, top_p):
    """The target and the draft cut differently, so that drafts come that the target never says."""
    target, draft = pair
    ids, options = tokens(1, 3, 5, vocab=3), dict(temperature=2.0, top_k=top_k, top_p=top_p)
    expected = {text: chance for text, chance in law_of_continuations(target, ids, 2, 2.0, top_k, top_p).items() if chance}
    out = tree.law_of(lambda: tuple(speculate(target, draft, ids, 2, 1, **options)[0][0, 3:].tolist()))
    out = {text: chance for text, chance in out.items() if chance > 1e-12}
    assert set(out) == set(expected) and len(expected) < 9
    for text in expected:
        assert math.isclose(out[text], expected[text], abs_tol=1e-12)
    support = [{t for t, c in law_of_continuations(m, ids, 2, 2.0, top_k, top_p).items() if c} for m in (target, draft)]
    assert support[1] - support[0]


def test_what_sampling_law_is():
    logits = law(1, 3, 3, -2)
    np.testing.assert_allclose(sampling_law(logits, 0.5), np.exp([2, 6, 6, -4]) / np.exp([2, 6, 6, -4]).sum(), atol=1e-15)
    assert sampling_law(logits, 0).tolist() == [0, 1, 0, 0]
    assert sampling_law(logits.bfloat16(), 0.7).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_law_of_coarse_logits_is_computed_in_float64(dtype):
    """The temperature divides after the cast: a quotient in float32 has 24 bits, one in bfloat16 8."""
    logits = torch.linspace(-9, 9, 50, dtype=torch.float64).to(dtype)
    exact = np.exp(logits.double().numpy() / 0.7)
    np.testing.assert_allclose(sampling_law(logits, 0.7), exact / exact.sum(), rtol=1e-12)


def test_calls_that_cannot_be_meant(pair):
    target, draft = pair
    ids = torch.tensor([[1, 2]])
    assert speculate(target, draft, ids, 0, 3)[0].tolist() == [[1, 2]]
    for change, message in ((dict(ids=ids[0]), r"it must be \[1, T\]"), (dict(ids=ids.expand(2, 2)), r"it must be \[1, T\]"),
                            (dict(ids=ids[:, :0]), r"it must be \[1, T\]"), (dict(num_tokens=-1), "num_tokens is -1"),
                            (dict(drafts=1.5), "drafts is 1.5"), (dict(temperature=-0.1), "temperature is -0.1"),
                            (dict(temperature=math.nan), "temperature is nan"), (dict(top_k=0), "top_k is 0"), (dict(top_p=2), "top_p is 2"),
                            (dict(seed=-3), "seed is -3"), (dict(ids=ids + 2), "token ids must be from 0 to 2"), (dict(ids=ids.float()), "ids is torch.float32"),
                            (dict(num_tokens=4095), "4097; the model takes at most 4096"), (dict(draft=toy(vocab_size=5, **SMALL)), "share one vocabulary")):
        with pytest.raises(k3.InputError, match=message):
            speculate(**(dict(target=target, draft=draft, ids=ids, num_tokens=2, drafts=1, temperature=1.0) | change))
