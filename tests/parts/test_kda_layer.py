"""Convolution, gates and norms of the KDA layer against torch's own operators and hand-written formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import k3_teach as k3


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("T, W", [(1, 4), (2, 4), (9, 4), (5, 1), (6, 3)])
def test_short_conv_equals_conv1d(T, W):
    x, w = rand(2, T, 6), rand(6, 1, W, seed=1)
    y, _ = k3.short_conv(x, w)
    e = F.silu(F.conv1d(x.mT, w, padding=W - 1, groups=6)[..., :T]).mT
    assert_close(y, e, atol=1e-14, rtol=0)


def test_short_conv_has_the_gradients_of_conv1d():
    x, w, weigh = rand(2, 9, 6).requires_grad_(), rand(6, 1, 4, seed=1).requires_grad_(), rand(2, 9, 6, seed=2)
    y = F.silu(F.conv1d(x.mT, w, padding=3, groups=6)[..., :9]).mT
    expected = torch.autograd.grad((weigh * y).sum(), (x, w))
    for a, b in zip(torch.autograd.grad((weigh * k3.short_conv(x, w)[0]).sum(), (x, w)), expected):
        assert_close(a, b, atol=1e-13, rtol=0)


def test_short_conv_rounds_once():
    """Inputs in bfloat16, weights as the release has them, in float32, and one cast at the end."""
    x, w = rand(2, 9, 6).bfloat16(), rand(6, 1, 4, seed=1).float()
    y, taps = k3.short_conv(x, w)
    assert torch.equal(y, k3.short_conv(x.float(), w)[0].bfloat16())
    assert torch.equal(taps, x[:, -3:])


@pytest.mark.parametrize("cuts", [[1] * 9, [2, 7], [8, 1], [3, 3, 3]])
def test_short_conv_continues_from_its_taps(cuts):
    x, w = rand(2, 9, 6), rand(6, 1, 4, seed=1)
    taps, out = None, []
    for part in x.split(cuts, 1):
        y, taps = k3.short_conv(part, w, taps)
        out.append(y)
    assert taps.shape == (2, 3, 6)
    assert_close(torch.cat(out, 1), k3.short_conv(x, w)[0], atol=1e-15, rtol=0)


def test_last_tap_is_the_current_token():
    x, w = torch.tensor([[[1.0], [10.0], [100.0]]]), torch.tensor([[[0.0, 0.0, 0.5, 2.0]]])
    y, taps = k3.short_conv(x, w)
    assert_close(y[0, :, 0], F.silu(torch.tensor([2.0, 20.5, 205.0])))
    assert taps[0, :, 0].tolist() == [1, 10, 100]


def test_l2_eps_is_on_the_sum():
    """Pitfall 6. At |x| = 1e-3 the eps matters: on the mean it would be 128 times as large."""
    x = 1e-3 * F.normalize(rand(5, 128), dim=-1)
    assert_close(k3.l2_normalize(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), atol=1e-12, rtol=0)
    assert_close(k3.l2_normalize(x).norm(dim=-1), torch.full((5,), 1 / math.sqrt(2), dtype=torch.float64), atol=1e-9, rtol=0)


def test_bounded_gate_is_a_scaled_sigmoid_and_no_clamp():
    """Pitfalls 2 and 3: A_log is per head, the bias is inside the product, and a clamped softplus is another function."""
    z, A, bias = rand(1, 2, 3, 4) * 8, torch.tensor([-0.5, 0.0, 1.0], dtype=torch.float64), rand(3, 4, seed=2)
    g = k3.bounded_gate(z, A, bias, -5.0)
    for h in range(3):
        for c in range(4):
            e = -5 / (1 + torch.exp(-math.exp(A[h]) * (z[0, :, h, c] + bias[h, c])))
            assert_close(g[0, :, h, c], e, atol=1e-12, rtol=0)
    clamp = k3.softplus_gate(z, A, bias).clamp_min(-5)
    assert (g - clamp).abs().max() > 0.1
    assert -5 <= g.min() and g.max() <= 0


def test_softplus_gate_is_kimi_linears():
    """Pitfall 4."""
    z, A, bias = rand(1, 2, 3, 4), rand(3, seed=1), rand(3, 4, seed=2)
    e = -A.exp()[:, None] * torch.log1p(torch.exp(z + bias))
    assert_close(k3.softplus_gate(z, A, bias), e, atol=1e-12, rtol=0)


def layer(**options):
    torch.manual_seed(0)
    kda = k3.KDA(24, num_heads=3, head_dim=8, **options).double()
    with torch.no_grad():
        for p in kda.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return kda


@pytest.mark.parametrize("options", [{}, dict(gate_lower_bound=None), dict(full_rank_gate=False), dict(conv_size=2)])
def test_whole_layer_by_hand(options):
    """Every step of the layer, head by head and token by token, with nothing of the package but the parameters."""
    kda, x = layer(**options), rand(1, 7, 24, seed=3)
    P = {n: p.detach() for n, p in kda.named_parameters()}
    lin = lambda name: x @ P[f"{name}_proj.weight"].T
    conv = lambda name: F.silu(F.conv1d(lin(name).mT, P[f"{name}_conv1d.weight"], padding=P[f"{name}_conv1d.weight"].shape[-1] - 1, groups=24)[..., :7]).mT
    q, k, v = (conv(n)[0].view(7, 3, 8) for n in "qkv")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = (lin("f_a") @ P["f_b_proj.weight"].T)[0].view(7, 3, 8) + P["dt_bias"].view(3, 8)
    A = P["A_log"].exp()[:, None]
    g = -A * F.softplus(z) if options.get("gate_lower_bound", 1) is None else -5 * torch.sigmoid(A * z)
    beta = torch.sigmoid(lin("b")[0])
    gate = lin("g")[0] if "g_proj.weight" in P else (lin("g_a") @ P["g_b_proj.weight"].T)[0]
    out = torch.zeros(7, 3, 8, dtype=torch.float64)
    for h in range(3):
        S = torch.zeros(8, 8, dtype=torch.float64)
        for t in range(7):
            S = g[t, h].exp()[:, None] * S
            S = S + torch.outer(k[t, h], beta[t, h] * (v[t, h] - S.T @ k[t, h]))
            o = S.T @ q[t, h] / math.sqrt(8)
            out[t, h] = o / (o.square().mean() + 1e-5).sqrt() * P["o_norm.weight"] * torch.sigmoid(gate.view(7, 3, 8)[t, h])
    assert_close(kda(x)[0].detach(), out.flatten(1) @ P["o_proj.weight"].T, atol=1e-11, rtol=0)


def test_bfloat16_layer_keeps_what_the_release_keeps():
    """Pitfalls 28 and 31: A_log, dt_bias, convolutions and o_norm stay float32, and so do their bits."""
    kda = layer().float()
    before = {n: p.detach().clone() for n, p in kda.named_parameters()}
    kda.bfloat16()
    kept = {n for n, p in kda.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "o_norm.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}
    for n in kept:
        assert torch.equal(kda.get_parameter(n), before[n])
    assert kda(rand(1, 5, 24).bfloat16()).dtype == torch.bfloat16


def test_padding_of_any_content_changes_nothing():
    """Pitfalls 17 and 18: NaN in the padding."""
    kda, x = layer(), rand(2, 9, 24)
    mask = torch.tensor([[False] * 4 + [True] * 5, [True] * 9])
    x[0, :4] = torch.nan
    y = kda(x, mask=mask)
    assert_close(y[0, 4:], kda(x[:1, 4:])[0], atol=1e-12, rtol=0)


def test_padding_on_either_side_leaves_the_state_alone():
    from k3_teach.cache import KDAState
    kda, x = layer(), rand(1, 9, 24)
    states = [KDAState() for _ in range(3)]
    kda(x[:, 2:6], state=states[0])
    kda(x[:, :6], state=states[1], mask=torch.tensor([[False] * 2 + [True] * 4]))
    kda(x[:, 2:], state=states[2], mask=torch.tensor([[True] * 4 + [False] * 3]))
    assert_close(states[1].S, states[0].S, atol=1e-12, rtol=0)
    assert_close(states[2].S, states[0].S, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_layer_passes_on_what_its_gate_promises(bound, monkeypatch):
    """Without the promise the result is the same, only later."""
    seen = []
    plain = k3.chunk_kda

    def watched(*args, **options):
        seen.append(options["gate_lower_bound"])
        return plain(*args, **options)

    monkeypatch.setattr("k3_teach.parts.kda_layer.chunk_kda", watched)
    k3.KDA(16, 2, 8, gate_lower_bound=bound)(torch.zeros(1, 3, 16))
    assert seen == [bound]
