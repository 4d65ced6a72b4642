"""The chunkwise form against the recurrence: output, state and every gradient, at the extremes of the gate."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts.kda import SEGMENT
from k3_teach.parts.kda_chunk import decays, tiling
from k3_teach.scale.measure import peak_memory

NAMES = ["o", "S", "dq", "dk", "dv", "dg", "dbeta", "dS"]


def inputs(T, B=2, H=3, K=16, V=12, gate="mixed", seed=0, similar_keys=False):
    """Random inputs in float64, with an initial state. K differs from V, so that a transposed state cannot pass."""
    r = torch.Generator().manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=r, dtype=torch.float64)
    rand = lambda *s: torch.rand(*s, generator=r, dtype=torch.float64)
    k = randn(B, T, H, K)
    if similar_keys:
        k = k[:, :1] + 0.1 * k
    g = {"mixed": lambda s: -5 * rand(*s), "floor": lambda s: torch.full(s, -5.0, dtype=torch.float64),
         "zero": lambda s: torch.zeros(s, dtype=torch.float64), "slow": lambda s: -1e-3 * rand(*s),
         "one dead channel": lambda s: torch.where(torch.arange(K) == 2, -5.0, -0.1 * rand(*s)),
         "deep": lambda s: torch.full(s, -60.0, dtype=torch.float64), "mixed deep": lambda s: -60 * rand(*s),
         "deep among slow": lambda s: torch.where(rand(*s) < 0.3, -60.0, -1e-3 * rand(*s)),
         "bursts": lambda s: torch.where(rand(s[0], s[1], s[2], 1) < 0.1, -300.0, -0.05 * rand(*s))}[gate]((B, T, H, K))
    beta = torch.full((B, T, H), 0.999, dtype=torch.float64) if similar_keys else rand(B, T, H)
    return F.normalize(randn(B, T, H, K), dim=-1) * K ** -0.5, F.normalize(k, dim=-1), randn(B, T, H, V), g, beta, randn(B, H, K, V)


def with_gradients(fn, args, dtype, **options):
    args = [a.to(dtype, copy=True).requires_grad_() for a in args]
    o, S = fn(*args, **options)
    wo, wS = (torch.linspace(-1, 1, x.numel(), dtype=torch.float64).cos().view_as(x).to(dtype) for x in (o, S))
    ((o * wo).sum() + (S * wS).sum()).backward()
    return [o.detach(), S.detach(), *(a.grad for a in args)]


def relative(actual, expected):
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


BOUNDED = ["mixed", "floor", "zero", "one dead channel"]
DEEP = ["deep", "mixed deep", "deep among slow", "bursts"]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("gate, bound", [(g, b) for g in BOUNDED for b in (-5.0, None)] + [(g, None) for g in DEEP])
@pytest.mark.parametrize("T", [1, 31, 64, 75])
def test_chunks_equal_the_recurrence(gate, bound, T, dtype, tolerance):
    args = inputs(T, gate=gate)
    expected = with_gradients(k3.recurrent_kda, args, torch.float64)
    actual = with_gradients(k3.chunk_kda, args, dtype, gate_lower_bound=bound)
    for name, a, e in zip(NAMES, actual, expected):
        assert a.isfinite().all(), name
        if a.isfinite().all() and e.abs().max() > 1e-20:
            assert relative(a, e) < tolerance, name


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_slow_decay_with_similar_keys(dtype, tolerance):
    """Pitfalls 8 and 9: an inverse by powers of A cancels 1e16 against 1e16 here; substitution does not."""
    args = inputs(200, gate="slow", similar_keys=True)
    expected = with_gradients(k3.recurrent_kda, args, torch.float64)
    for name, a, e in zip(NAMES, with_gradients(k3.chunk_kda, args, dtype, gate_lower_bound=-5.0), expected):
        assert relative(a, e) < tolerance, name


def test_recurrence_against_numpy():
    """The equation once more, in another library, one head at a time."""
    q, k, v, g, beta, S0 = inputs(9)
    o, S = k3.recurrent_kda(q, k, v, g, beta, S0)
    for b, h in np.ndindex(2, 3):
        M = S0[b, h].numpy().copy()
        for t in range(9):
            M = np.diag(np.exp(g[b, t, h].numpy())) @ M
            kt = k[b, t, h].numpy()
            M = M + beta[b, t, h].item() * np.outer(kt, v[b, t, h].numpy() - M.T @ kt)
            np.testing.assert_allclose(o[b, t, h].numpy(), M.T @ q[b, t, h].numpy(), atol=1e-13)
        np.testing.assert_allclose(S[b, h].numpy(), M, atol=1e-13)


def test_gradients_cross_segments():
    """Pitfall 39: a long text is worked on in segments; gradients must pass from one to the one before."""
    args = inputs(300, B=4, H=1, K=4, V=3)
    assert 300 > max(128, SEGMENT // 4)
    expected = with_gradients(k3.recurrent_kda, args, torch.float64)
    for name, a, e in zip(NAMES, with_gradients(k3.chunk_kda, args, torch.float64), expected):
        assert relative(a, e) < 1e-12, name


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 90), chunk=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]), seed=st.integers(0, 99),
       gate=st.sampled_from(BOUNDED + ["slow"]), bound=st.sampled_from([None, -5.0]))
def test_chunk_size_does_not_matter(T, chunk, seed, gate, bound):
    args = inputs(T, B=1, H=2, K=4, V=3, gate=gate, seed=seed)
    for a, e in zip(k3.chunk_kda(*args, chunk_size=chunk, gate_lower_bound=bound), k3.recurrent_kda(*args)):
        assert_close(a, e, atol=1e-12, rtol=0)


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(1, 79), seed=st.integers(0, 99))
def test_state_carries_everything(cut, seed):
    args = inputs(80, B=1, gate="mixed", seed=seed)
    o, S = k3.chunk_kda(*args)
    first = k3.chunk_kda(*(x[:, :cut] for x in args[:5]), args[5])
    second = k3.chunk_kda(*(x[:, cut:] for x in args[:5]), first[1])
    assert_close(torch.cat((first[0], second[0]), 1), o, atol=1e-12, rtol=0)
    assert_close(second[1], S, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_future_changes_no_bit(bound, dtype):
    """Pitfall 12: with decays counted from a later token, a later gate would change earlier results by rounding."""
    P = 45
    args = [a.to(dtype) for a in inputs(70)]
    changed = [a.clone() for a in args]
    changed[3][:, P:] = -5 * torch.rand_like(args[3][:, P:])
    results = []
    for xs in (args, changed):
        xs = [x.requires_grad_() for x in xs]
        o, _ = k3.chunk_kda(*xs, gate_lower_bound=bound)
        o[:, :P].sum().backward()
        results.append([o[:, :P].detach(), *(x.grad[:, :P] for x in xs[:5])])
    for name, a, b in zip(["o", *NAMES[2:]], *results):
        assert torch.equal(a, b), name


def test_large_values_and_gradients_at_the_floor():
    """A loss scale of 2^16 on values of 100, every gate at -5, float32: nothing overflows on the way back."""
    q, k, v, g, beta, S = inputs(64, gate="floor")
    args = q, k, v * 100, g, beta, S
    scaled = lambda fn, dtype, **options: with_gradients(lambda *a, **o: [x * 2.0 ** 16 for x in fn(*a, **o)], args, dtype, **options)
    for name, a, e in zip(NAMES, scaled(k3.chunk_kda, torch.float32, gate_lower_bound=-5.0), scaled(k3.recurrent_kda, torch.float64)):
        assert a.isfinite().all() and relative(a, e) < 1e-5, name


def test_long_memory_in_float32():
    """Pitfall 7: a decay of 0.99992 must not become 1. 4096 steps, against float64."""
    T, K = 4096, 8
    q, k, v, _, beta, S = inputs(T, B=1, H=1, K=K, V=4)
    args = q, k, v, torch.full((1, T, 1, K), float(np.log(0.99992)), dtype=torch.float64), beta, S
    expected = k3.recurrent_kda(*args)
    for fn in (k3.recurrent_kda, k3.chunk_kda):
        assert relative(fn(*(a.float() for a in args))[1], expected[1]) < 1e-5


def test_everything_is_float32_in_a_bfloat16_model():
    args = [a.bfloat16() for a in inputs(40)]
    for fn in (k3.recurrent_kda, k3.chunk_kda):
        o, S = fn(*args)
        assert o.dtype == S.dtype == torch.float32
        e = k3.recurrent_kda(*(a.double() for a in args))
        assert relative(o, e[0]) < 1e-5 and relative(S, e[1]) < 1e-5


@pytest.mark.parametrize("C, bound, dtype, tile, lift", [
    (32, -5.0, torch.float32, 16, 54), (64, -5.0, torch.float64, 64, 227), (16, -44.0, torch.float32, 2, 32),
    (32, -100.0, torch.float32, 1, 0), (32, -0.1, torch.float32, 32, 2)])
def test_tiles_stay_in_range(C, bound, dtype, tile, lift):
    assert tiling(C, bound, torch.zeros(1, dtype=dtype))[:2] == (tile, 2.0 ** lift)


@pytest.mark.parametrize("bound", [0.0, 1.0, float("nan"), -float("inf")])
def test_a_bound_is_a_negative_number(bound):
    with pytest.raises(k3.InputError, match="gate_lower_bound is"):
        k3.chunk_kda(*inputs(3), gate_lower_bound=bound)


@pytest.mark.parametrize("tile", [1, 2, 8])
def test_decays_against_the_sum(tile):
    """up, bridge and down between every two tokens; enter and leave from the ends of the chunk."""
    _, _, _, g, _, _ = inputs(8, B=1, H=1, K=5)
    g = g[0, :, 0]
    cut = tiling(8, {1: -700.0, 2: -400.0, 8: -5.0}[tile], g)
    assert cut.tile == tile
    d = decays(g[None, None], cut)
    up, down = (x[0, 0].flatten(0, 1) for x in (d.up, d.down))
    for i in range(8):
        I = i // tile
        assert_close(up[i] * d.enter[0, 0, I, 0], g[:i + 1].sum(0).exp(), atol=0, rtol=1e-13)
        assert_close(down[i] * d.leave[0, 0, I, 0], g[i + 1:].sum(0).exp(), atol=0, rtol=1e-13)
        for j in range(8):
            e = g[j + 1:i + 1].sum(0).exp() if j // tile <= I else torch.zeros(5, dtype=torch.float64)
            if j <= i or j // tile > I:     # within a tile, later columns are cut off by `scores`
                assert_close(up[i] * d.bridge[0, 0, I, j // tile, 0] * down[j], e, atol=0, rtol=1e-13)
    assert_close(d.whole[0, 0, :, 0], g.sum(0).exp(), atol=0, rtol=1e-13)


def test_gates_without_a_bound_forget_everything():
    """Below -44 (float64: -320) a gate counts as that, which no result can show."""
    q, k, v, _, beta, S = inputs(40)
    g = torch.full_like(q, -1e4)
    for dtype in (torch.float32, torch.float64):
        args = [a.to(dtype) for a in (q, k, v, g, beta, S)]
        for a, e in zip(with_gradients(k3.chunk_kda, args, dtype), with_gradients(k3.recurrent_kda, args, dtype)):
            assert_close(a, e, atol=1e-6 if dtype == torch.float32 else 1e-14, rtol=0)


@pytest.mark.parametrize("dtype, gate", [(torch.float32, -40.0), (torch.float64, -300.0)])
def test_gates_above_that_are_taken_as_they_are(dtype, gate):
    """Nothing is written, so what is read is the old state, however faint."""
    q, k, v, _, _, S = (x.to(dtype) for x in inputs(1))
    o, _ = k3.chunk_kda(q, k, v, torch.full_like(q, gate), torch.zeros(2, 1, 3, dtype=dtype), S)
    expected = torch.einsum("bhkv,bhk->bhv", S, q[:, 0]) * np.exp(gate)
    assert_close(o[:, 0], expected, atol=0, rtol=1e-4 if dtype == torch.float32 else 1e-11)


def test_memory_is_that_of_a_segment():
    """Beyond its output, a longer text needs no more."""
    beyond = []
    for T in (1024, 4096):
        args = [a.float() for a in inputs(T, B=1, H=2, K=16, V=16)]
        run = lambda: k3.chunk_kda(*args, gate_lower_bound=-5.0)
        beyond.append(peak_memory(run) - 2 * 4 * args[2].numel())     # the parts, then the whole
    assert beyond[1] < 1.1 * beyond[0]


def test_gradcheck():
    """The gradient written by hand against finite differences."""
    args = [a.requires_grad_() for a in inputs(11, B=2, H=2, K=3, V=2)]
    fn = lambda *a: k3.chunk_kda(*a, chunk_size=4, gate_lower_bound=-5.0)
    assert torch.autograd.gradcheck(fn, args, atol=1e-6)
    with pytest.raises(k3.InputError, match="no second derivative"):
        torch.autograd.grad(fn(*args)[0].sum(), args, create_graph=True)


def test_gradient_of_the_gate_where_it_is_shut():
    """At the floor a token remembers e^-5 of the one before: what has no decay must not enter and cancel again."""
    args = inputs(75, gate="floor")
    expected = with_gradients(k3.recurrent_kda, args, torch.float64)[5]
    actual = with_gradients(k3.chunk_kda, args, torch.float32, gate_lower_bound=-5.0)[5]
    assert relative(actual, expected) < 1e-6


@pytest.mark.parametrize("change, message", [
    (dict(k=torch.zeros(1, 4, 2, 5)), "k is torch.float32"), (dict(g=torch.zeros(1, 4, 2, 1)), "g is torch.float32"),
    (dict(beta=torch.zeros(1, 4)), "beta is torch.float32"), (dict(v=torch.zeros(1, 3, 2, 6)), "v is torch.float32"),
    (dict(initial_state=torch.zeros(1, 2, 6, 4)), "initial_state is torch.float32"),
    (dict(q=torch.zeros(1, 0, 2, 4)), "q is torch.float32"), (dict(chunk_size=12), "power of two"), (dict(chunk_size=0), "power of two")])
def test_errors_name_what_is_wrong(change, message):
    z = lambda *s: torch.zeros(s)
    args = dict(q=z(1, 4, 2, 4), k=z(1, 4, 2, 4), v=z(1, 4, 2, 6), g=z(1, 4, 2, 4), beta=z(1, 4, 2), initial_state=z(1, 2, 4, 6))
    with pytest.raises(k3.InputError, match=message):
        k3.chunk_kda(**(args | change))
