"""CSA and HCA against loops, full attention, numpy, and a decoder that keeps only what it must."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts.compressed_attention import (
    attend_loop, cached_numbers, choose, compress, csa, entry_mask, hca, index_scores, window_mask)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(T, B=2, H=3, D=4, I=2, K=3, seed=0):
    """q [B,H,T,D], kv [B,T,D], scores [B,T], index queries [B,I,T,K], a key for each token [B,T,K], weights [B,I,T]."""
    return (rand(B, H, T, D, seed=seed), rand(B, T, D, seed=seed + 1), rand(B, T, seed=seed + 2), rand(B, I, T, K, seed=seed + 3),
            rand(B, T, K, seed=seed + 4), rand(B, I, T, seed=seed + 5))


def full_attention(q, kv, scale):
    x = kv[:, None].expand(-1, q.shape[1], -1, -1)
    return k3.attention_eager(q, x, x, scale)


def whole(x, ratio, top_k, window, overlap, recent=False):
    """CSA with all that it can be given."""
    q, kv, scores, index_q, index_k, weights = x
    keys = compress(index_k, ratio, scores, overlap)
    return csa(q, kv, ratio, top_k, window, 0.7, index_q, keys, weights, scores, overlap, recent)


def cut(x, start, end):
    """The queries of tokens start .. end - 1, and the tokens up to there."""
    q, kv, scores, index_q, index_k, weights = x
    return q[:, :, start:end], kv[:, :end], scores[:, :end], index_q[:, :, start:end], index_k[:, :end], weights[:, :, start:end]


# --- compression ----------------------------------------------------------------------

@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("T, ratio", [(12, 4), (14, 4), (3, 4), (5, 1), (8, 8)])
def test_an_entry_is_a_weighted_mean(T, ratio, channels, overlap):
    kv, scores = rand(2, T, 3), rand(2, T, 3, seed=1) if channels else rand(2, T, seed=1)
    out = compress(kv, ratio, scores, overlap)
    assert out.shape == (2, T // ratio, 3)
    s = (scores if channels else scores[..., None].expand(2, T, 3)).numpy()
    for b in range(2):
        for i in range(T // ratio):
            tokens = slice(max(0, (i - overlap) * ratio), (i + 1) * ratio)
            w = np.exp(s[b, tokens])
            np.testing.assert_allclose(out[b, i], (w * kv[b, tokens].numpy()).sum(0) / w.sum(0), atol=1e-14)


def test_without_scores_it_is_the_mean():
    kv = torch.tensor([[[1.0, 0], [3, 4], [5, 2], [7, 2], [9, 9]]]).double()
    assert compress(kv, 2).tolist() == [[[2, 2], [6, 2]]]
    assert compress(kv, 2, overlap=True).tolist() == [[[2, 2], [4, 2]]]


def test_scores_in_bfloat16_are_weighed_in_float32():
    """Only the result is rounded, to 8 bits: by up to 2^-8 of it, where nothing cancels."""
    kv, scores = (1 + rand(2, 2000, 3).abs()).bfloat16(), rand(2, 2000, seed=1).bfloat16()
    for overlap in (False, True):
        out, exact = (compress(kv.to(d), 2, scores.to(d), overlap) for d in (torch.bfloat16, torch.float64))
        assert_close(out.double(), exact, rtol=1.01 * 2 ** -8, atol=0)


def test_the_dtype_stays():
    out = compress(rand(1, 8, 3).bfloat16(), 4, rand(1, 8).bfloat16(), overlap=True)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


# --- masks and the choice -------------------------------------------------------------

def test_masks_by_hand():
    assert window_mask(4, 4, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert window_mask(2, 4, 3).int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    # groups 01, 23, 45; a token does not see the group that it ends
    assert entry_mask(6, 6, 2).int().tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0]]
    assert entry_mask(2, 6, 2).int().tolist() == [[1, 1, 0], [1, 1, 0]]
    # window 3: token 3 has 1, 2, 3 and needs group 01 for 0; token 2 has it whole
    assert entry_mask(6, 6, 2, 3).int().tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert torch.equal(entry_mask(6, 6, 2, 3, recent=True), entry_mask(6, 6, 2))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 20))
@settings(deadline=None)
def test_no_token_of_the_past_is_lost(S, ratio, more):
    """If a window is no shorter than a group, every token stands in the window or in an entry; in both only at the window's edge."""
    window = ratio + more
    raw, entries = window_mask(S, S, window), entry_mask(S, S, ratio, window)
    in_entry = entries.repeat_interleave(ratio, 1)
    in_entry = torch.cat((in_entry, torch.zeros(S, S - in_entry.shape[1], dtype=torch.bool)), 1)
    assert torch.equal(raw | in_entry, k3.causal_mask(S, S))
    assert (raw & in_entry).sum(1).max() < ratio


def test_index_scores_by_hand():
    index_q = torch.tensor([[[[1.0, 0]], [[0, 2.0]]]])                    # two heads, one token
    index_k = torch.tensor([[[3.0, -1], [-1, 1], [-1, -1]]])
    assert index_scores(index_q, index_k).tolist() == [[[3, 2, 0]]]
    assert index_scores(index_q, index_k, torch.tensor([[[-1.0], [5.0]]])).tolist() == [[[-3, 10, 0]]]


