"""Muon: against the SVD, a scalar polynomial and numpy; QK-Clip through the MLA layer itself."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import k3_teach as k3
from k3_teach.parts.mla import expand
from k3_teach.train import muon
from k3_teach.train.muon import COEFFICIENTS, Muon, muon_direction, newton_schulz, orthogonalize_exact, per_head


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_values(s, m, n, seed=0):
    """A matrix with singular values s, and its U [m, r], V^T [r, n]."""
    U, _, Vh = torch.linalg.svd(rand(m, n, seed=seed), full_matrices=False)
    return (U * s) @ Vh, U, Vh


def polynomial(s, steps, coefficients=COEFFICIENTS):
    """What the iteration does to one singular value, in numbers."""
    a, b, c = coefficients
    for _ in range(steps):
        s = a * s + b * s ** 3 + c * s ** 5
    return s


# --- Newton-Schulz -------------------------------------------------------------------------------------------------

@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 9), n=st.integers(1, 9), steps=st.integers(0, 7), seed=st.integers(0, 99))
def test_acts_on_singular_values_only(m, n, steps, seed):
    s = torch.linspace(1, 0.05, min(m, n), dtype=torch.float64)
    G, U, Vh = with_values(s, m, n, seed)
    assert_close(newton_schulz(G, steps), (U * polynomial(s / s.norm(), steps)) @ Vh, atol=1e-10, rtol=0)


def test_other_coefficients_reach_one():
    """(3/2, -1/2, 0) is the classical iteration: it converges to the polar factor."""
    G = rand(5, 8)
    assert_close(newton_schulz(G, 30, (1.5, -0.5, 0.0)), orthogonalize_exact(G), atol=1e-12, rtol=0)


def test_range_after_five_steps():
    """Values from 1 to 0.001: the smallest is at 0.21 after 5 steps, and most are not at 1."""
    s = torch.logspace(0, -3, 64, dtype=torch.float64)
    G, _, _ = with_values(s, 64, 64)
    after = {steps: torch.linalg.svdvals(newton_schulz(G, steps)) for steps in (1, 3, 5, 10)}
    ends = {steps: (round(float(v.min()), 3), round(float(v.max()), 3)) for steps, v in after.items()}
    assert ends == {1: (0.002, 1.146), 3: (0.018, 1.202), 5: (0.214, 1.201), 10: (0.682, 1.134)}
    assert round(float(((after[5] > 0.7) & (after[5] < 1.2)).double().mean()), 2) == 0.69


def test_what_is_above_068_stays_there():
    """The claim of the docstring: [0.68, 1.21] is mapped into itself, and nothing from below overshoots it."""
    inside, below = np.linspace(0.68, 1.21, 10001), np.linspace(0, 0.68, 10001)
    assert polynomial(inside, 1).min() >= 0.68 and polynomial(inside, 1).max() <= 1.21 and polynomial(below, 1).max() <= 1.21


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 9), n=st.integers(1, 9), seed=st.integers(0, 99))
def test_transposing_before_or_after_is_the_same(m, n, seed):
    G = rand(m, n, seed=seed)
    assert_close(newton_schulz(G.mT), newton_schulz(G).mT, atol=1e-12, rtol=0)
    assert_close(orthogonalize_exact(G.mT), orthogonalize_exact(G).mT, atol=1e-12, rtol=0)


def test_works_on_the_narrow_side():
    """5 rows, 5000 columns, and the other way round: no product is 5000 x 5000."""
    counts = []
    for shape in ((5, 5000), (5000, 5)):
        with FlopCounterMode(display=False) as flops:
            newton_schulz(rand(*shape))
        counts.append(flops.get_total_flops())
    assert counts[0] == counts[1] == 5 * 2 * (2 * 5 * 5 * 5000 + 5 ** 3)


@pytest.mark.parametrize("scale", [-4.0, 1e-30, 1e30])
@pytest.mark.parametrize("fn", [newton_schulz, orthogonalize_exact])
def test_scale_of_the_gradient_does_not_matter(fn, scale):
    """Also in float32 where squares of the entries are 0 or infinite."""
    G = rand(6, 4, dtype=torch.float32)
    assert_close(fn(G * scale), fn(G) * math.copysign(1, scale), atol=1e-5, rtol=0)


@pytest.mark.parametrize("fn", [newton_schulz, orthogonalize_exact, muon_direction])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_stays_zero_and_the_dtype_stays(fn, dtype):
    out = fn(torch.zeros(3, 4, dtype=dtype))
    assert out.dtype == dtype and torch.equal(out, torch.zeros(3, 4, dtype=dtype))


def test_bfloat16():
    """The dtype that large runs use: a few percent away, and no more."""
    G = rand(16, 32)
    out = newton_schulz(G.bfloat16())
    assert out.dtype == torch.bfloat16
    assert 1e-4 < (out.double() - newton_schulz(G)).norm() / newton_schulz(G).norm() < 0.05


def test_exact_is_the_nearest_orthogonal_matrix():
    G = rand(4, 7)
    O = orthogonalize_exact(G)
    assert_close(O @ O.mT, torch.eye(4, dtype=torch.float64), atol=1e-12, rtol=0)
    symmetric = O @ G.mT                                        # polar: G = (G O^T) O with a symmetric first factor, >= 0
    assert_close(symmetric, symmetric.mT, atol=1e-12, rtol=0)
    assert torch.linalg.eigvalsh(symmetric).min() > 0


def test_directions_that_are_not_there_are_not_made_up():
    G, U, Vh = with_values(torch.tensor([3.0, 0.5, 0, 0], dtype=torch.float64), 4, 6)
    assert_close(orthogonalize_exact(G), U[:, :2] @ Vh[:2], atol=1e-12, rtol=0)
    assert (torch.linalg.svdvals(newton_schulz(G)) > 1e-10).tolist() == [True, True, False, False]


@pytest.mark.parametrize("G", [torch.ones(3), torch.ones(2, 3, dtype=torch.int64), torch.ones(0, 3), torch.tensor(1.0)])
def test_no_matrix(G):
    for fn in (newton_schulz, orthogonalize_exact, lambda G: per_head(G, 1), muon_direction):
        with pytest.raises(k3.InputError, match=r"must be floats \[\.\.\., m, n\]"):
            fn(G)


def test_negative_steps():
    with pytest.raises(k3.InputError, match="steps is -1"):
        newton_schulz(torch.ones(2, 2), -1)


# --- per head, and the size of the update --------------------------------------------------------------------------

@pytest.mark.parametrize("fn", [newton_schulz, orthogonalize_exact])
def test_a_stack_and_the_heads_are_the_blocks_one_by_one(fn):
    G = rand(3, 4, 6)
    blocks = [fn(block) for block in G]
    assert_close(fn(G), torch.stack(blocks), atol=1e-12, rtol=0)
    assert_close(per_head(G.flatten(0, 1), 3, fn), torch.cat(blocks), atol=1e-12, rtol=0)
    assert_close(per_head(rand(2, 12, 6), 3, fn)[1], per_head(rand(2, 12, 6)[1], 3, fn), atol=1e-12, rtol=0)
    assert (per_head(G.flatten(0, 1), 3, fn) - fn(G.flatten(0, 1))).abs().max() > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_one_loud_head(seed):
    """A head with gradients 100 times as large: the whole matrix gives it about 1.5 times the update, per head none."""
    G = rand(4, 16, 32, seed=seed)
    G[3] *= 100
    G = G.flatten(0, 1)
    norms = lambda O: O.unflatten(0, (4, 16)).flatten(1).norm(dim=1)
    whole, heads = norms(newton_schulz(G)), norms(per_head(G, 4))
    assert 1.3 < whole[3] / whole[:3].mean() < 1.8
    assert heads.max() / heads.min() < 1.15
    assert_close(per_head(G, 4)[:48], per_head(G / 7, 4)[:48], atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_heads", [0, -1, 5])
def test_heads_that_do_not_divide(num_heads):
    with pytest.raises(k3.InputError, match=f"num_heads is {num_heads}; it must divide the 12 rows"):
        per_head(rand(12, 6), num_heads)


@pytest.mark.parametrize("m, n, num_heads", [(32, 8, None), (8, 32, None), (32, 8, 4), (8, 32, 4)])
def test_rms_of_an_update(m, n, num_heads, monkeypatch):
    """With singular values at 1, the entries of an update have RMS 0.2, whatever the shape and the split."""
    monkeypatch.setattr(muon, "newton_schulz", lambda G, steps: orthogonalize_exact(G))
    assert_close(float(muon_direction(rand(m, n), num_heads).square().mean().sqrt()), 0.2, atol=1e-12, rtol=0)
    assert_close(float(muon_direction(rand(m, n), num_heads, rms=1.0).square().mean().sqrt()), 1.0, atol=1e-12, rtol=0)


def test_direction_is_scaled_by_the_longer_side():
    G = rand(6, 10)
    assert_close(muon_direction(G), 0.2 * 10 ** 0.5 * newton_schulz(G), atol=1e-12, rtol=0)
    assert_close(muon_direction(G.mT, steps=2), 0.2 * 10 ** 0.5 * newton_schulz(G.mT, 2), atol=1e-12, rtol=0)
    assert_close(muon_direction(rand(24, 3), 2), 0.2 * 12 ** 0.5 * per_head(rand(24, 3), 2), atol=1e-12, rtol=0)


# --- the optimiser -------------------------------------------------------------------------------------------------

def numpy_muon(W, gradients, lr, mu, nesterov, decay, steps=5):
    """The equations in numpy; Newton-Schulz through the SVD."""
    M = np.zeros_like(W)
    for g in gradients:
        M = mu * M + g
        U, s, Vh = np.linalg.svd(g + mu * M if nesterov else M, full_matrices=False)
        O = (U * polynomial(s / np.sqrt((s ** 2).sum()), steps)) @ Vh
        W = W - lr * decay * W - lr * 0.2 * np.sqrt(max(W.shape)) * O
    return W


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_three_steps_by_hand(nesterov, shape):
    p = torch.nn.Parameter(rand(*shape))
    start, gradients = p.detach().numpy().copy(), [rand(*shape, seed=i).numpy() for i in (1, 2, 3)]
    optimiser = Muon([p], lr=0.3, momentum=0.8, nesterov=nesterov, weight_decay=0.5)
    for g in gradients:
        p.grad = torch.from_numpy(g).clone()
        optimiser.step()
        assert np.array_equal(p.grad.numpy(), g)                               # a gradient is read, not used up
    assert_close(p.detach().numpy(), numpy_muon(start, gradients, 0.3, 0.8, nesterov, 0.5), atol=1e-10, rtol=0)


def test_like_torch_muon():
    """torch's own, whose momentum is a mean and whose iteration is in bfloat16: the same up to that."""
    W, theirs, ours = rand(16, 24), *(torch.nn.Parameter(rand(16, 24, dtype=torch.float32)) for _ in range(2))
    a = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    b = Muon([ours], lr=0.1)
    for seed in (1, 2, 3):
        theirs.grad = ours.grad = rand(16, 24, seed=seed, dtype=torch.float32)
        a.step(), b.step()
    moved = (ours.detach() - W.float()).norm()
    assert moved > 0.5 and (ours - theirs).norm() / moved < 0.03


