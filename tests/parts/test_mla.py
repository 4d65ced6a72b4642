"""MLA: by hand, expanded against absorbed, through the cache, and what the 64-wide slot is not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.cache import LatentCache


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(q_lora_rank=10, output_gate=True, rope_base=None):
    torch.manual_seed(0)
    mla = k3.MLA(24, num_heads=3, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
                 q_lora_rank=q_lora_rank, output_gate=output_gate, rope_base=rope_base).double()
    with torch.no_grad():
        for p in mla.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return mla


@pytest.mark.parametrize("q_lora_rank, output_gate", [(10, True), (None, True), (10, False), (None, False)])
def test_whole_layer_by_hand(q_lora_rank, output_gate):
    mla, x = layer(q_lora_rank, output_gate), rand(7, 24, seed=3)
    P = {n.removesuffix(".weight"): p.detach() for n, p in mla.named_parameters()}
    norm = lambda y, w: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
    q = x @ P["q_proj"].T if q_lora_rank is None else norm(x @ P["q_a_proj"].T, P["q_a_layernorm"]) @ P["q_b_proj"].T
    c = x @ P["kv_a_proj_with_mqa"].T
    shared = c[:, 14:]                                                         # neither normed nor rotated
    kv = (norm(c[:, :14], P["kv_a_layernorm"]) @ P["kv_b_proj"].T).view(7, 3, 11)
    q = q.view(7, 3, 10)
    o = torch.zeros(7, 3, 5, dtype=torch.float64)
    for h in range(3):
        k = torch.cat((kv[:, h, :6], shared), -1)
        for t in range(7):
            a = torch.softmax(k[:t + 1] @ q[t, h] / 10 ** 0.5, 0)              # sqrt(6 + 4)
            o[t, h] = a @ kv[:t + 1, h, 6:]
    o = o.flatten(1)
    if output_gate:
        o = o * torch.sigmoid(x @ P["g_proj"].T)
    assert_close(mla(x[None])[0].detach(), o @ P["o_proj"].T, atol=1e-12, rtol=0)


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 6), past=st.integers(0, 9), seed=st.integers(0, 99), padded=st.booleans())
def test_absorbed_equals_expanded(T, past, seed, padded):
    B, H, N, R, V, L, S = 2, 3, 6, 4, 5, 14, past + T
    q, latent, kv_b = rand(B, H, T, N + R, seed=seed), rand(B, S, L + R, seed=seed + 1), rand(H, N + V, L, seed=seed + 2)
    mask = None
    if padded:
        valid = torch.arange(S) >= torch.tensor([[0], [min(2, S - 1)]])
        mask = k3.causal_mask(T, S, valid)
    args = q, latent, kv_b, V, 0.2, mask
    assert_close(k3.mla_absorbed(*args), k3.mla_expanded(*args), atol=1e-11, rtol=0)


@pytest.mark.parametrize("rope_base", [None, 10.0])
@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 6], [11, 1]])
def test_cache_holds_latents_only(cuts, rope_base):
    mla, x, cache = layer(rope_base=rope_base), rand(2, 12, 24), LatentCache()
    parts = torch.cat([mla(p, state=cache) for p in x.split(cuts, 1)], 1)
    assert_close(parts, mla(x), atol=1e-11, rtol=0)
    assert cache.rows.shape == (2, 12, 14 + 4)


def test_both_forms_are_used_in_decoding(monkeypatch):
    import k3_teach.parts.mla as module
    seen = []
    monkeypatch.setattr(module, "mla_absorbed", lambda *a: seen.append("absorbed") or k3.mla_absorbed(*a))
    monkeypatch.setattr(module, "mla_expanded", lambda *a: seen.append("expanded") or k3.mla_expanded(*a))
    mla, cache = layer(), LatentCache()
    mla(rand(1, 9, 24), state=cache)
    mla(rand(1, 1, 24), state=cache)
    assert seen == ["expanded", "absorbed"]


def multiply_adds(form, T, S, H=2, L=14, N=6, R=4, V=5):
    """What `form` multiplies, counted by torch in the unfused attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    q, latent, kv_b = rand(1, H, T, N + R), rand(1, S, L + R), rand(H, N + V, L)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        form(q, latent, kv_b, V, 0.2, torch.ones(1, 1, T, S, dtype=torch.bool))
    width, padded = (2 * L + R, 2 * (L + R)) if form is k3.mla_absorbed else (N + R + V, 2 * (N + R))
    return counter.get_total_flops() // 2 + H * T * S * (width - padded)    # zeros that it is padded with do not count


@pytest.mark.parametrize("T, S", [(1, 1), (1, 2), (1, 40), (3, 4), (4, 40), (7, 9), (7, 40), (8, 40), (9, 40), (40, 40)])
def test_the_form_with_fewer_multiply_adds_is_chosen(T, S):
    absorbed, expanded = (multiply_adds(form, T, S) for form in (k3.mla_absorbed, k3.mla_expanded))
    assert layer().prefers_absorbed(T, S) == (absorbed < expanded)


def test_released_sizes_prefer_absorbed_up_to_170_tokens():
    """1/T - 1/S against 1/170.7: at most 170 of very many, and fewer of few."""
    mla = k3.MLA(8, 96, 512, 128, 64, 128).to("meta")
    most = lambda S: max(T for T in range(1, S) if mla.prefers_absorbed(T, S))
    assert [most(S) for S in (2, 171, 401, 1000)] == [1, 85, 119, 145]
    assert mla.prefers_absorbed(170, 10 ** 6) and not mla.prefers_absorbed(171, 10 ** 6) and not mla.prefers_absorbed(9, 9)


def test_padding_of_any_content_changes_nothing():
    mla, x = layer(), rand(2, 9, 24)
    mask = torch.tensor([[False] * 4 + [True] * 5, [True] * 9])
    x[0, :4] = torch.nan
    y = mla(x, mask=mask)
    assert_close(y[0, 4:], mla(x[:1, 4:])[0], atol=1e-12, rtol=0)
    assert y.isfinite().all()


def test_norms_inside_have_their_own_eps():
    """Pitfall 35: 1e-6, whatever rms_norm_eps is. Seen at latents of size 1e-3."""
    mla = layer()
    with torch.no_grad():
        mla.kv_a_proj_with_mqa.weight.mul_(1e-4)
    x = rand(1, 3, 24)
    c = (x @ mla.kv_a_proj_with_mqa.weight.T)[..., :14]
    expected = c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mla.kv_a_layernorm.weight
    assert_close(mla.latents(x)[..., :14], expected, atol=1e-12, rtol=0)
    wrong = c / (c.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mla.kv_a_layernorm.weight
    assert (wrong - expected).abs().max() > 0.1


def test_positions_count_real_tokens_only():
    """RoPE with left padding: the row alone and the padded row agree."""
    mla, x = layer(rope_base=10.0), rand(2, 9, 24)
    mask = torch.tensor([[False] * 4 + [True] * 5, [True] * 9])
    assert_close(mla(x, mask=mask)[0, 4:], mla(x[:1, 4:])[0], atol=1e-12, rtol=0)
    assert (mla(x)[0] - layer()(x)[0]).abs().max() > 1e-3        # and rotation does something
