"""A model, its cache, its text, its files and its balancer, against arguments of any kind: a result, or an error of our own type."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from k3_teach import mxfp4
from k3_teach.errors import K3Error
from k3_teach.generate import Prefixes, complete, pad_left, sampling_law
from k3_teach.train.recipe import Recipe
from k3_teach.train.text import Bytes, Data
from tests.helpers import tokens, toy
from tests.robust.bad import try_all
from tests.robust.test_files import SMALL

FUZZ = settings(derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
MODEL = toy(**SMALL)


def cache_of(T: int):
    cache = MODEL.new_cache(2)
    MODEL(tokens(2, T, vocab=16), cache=cache)
    return cache


def text(**options):
    return list(complete(MODEL, Tokens(), **options))


class Tokens(Bytes):
    """Sixteen letters."""

    vocab_size = 16

    def encode(self, text):
        return [ord(c) % 16 for c in text]


IDS = tokens(2, 3, vocab=16)
CALLS = {
    "forward": (lambda **a: MODEL(**a), dict(ids=IDS, attention_mask=torch.tensor([[False, True, True], [True] * 3]), cache=MODEL.new_cache(2))),
    "new_cache": (MODEL.new_cache, dict(batch_size=2)),
    "generate": (lambda **a: list(k3.generate(MODEL, **a)), dict(
        ids=IDS, max_new_tokens=2, temperature=1.0, top_k=3, top_p=0.9, seed=0, stop=[1, [2, 3]],
        attention_mask=torch.ones(2, 3, dtype=torch.bool), cache=None, prefill_chunk=2)),
    "sampling_law": (sampling_law, dict(logits=torch.randn(2, 5), temperature=1.0, top_k=2, top_p=0.9)),
    "pad_left": (pad_left, dict(prompts=[[1], [2, 3]], padding=0)),
    "prefixes": (Prefixes, dict(model=MODEL, every=2, most=3)),
    "start": (Prefixes(MODEL, 2).start, dict(ids=IDS[:1])),
    "stored": (Prefixes(MODEL, 2).stored, dict(ids=IDS[:1])),
    "complete": (text, dict(prompt="ab", max_new_tokens=2, stop=["x"])),
    "speculate": (k3.speculate, dict(target=MODEL, draft=MODEL, ids=IDS[:1], num_tokens=2, drafts=1, temperature=1.0, seed=0, top_k=2, top_p=0.5)),
    "reorder": (lambda rows: cache_of(2).reorder(rows), dict(rows=torch.tensor([1, 0]))),
    "rollback": (lambda to: cache_of(2).rollback(to), dict(to=cache_of(2))),
    "decode": (mxfp4.decode, dict(zip(("packed", "scale"), mxfp4.encode(torch.randn(2, 64))), dtype=torch.float32)),
    "encode": (mxfp4.encode, dict(weight=torch.randn(2, 64))),
    "Recipe": (Recipe, {f: getattr(Recipe(3), f) for f in Recipe.__dataclass_fields__}),
    "Data": (Data, dict(text="the cat " * 2000, tokenizer=Bytes(), validation=0.1, seed=0)),
    "K3Model": (k3.K3Model, dict(config=MODEL.config, device=None, dtype=torch.float32, init="report")),
    "Balancer": (k3.Balancer, dict(model=MODEL, method="quantile", step=1e-3, num_bins=10, all_reduce=False)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_a_result_or_our_error(name):
    raw, _ = try_all(*CALLS[name])
    assert raw == []


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(["read", "copy", "reorder", "snapshot", "rollback"]), st.lists(st.integers(-1, 3), max_size=3)), max_size=8))
def test_any_order_of_operations_on_a_cache(steps):
    """Whatever was refused changed nothing: at the end the cache goes on as a fresh one that has read what each row has read."""
    cache, ids, points = MODEL.new_cache(2), torch.zeros(2, 0, dtype=torch.int64), []
    for name, numbers in steps:
        try:
            if name == "read":
                new = torch.tensor([numbers] * cache.batch_size, dtype=torch.int64)
                MODEL(new, cache=cache)
                ids = torch.cat((ids, new), 1)
            elif name == "copy":
                cache, points = cache.copy(), points[-1:]       # a snapshot of another cache from now on
            elif name == "reorder":
                cache.reorder(torch.tensor(numbers, dtype=torch.int64))
                ids = ids[torch.tensor(numbers, dtype=torch.int64)]
            elif name == "snapshot":
                points.append((cache.snapshot(), ids))
            elif points:
                cache.rollback(points[-1][0])
                ids = points[-1][1]
        except K3Error:
            pass
    assert len(cache) == ids.shape[1] and cache.batch_size == len(ids)
    last = torch.full((len(ids), 1), 5)
    assert_close(MODEL(last, cache=cache), MODEL(torch.cat((ids, last), 1))[:, -1:], atol=1e-9, rtol=1e-9)


@FUZZ
@given(B=st.integers(0, 2), T=st.integers(0, 40), H=st.integers(0, 2), K=st.integers(0, 5), V=st.integers(0, 5), chunk=st.sampled_from([None, 0, 1, 2, 3, 8, 64]),
       bound=st.sampled_from([None, -5.0, -44.0, 0.0, 1.0, float("nan")]), fast=st.floats(0, 5), seed=st.integers(0, 9))
def test_chunks_and_recurrence_agree_or_both_refuse(B, T, H, K, V, chunk, bound, fast, seed):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1)
    args = unit(r(B, T, H, K)), unit(r(B, T, H, K)), r(B, T, H, V), -fast * r(B, T, H, K).sigmoid(), r(B, T, H).sigmoid()
    try:
        o, S = k3.chunk_kda(*args, chunk_size=chunk, gate_lower_bound=bound)
    except K3Error:
        assert 0 in (B, T, H, K, V) or chunk in (0, 3) or not (bound is None or bound < 0)
        return
    expected, state = k3.recurrent_kda(*args)
    assert_close(o, expected, atol=1e-9, rtol=1e-9)
    assert_close(S, state, atol=1e-9, rtol=1e-9)


@FUZZ
@given(N=st.integers(0, 4), E=st.integers(0, 6), top_k=st.integers(-1, 7), groups=st.integers(-1, 4), kept=st.integers(-1, 4), seed=st.integers(0, 9))
def test_a_route_is_one_or_refused(N, E, top_k, groups, kept, seed):
    g = torch.Generator().manual_seed(seed)
    scores, bias = torch.rand(N, E, generator=g), torch.randn(E, generator=g)
    try:
        idx, weights = k3.route(scores, bias, top_k, num_groups=groups, topk_group=kept)
    except K3Error:
        return
    assert idx.shape == weights.shape == (N, top_k) and ((idx >= 0) & (idx < E)).all() and weights.isfinite().all()
    assert all(len(set(row)) == top_k for row in idx.tolist())


@FUZZ
@given(shape=st.lists(st.integers(0, 3), max_size=3), blocks=st.integers(0, 2), extra=st.sampled_from([0, 0, 0, 1, 16]), power=st.integers(-140, 140), seed=st.integers(0, 9))
def test_mxfp4_holds_what_it_took(shape, blocks, extra, power, seed):
    """decode(encode(w)) is within a sixth of the largest of its block, and encoding that again changes nothing."""
    weight = torch.randn(*shape, 32 * blocks + extra, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0 ** power
    try:
        packed, scale = mxfp4.encode(weight)
    except K3Error:
        assert extra or power > 120
        return
    back = mxfp4.decode(packed, scale, torch.float64)
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) if weight.numel() else weight.new_zeros(())
    error = (back - weight).unflatten(-1, (-1, 32)).abs() if weight.numel() else weight
    assert (error <= largest / 4 + 2.0 ** -127).all()
    assert torch.equal(mxfp4.decode(*mxfp4.encode(back), torch.float64), back)