def test_a_stack_is_its_matrices_and_heads_are_blocks():
    stack, one = torch.nn.Parameter(rand(3, 4, 6)), torch.nn.Parameter(rand(3, 4, 6)[1])
    heads = torch.nn.Parameter(rand(3, 4, 6).flatten(0, 1))
    optimiser = Muon([{"params": [stack, one]}, {"params": heads, "num_heads": 3}], lr=0.1)
    for seed in (1, 2):
        g = rand(3, 4, 6, seed=seed)
        stack.grad, one.grad, heads.grad = g, g[1].clone(), g.flatten(0, 1)
        optimiser.step()
    assert_close(stack.detach()[1], one.detach(), atol=1e-12, rtol=0)
    assert_close(stack.detach().flatten(0, 1), heads.detach(), atol=1e-12, rtol=0)


def test_zero_gradients_only_decay_and_none_does_nothing():
    p, q = torch.nn.Parameter(rand(3, 4)), torch.nn.Parameter(rand(3, 4))
    optimiser = Muon([p, q], lr=0.5, weight_decay=0.1)
    p.grad = torch.zeros(3, 4, dtype=torch.float64)
    optimiser.step()
    assert_close(p.detach(), 0.95 * rand(3, 4), atol=1e-15, rtol=0)
    assert torch.equal(q.detach(), rand(3, 4)) and q not in optimiser.state