def test_the_choice():
    scores = torch.tensor([[[0.0, 5, 0, 9], [-3, -2, -1, 9], [1, 1, 1, 1]]])
    allowed = torch.tensor([[True, True, True, False], [True, True, False, False], [True] * 4])
    assert choose(scores, allowed, 2)[0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert choose(scores, allowed, 1)[0].int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert not choose(scores, allowed, 0).any()
    assert torch.equal(choose(scores, allowed, 9)[0], allowed)


@pytest.mark.parametrize("many", [300, 2000])
def test_of_many_ties_the_earliest_are_chosen(many):
    """Hundreds of equal scores, which a sort that is not stable may turn round; a larger one comes last."""
    scores = torch.zeros(1, 2, many)
    scores[0, 1, -1] = 1
    chosen = choose(scores, torch.ones(2, many, dtype=torch.bool), 40)[0]
    assert chosen[0].nonzero()[:, 0].tolist() == list(range(40))
    assert chosen[1].nonzero()[:, 0].tolist() == [*range(39), many - 1]


def test_the_choice_is_a_largest_sum():
    scores, allowed = rand(2, 9, 7), entry_mask(9, 15, 2)
    for k in (1, 3):
        chosen = choose(scores, allowed, k)
        for b in range(2):
            for t in range(9):
                values = np.sort(scores[b, t, allowed[t]].numpy())[-k:]
                assert chosen[b, t].sum() == len(values)
                np.testing.assert_allclose(scores[b, t, chosen[b, t]].sum(), values.sum())


# --- the two attentions ---------------------------------------------------------------

@pytest.mark.parametrize("window", [1, 3, 50])
def test_ratio_one_with_all_entries_is_full_attention(window):
    q, kv, *_ = inputs(11)
    expected = full_attention(q, kv, 0.7)
    assert_close(csa(q, kv, 1, 11, window, 0.7), expected, atol=1e-13, rtol=0)
    assert_close(hca(q, kv, 1, window, 0.7), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("window", [11, 12, 50])
def test_a_window_over_all_is_full_attention(window):
    q, kv, scores, *_ = inputs(11)
    expected = full_attention(q, kv, 0.7)
    assert_close(csa(q, kv, 4, 2, window, 0.7, scores=scores, overlap=True), expected, atol=1e-13, rtol=0)
    assert_close(hca(q, kv, 4, window, 0.7, scores), expected, atol=1e-13, rtol=0)
    twice = hca(q, kv, 4, window, 0.7, scores, recent=True)
    assert_close(twice[:, :, :4], expected[:, :, :4], atol=1e-13, rtol=0)
    assert (twice - expected)[:, :, 4:].abs().amax((0, 1, 3)).min() > 1e-3      # entries beside their own tokens


def test_top_k_over_all_selects_nothing():
    x = inputs(20)
    q, kv, scores, *_ = x
    dense = hca(q, kv, 3, 4, 0.7, scores)
    for top_k in (6, 99):
        assert_close(whole(x, 3, top_k, 4, False), dense, atol=1e-13, rtol=0)
    assert (whole(x, 3, 1, 4, False) - dense).abs().max() > 1e-2


def test_top_k_of_zero_is_the_window_alone():
    q, kv, *_ = inputs(12)
    x = kv[:, None].expand(-1, 3, -1, -1)
    expected = k3.attention_eager(q, x, x, 0.7, window_mask(12, 12, 5))
    assert_close(csa(q, kv, 2, 0, 5, 0.7), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("T, ratio, top_k, window", [(13, 2, 2, 3), (13, 4, 1, 4), (9, 3, 5, 1), (2, 4, 2, 3), (1, 1, 1, 1)])
def test_masked_equals_the_loop(T, ratio, top_k, window, overlap):
    x = inputs(T)
    q, kv, scores, index_q, index_k, weights = x
    entries = compress(kv, ratio, scores, overlap)
    keys = compress(index_k, ratio, scores, overlap)
    relevance = torch.stack([torch.stack([(weights[b, :, t, None] * (index_q[b, :, t] @ keys[b].T).clamp_min(0)).sum(0) for t in range(T)]) for b in range(2)])
    chosen = choose(relevance, entry_mask(T, T, ratio, window), top_k)
    expected = attend_loop(q, kv, entries, chosen, window, 0.7)
    assert_close(whole(x, ratio, top_k, window, overlap), expected, atol=1e-13, rtol=0)
    if not overlap:
        allowed = entry_mask(T, T, ratio, window).expand(2, -1, -1)
        assert_close(hca(q, kv, ratio, window, 0.7, scores), attend_loop(q, kv, entries, allowed, window, 0.7), atol=1e-13, rtol=0)


@given(st.integers(1, 24), st.integers(1, 5), st.integers(0, 3), st.integers(1, 8), st.booleans(), st.booleans(), st.data())
@settings(deadline=None, max_examples=60)
def test_the_future_changes_nothing(T, ratio, top_k, window, overlap, recent, data):
    """Other tokens from t on leave all rows before t as they are. No row is empty."""
    t = data.draw(st.integers(0, T))
    x, y = inputs(T), inputs(T, seed=77)
    splice = [torch.cat((a.narrow(d, 0, t), b.narrow(d, t, T - t)), d) for a, b, d in zip(x, y, (2, 1, 1, 2, 1, 2))]
    for f in (lambda z: whole(z, ratio, top_k, window, overlap, recent), lambda z: hca(z[0], z[1], ratio, window, 0.7, z[2], recent)):
        out = f(x)
        assert out.isfinite().all()
        assert_close(f(splice)[:, :, :t], out[:, :, :t], atol=1e-14, rtol=0)


def test_the_past_is_read():
    """Token 0 reaches token 30 through its entry, though the window holds only 4."""
    q, kv, scores, *_ = inputs(31)
    other = kv.clone()
    other[:, 0] += 1
    assert (hca(q, kv, 5, 4, 0.7, scores) - hca(q, other, 5, 4, 0.7, scores))[:, :, 30].abs().max() > 1e-4
    assert torch.equal(csa(q, kv, 5, 0, 4, 0.7)[:, :, 30], csa(q, other, 5, 0, 4, 0.7)[:, :, 30])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pieces", [[1] * 17, [5, 1, 1, 7, 3], [16, 1]])
def test_decoding_equals_the_whole(pieces, overlap):
    x, start, out = inputs(17), 0, []
    for n in pieces:
        out.append(whole(cut(x, start, start + n), 4, 2, 4, overlap))
        start += n
    assert_close(torch.cat(out, 2), whole(x, 4, 2, 4, overlap), atol=1e-13, rtol=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [1, 3, 4, 12])
def test_what_must_be_kept(window, overlap):
    """A decoder that holds entries and the last raw tokens only computes the same, and holds `cached_numbers`."""
    ratio, D, T = 4, 4, 23
    q, kv, scores, *_ = inputs(T, B=1)
    expected = csa(q, kv, ratio, T, window, 0.7, scores=scores, overlap=overlap)
    entries, raw, s = kv[:, :0], kv[:, :0], scores[:, :0]
    for t in range(T):
        raw, s = torch.cat((raw, kv[:, [t]]), 1), torch.cat((s, scores[:, [t]]), 1)
        allowed = entry_mask(1, t + 1, ratio, window)[None, :, :entries.shape[1]]      # without the group that t ends
        o = attend_loop(q[:, :, [t]], raw, entries, allowed, window, 0.7)
        assert_close(o, expected[:, :, [t]], atol=1e-13, rtol=0)
        if (t + 1) % ratio == 0:
            last = 2 * ratio if overlap and t >= ratio else ratio
            w = s[:, -last:, None].softmax(1)
            entries = torch.cat((entries, (w * raw[:, -last:]).sum(1, keepdim=True)), 1)
        keep = max(window, (t + 1) % ratio + (ratio if overlap else 0))
        raw, s = raw[:, -keep:], s[:, -keep:]
        assert raw.numel() + entries.numel() == cached_numbers(t + 1, D, ratio, window, overlap)


def test_sizes_of_the_paper():
    """At 2^20 tokens, 512 wide: a quarter and a 128th of the entries, and a window of 128."""
    assert cached_numbers(2 ** 20, 512, 4, 128) == 512 * (2 ** 18 + 128)
    assert cached_numbers(2 ** 20, 512, 128, 128) == 512 * (2 ** 13 + 128)
    assert cached_numbers(2 ** 20, 512, 4, 128, index_width=128) == 640 * 2 ** 18 + 512 * 128
    assert cached_numbers(100, 512, 4, 128) == 512 * 125


def test_gradients_reach_kv_and_scores():
    x = [y.requires_grad_() for y in inputs(14)]
    whole(x, 4, 2, 4, True).sum().backward()
    q, kv, scores, index_q, *_ = x
    assert all(y.grad.isfinite().all() and y.grad.abs().max() > 0 for y in (q, kv, scores))
    assert index_q.grad is None                   # a choice has no gradient


def test_what_cannot_be_meant():
    q, kv, *_ = inputs(8)
    for run, message in ((lambda: csa(q, kv, 0, 1, 4, 1.0), "ratio is 0; it must be a positive"),
                         (lambda: hca(q, kv, 4, 0, 1.0), "window is 0; it must be a positive"),
                         (lambda: csa(q, kv, 4, -1, 4, 1.0), "top_k is -1"),
                         (lambda: csa(q, kv[:, :7], 4, 1, 4, 1.0), "with T at most S"),
                         (lambda: hca(q, kv[..., :3], 4, 4, 1.0), "with T at most S"),
                         (lambda: compress(kv, 4, torch.zeros(2, 7)), "scores"),
                         (lambda: csa(q, kv, 4, 1, 4, 1.0, index_k=kv), r"index_k \[2, 8, 4\]; they must be \[B, I, 8, K\] and \[B, 2, K\]"),
                         (lambda: cached_numbers(5, 4, 2, 0), "window is 0")):
        with pytest.raises(k3.InputError, match=message):
            run()
