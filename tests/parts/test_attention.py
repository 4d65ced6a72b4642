"""Attention by loops, the mask, sharing of heads, RoPE."""

import math

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.cache import LatentCache
from k3_teach.parts.attention import attention_weights


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_by_loops(q, k, v, scale):
    (B, H, T, _), S = q.shape, k.shape[2]
    out = torch.zeros(B, H, T, v.shape[-1], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                visible = range(S - T + t + 1)
                e = [math.exp(scale * (q[b, h, t] @ k[b, h, j]).item()) for j in visible]
                out[b, h, t] = sum(e[j] / sum(e) * v[b, h, j] for j in visible)
    return out


@pytest.mark.parametrize("T, S, D, V", [(5, 5, 6, 6), (5, 5, 6, 4), (5, 5, 4, 6), (1, 7, 6, 4), (3, 7, 6, 4), (1, 1, 6, 4)])
def test_fused_and_eager_equal_the_loops(T, S, D, V):
    q, k, v = rand(2, 3, T, D), rand(2, 3, S, D, seed=1), rand(2, 3, S, V, seed=2)
    expected = attention_by_loops(q, k, v, 0.3)
    assert_close(k3.attention(q, k, v, 0.3), expected, atol=1e-12, rtol=0)
    assert_close(k3.attention_eager(q, k, v, 0.3), expected, atol=1e-12, rtol=0)


def test_padding_is_seen_by_itself_only():
    mask = k3.causal_mask(4, 4, torch.tensor([[False, False, True, True]]))
    assert mask[0, 0].tolist() == [[True, False, False, False], [False, True, False, False], [False, False, True, False], [False, False, True, True]]
    w = attention_weights(rand(1, 1, 4, 3), rand(1, 1, 4, 3, seed=1), 1.0, mask)
    assert w.isfinite().all() and (w[0, 0, 2:, :2] == 0).all()


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("rope_base", [None, 100.0])
def test_mha_gqa_mqa_decode_what_they_prefill(groups, rope_base):
    torch.manual_seed(0)
    layer, x, cache = k3.GroupedQueryAttention(20, 6, groups, 4, rope_base).double(), rand(2, 9, 20), LatentCache()
    full = layer(x)
    parts = torch.cat([layer(p, state=cache) for p in x.split([4, 1, 1, 3], 1)], 1)
    assert_close(parts, full, atol=1e-12, rtol=0)
    assert cache.rows.shape == (2, 9, 2 * groups * 4)     # what each way of sharing keeps per token


def test_gqa_is_mha_with_repeated_heads():
    """Copying the shared keys and values to every head of a group gives MHA with the same output."""
    torch.manual_seed(0)
    gqa, mha, x = k3.GroupedQueryAttention(12, 4, 2, 3).double(), k3.GroupedQueryAttention(12, 4, 4, 3).double(), rand(1, 6, 12)
    shared = gqa.kv_proj.weight.view(2, 2, 3, 12)
    mha.load_state_dict({"q_proj.weight": gqa.q_proj.weight, "o_proj.weight": gqa.o_proj.weight,
                         "kv_proj.weight": shared.repeat_interleave(2, 1).reshape(-1, 12)})
    assert_close(mha(x), gqa(x), atol=1e-13, rtol=0)


def test_heads_must_be_divisible():
    with pytest.raises(k3.InputError, match="must divide num_heads"):
        k3.GroupedQueryAttention(12, 4, 3, 3)


def test_rope_depends_on_the_difference_only():
    q, k = rand(1, 8), rand(1, 8, seed=1)
    score = lambda m, n: (k3.apply_rope(q, k3.rope_angles(torch.tensor([m]), 8)) * k3.apply_rope(k, k3.rope_angles(torch.tensor([n]), 8))).sum()
    assert_close(score(3, 10), score(103, 110), atol=1e-10, rtol=0)
    assert (score(3, 10) - score(3, 11)).abs() > 1e-3


def test_rope_of_30_degrees():
    """(1, 0) at positions 0, 1, 2 against itself: 1, cos 30, cos 60."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(3, 2)
    y = k3.apply_rope(x, (torch.arange(3) * math.radians(30))[:, None].double())
    assert_close(y @ y[0], torch.tensor([1.0, math.sqrt(3) / 2, 0.5], dtype=torch.float64))


def test_rope_needs_pairs():
    with pytest.raises(k3.InputError, match="even"):
        k3.rope_angles(torch.arange(3), 5)


def test_shapes_that_do_not_belong_together():
    for q, k, v in (((1, 1, 2, 8), (1, 1, 2, 5), (1, 1, 2, 5)), ((1, 1, 3, 4), (1, 1, 2, 4), (1, 1, 2, 4)), ((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 2, 4))):
        with pytest.raises(k3.InputError, match="must (be floats|end in)"):
            k3.attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), 1.0)