def test_weight_decay_is_decoupled():
    """The direction does not see the decay: two runs with and without differ by lr decay W."""
    runs = []
    for decay in (0.0, 0.4):
        p = torch.nn.Parameter(rand(3, 4))
        p.grad = rand(3, 4, seed=1)
        Muon([p], lr=0.5, weight_decay=decay).step()
        runs.append(p.detach())
    assert_close(runs[0] - runs[1], 0.5 * 0.4 * rand(3, 4), atol=1e-12, rtol=0)


def test_resumes_to_the_last_bit():
    def train(p, optimiser, seeds):
        for seed in seeds:
            p.grad = rand(4, 6, seed=seed, dtype=torch.float32)
            optimiser.step()

    p = torch.nn.Parameter(rand(4, 6, dtype=torch.float32))
    optimiser = Muon([p], lr=0.1, num_heads=2)
    train(p, optimiser, (1, 2))
    resumed, saved = torch.nn.Parameter(p.detach().clone()), copy.deepcopy(optimiser.state_dict())
    other = Muon([resumed], lr=9.0)
    other.load_state_dict(saved)
    train(p, optimiser, (3, 4))
    train(resumed, other, (3, 4))
    fresh = torch.nn.Parameter(rand(4, 6, dtype=torch.float32))
    train(fresh, Muon([fresh], lr=0.1, num_heads=2), (3, 4))
    assert torch.equal(p, resumed) and not torch.equal(p, fresh)


