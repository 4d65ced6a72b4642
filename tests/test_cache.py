"""Copies, reordering and rollback, exactly; and what cannot be rolled back."""

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.cache import LatentCache
from tests.helpers import tokens, toy


@pytest.fixture(scope="module")
def model():
    return toy()


def filled(model, B=2, T=20, mask=None):
    cache = model.new_cache(B)
    model(tokens(B, T), attention_mask=mask, cache=cache)
    return cache


def test_rollback_is_exact(model):
    """Pitfall 21: verify four drafted tokens, reject two, go on: the same as never having drafted them."""
    ids, drafts = tokens(2, 20), tokens(2, 4, 1)
    cache = filled(model)
    point = cache.snapshot()
    model(drafts, cache=cache)
    cache.rollback(point)
    model(drafts[:, :2], cache=cache)
    after = model(tokens(2, 1, 2), cache=cache)
    serial = filled(model)
    for t in range(2):
        model(drafts[:, [t]], cache=serial)
    assert_close(after, model(tokens(2, 1, 2), cache=serial), atol=1e-11, rtol=0)
    fresh = model(torch.cat((ids, drafts[:, :2], tokens(2, 1, 2)), 1))[:, -1:]
    assert_close(after, fresh.detach(), atol=1e-10, rtol=0)


def test_rollback_restores_every_bit(model):
    cache = filled(model)
    point, step = cache.snapshot(), tokens(2, 3, 4)
    first = model(step, cache=cache)
    for _ in range(3):
        cache.rollback(point)
        assert len(cache) == 20
        assert torch.equal(model(step, cache=cache), first)


def test_rollback_with_padding(model):
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :5] = False
    cache = filled(model, mask=mask)
    point = cache.snapshot()
    first = model(tokens(2, 1, 1), cache=cache)
    cache.rollback(point)
    assert torch.equal(model(tokens(2, 1, 1), cache=cache), first)


def test_replaced_tokens_cannot_be_returned_to(model):
    """Pitfall 16: rows after a rollback overwrite what a later snapshot stood for."""
    cache = filled(model)
    early = cache.snapshot()
    model(tokens(2, 4, 1), cache=cache)
    late = cache.snapshot()
    cache.rollback(late)                     # nothing was replaced yet
    cache.rollback(early)
    with pytest.raises(k3.InputError, match="taken at 24 tokens, some of which were replaced after a rollback to 20"):
        cache.rollback(late)
    assert len(cache) == 20
    cache.rollback(early)


def test_snapshot_of_another_cache_is_refused(model):
    cache = filled(model)
    for other in (filled(model), cache.copy()):
        with pytest.raises(k3.InputError, match="another cache"):
            cache.rollback(other.snapshot())
    point = cache.snapshot()
    cache.reorder(torch.tensor([1, 0]))
    with pytest.raises(k3.InputError, match="reordered"):
        cache.rollback(point)


def test_copies_are_independent(model):
    cache = filled(model)
    fork = cache.copy()
    a = model(tokens(2, 3, 1), cache=cache)
    b = model(tokens(2, 3, 2), cache=fork)
    assert torch.equal(a, model(tokens(2, 3, 1), cache=filled(model)))
    assert torch.equal(b, model(tokens(2, 3, 2), cache=filled(model)))
    assert len(cache) == len(fork) == 23


def test_reorder_moves_rows_and_may_repeat_them(model):
    ids = tokens(2, 20)
    cache = filled(model)
    cache.reorder(torch.tensor([1, 1, 0]))
    step = tokens(3, 2, 5)
    out = model(step, cache=cache)
    for row, source in enumerate([1, 1, 0]):
        alone = model(torch.cat((ids[[source]], step[[row]]), 1))[:, 20:]
        assert_close(out[[row]], alone.detach(), atol=1e-10, rtol=0)


def test_reorder_keeps_padding_with_its_row(model):
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :5] = False
    cache = filled(model, mask=mask)
    cache.reorder(torch.tensor([1, 0]))
    out = model(tokens(2, 1, 5), cache=cache)
    alone = model(torch.cat((tokens(2, 20)[:1, 5:], tokens(2, 1, 5)[1:]), 1))[:, -1:]
    assert_close(out[1:], alone.detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("rows, message", [(torch.tensor([2]), "from 0 to 1"), (torch.tensor([-1]), "from 0 to 1"), (torch.tensor([0.0]), "int64"),
                                           (torch.tensor([[0]]), "int64"), (torch.tensor([], dtype=torch.long), "int64")])
def test_wrong_rows(model, rows, message):
    with pytest.raises(k3.InputError, match=message):
        filled(model).reorder(rows)


def test_states_are_replaced_and_not_written_into(model):
    """What makes a snapshot free, and forks safe: the old tensors keep their values."""
    cache = filled(model)
    kept = [t.clone() for s in cache.states for t in s.tensors()]
    references = [t for s in cache.states for t in s.tensors()]
    model(tokens(2, 1, 1), cache=cache)
    for old, copy in zip(references, kept):
        assert torch.equal(old, copy)


def test_recycled_memory_is_never_read(model):
    """Pitfalls 15 and 40: a buffer full of NaN from an earlier use, a one-token first piece."""
    cache, expected = model.new_cache(1), model(tokens(1, 1))
    for s in cache.states:
        if isinstance(s, LatentCache):
            s.buffer = torch.full((1, 300, 40), torch.nan, dtype=torch.float64)
    assert_close(model(tokens(1, 1), cache=cache), expected.detach(), atol=1e-12, rtol=0)


def test_buffer_grows_geometrically():
    cache, sizes = LatentCache(), set()
    for _ in range(1000):
        cache.append(torch.zeros(1, 1, 2))
        sizes.add(cache.buffer.shape[1])
    assert len(cache) == 1000 and len(sizes) <= 6


def test_first_use_growth_and_divergence(model):
    """Pitfall 40: first request, reuse with growth, and two continuations of one prefix."""
    prefix, a, b = tokens(1, 300), tokens(1, 9, 1), tokens(1, 9, 2)
    cache = model.new_cache(1)
    first = model(prefix, cache=cache)
    point = cache.snapshot()
    for continuation in (a, b):
        cache.rollback(point)
        out = model(continuation, cache=cache)
        assert_close(out, model(torch.cat((prefix, continuation), 1))[:, 300:].detach(), atol=1e-10, rtol=0)
    assert_close(first, model(prefix).detach(), atol=1e-10, rtol=0)


def test_an_empty_cache_is_not_nothing(model):
    assert model.new_cache(1) and len(model.new_cache(1)) == 0


def test_no_gradient_is_kept(model):
    assert not model(tokens(1, 3), cache=model.new_cache(1)).requires_grad
    assert model(tokens(1, 3)).requires_grad