def test_closure_and_training():
    """A linear map is learnt, and step() gives back the loss."""
    torch.manual_seed(0)
    layer, x, target = torch.nn.Linear(6, 4, bias=False).double(), rand(50, 6), rand(4, 6, seed=5)
    optimiser = Muon(layer.parameters(), lr=0.1, weight_decay=0.0)

    def closure():
        optimiser.zero_grad()
        loss = (layer(x) - x @ target.T).square().mean()
        loss.backward()
        return loss

    losses = [optimiser.step(closure).item() for _ in range(100)]
    assert losses[0] > 1 and losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("shape", [(4,), (), (4, 1, 3, 3)])
def test_vectors_are_refused(shape):
    with pytest.raises(k3.InputError, match="Muon takes matrices .* AdamW"):
        Muon([torch.nn.Parameter(torch.ones(shape))])


@pytest.mark.parametrize("field, value", [("lr", -1.0), ("momentum", 1.0), ("momentum", -0.1), ("weight_decay", -0.1),
                                          ("steps", -1), ("num_heads", 5), ("lr", math.nan)])
def test_values_out_of_range_are_refused_and_leave_no_group(field, value):
    with pytest.raises(k3.InputError, match=f"{field} is {value}"):
        Muon([torch.nn.Parameter(torch.ones(4, 3))], **{field: value})
    optimiser = Muon([torch.nn.Parameter(torch.ones(4, 3))])
    with pytest.raises(k3.InputError, match=f"{field} is {value}"):
        optimiser.add_param_group({"params": torch.nn.Parameter(torch.ones(4, 3)), field: value})
    assert len(optimiser.param_groups) == 1


# --- QK-Clip -------------------------------------------------------------------------------------------------------

def layer(q_lora_rank=10, rope_base=None):
    torch.manual_seed(0)
    return k3.MLA(24, num_heads=3, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
                  q_lora_rank=q_lora_rank, rope_base=rope_base).double()


def parts(mla, x):
    """Logits [B,H,T,S] before the softmax and values [B,H,S,V], through the layer's own functions."""
    q, latent = mla.queries(x), mla.latents(x)
    if mla.rope_base is not None:
        q, latent = mla.rotate(q, latent, 0, None)
    k, v = expand(latent, mla.kv_b_proj.weight.unflatten(0, (mla.num_heads, -1)), mla.v_dim)
    return (q @ k.mT * mla.scale).detach(), v.detach()


@pytest.mark.parametrize("q_lora_rank", [10, None])
@pytest.mark.parametrize("rope_base", [None, 10.0])
def test_logits_of_a_head_scale_by_gamma(q_lora_rank, rope_base):
    mla, x = layer(q_lora_rank, rope_base), rand(2, 7, 24, seed=1)
    (before, values), shared = parts(mla, x), mla.kv_a_proj_with_mqa.weight.detach().clone()
    gamma = torch.tensor([1.0, 0.3, 0.8], dtype=torch.float64)
    muon.apply_qk_clip_(mla, gamma)
    after, same_values = parts(mla, x)
    assert_close(after, before * gamma[:, None, None], atol=1e-13, rtol=0)
    assert torch.equal(after[:, 0], before[:, 0]) and torch.equal(values, same_values)
    assert torch.equal(shared, mla.kv_a_proj_with_mqa.weight)


@pytest.mark.parametrize("q_lora_rank", [10, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gamma_one_changes_no_bit(q_lora_rank, dtype):
    mla = layer(q_lora_rank).to(dtype)
    before = copy.deepcopy(mla.state_dict())
    muon.apply_qk_clip_(mla, torch.ones(3))
    assert all(torch.equal(before[name], p) for name, p in mla.state_dict().items())


@pytest.mark.parametrize("rope_base", [None, 10.0])
def test_the_rule_ends_at_tau(rope_base):
    """Largest logits, gamma, clip: heads above tau come down to it, others keep theirs; by brute force over pairs."""
    mla, x = layer(rope_base=rope_base), 40 * rand(2, 7, 24, seed=2)
    with torch.no_grad():
        mla.q_b_proj.weight.mul_(20)
    logits = parts(mla, x)[0]
    by_hand = [max(float(logits[b, h, t, j]) for b in range(2) for t in range(7) for j in range(t + 1)) for h in range(3)]
    largest = muon.largest_logits(mla, x)
    assert_close(largest.tolist(), by_hand, atol=1e-12, rtol=0)
    assert (logits.amax((0, 2, 3)) > largest).any()                            # the mask matters here
    tau = sorted(by_hand)[1] * 0.9
    muon.apply_qk_clip_(mla, muon.qk_clip(largest, tau))
    assert_close(muon.largest_logits(mla, x).tolist(), [min(s, tau) for s in by_hand], atol=1e-10, rtol=0)
    assert sum(s > tau for s in by_hand) == 2


def test_gamma_by_hand():
    gamma = muon.qk_clip(torch.tensor([50.0, 100.0, 400.0, -7.0, 0.0]))
    assert gamma.tolist() == [1, 1, 0.25, 1, 1]
    assert muon.qk_clip(torch.tensor([50.0, 8.0]), tau=20).tolist() == pytest.approx([0.4, 1])


def test_clip_is_outside_the_graph():
    mla = layer()
    muon.apply_qk_clip_(mla, torch.tensor([0.5, 1, 1]))
    assert mla.q_b_proj.weight.requires_grad and mla.q_b_proj.weight.is_leaf
    assert not muon.largest_logits(mla, rand(1, 3, 24)).requires_grad


@pytest.mark.parametrize("gamma", [[1.0, 0.5], [1.0, 0.0, 0.5], [1.0, 1.1, 0.5], [1.0, math.nan, 0.5]])
def test_gamma_out_of_range_changes_nothing(gamma):
    mla = layer()
    before = copy.deepcopy(mla.state_dict())
    with pytest.raises(k3.InputError, match="must be 3 numbers above 0 and at most 1"):
        muon.apply_qk_clip_(mla, torch.tensor(gamma))
    assert all(torch.equal(before[name], p) for name, p in mla.state_dict().items())


@pytest.mark.parametrize("logits, tau, what", [([1.0, math.nan], 100, "finite"), ([math.inf], 100, "finite"), ([1.0], 0, "tau is 0")])
def test_clip_of_nothing_sensible(logits, tau, what):
    with pytest.raises(k3.InputError, match=what):
        muon.qk_clip(torch.tensor(logits), tau)
