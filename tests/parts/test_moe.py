"""Routing and experts: by hand, loop against grouped products, and what may not change the result."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts import moe
from k3_teach.parts.moe import experts_few, limit_to_groups
from tests.helpers import randomize

T64 = lambda *x: torch.tensor(x, dtype=torch.float64)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_eight_choose_two():
    """Scores 0.9 and 0.6 are the largest of eight: weights 0.6 and 0.4."""
    idx, w = k3.route(T64(0.1, 0.9, 0.2, 0.3, 0.05, 0.4, 0.6, 0.15)[None], torch.zeros(8), 2)
    assert idx.tolist() == [[1, 6]]
    assert_close(w, T64(0.6, 0.4)[None])


def test_bias_chooses_and_does_not_weigh():
    idx, w = k3.route(T64(0.9, 0.6, 0.5, 0.1)[None], T64(0, -1, 0, 1), 2)
    assert sorted(idx[0].tolist()) == [0, 3]
    weights = dict(zip(idx[0].tolist(), w[0].tolist()))
    assert_close(T64(weights[0], weights[3]), T64(0.9, 0.1))


@pytest.mark.parametrize("renormalize, scaling, top_k, expected", [
    (True, 2.5, 2, [1.5, 1.0]), (False, 1.0, 2, [0.9, 0.6]), (False, 2.0, 2, [1.8, 1.2]), (True, 1.0, 1, [0.9])])
def test_renormalisation_and_scaling(renormalize, scaling, top_k, expected):
    """With one expert per token its weight is its score: renormalising would make it 1 and cut the router's gradient."""
    _, w = k3.route(T64(0.9, 0.6, 0.3)[None], torch.zeros(3), top_k, renormalize, scaling)
    assert_close(w, T64(*expected)[None])


def test_groups():
    """Three groups of two; best two scores per group sum to 1.1, 1.2, 0.9; keep two groups, so 0.85 in the third is out."""
    scores = T64(0.6, 0.5, 0.7, 0.5, 0.85, 0.05)[None]
    kept = limit_to_groups(scores, 3, 2)
    assert kept[0, 4:].tolist() == [-torch.inf] * 2 and torch.equal(kept[0, :4], scores[0, :4])
    idx, _ = k3.route(scores, torch.zeros(6), 2, num_groups=3, topk_group=2)
    assert sorted(idx[0].tolist()) == [0, 2]
    idx, _ = k3.route(scores, torch.zeros(6), 2, num_groups=3, topk_group=3)     # as many as there are: no limit
    assert sorted(idx[0].tolist()) == [2, 4]


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_out_of_range(top_k):
    with pytest.raises(k3.InputError, match="between 1 and the number of experts"):
        k3.route(torch.rand(2, 4), torch.zeros(4), top_k)


def test_router_is_float32_in_a_bfloat16_model():
    """Pitfalls 27 and 28: bfloat16 scores or a bfloat16 bias would choose other experts."""
    torch.manual_seed(0)
    router = k3.Router(256, 128, 8)
    with torch.no_grad():
        router.e_score_correction_bias.uniform_(-0.01, 0.01)
    bias = router.e_score_correction_bias.clone()
    router.bfloat16()
    assert router.e_score_correction_bias.dtype == torch.float32 and torch.equal(router.e_score_correction_bias, bias)
    x = torch.randn(500, 256).bfloat16()
    idx, w, scores = router(x)
    expected = torch.sigmoid(x.double() @ router.weight.double().T)
    assert w.dtype == scores.dtype == torch.float32
    sets = lambda i: [frozenset(r) for r in i.tolist()]
    right = sets((expected + bias).topk(8).indices)
    narrow = sets((torch.sigmoid(x @ router.weight.T) + bias.bfloat16()).topk(8).indices)
    assert sum(a != b for a, b in zip(sets(idx), right)) <= 2
    assert sum(a != b for a, b in zip(narrow, right)) > 50


def test_misspelt_score_and_impossible_groups():
    with pytest.raises(k3.InputError, match="'sigmiod'"):
        k3.Router(6, 5, 2, score="sigmiod")
    for groups, kept, k in ((3, 1, 2), (2, 1, 3), (4, 0, 1)):
        with pytest.raises(k3.InputError, match="groups must divide"):
            k3.route(torch.rand(2, 4), torch.zeros(4), k, num_groups=groups, topk_group=kept)


def test_softmax_router():
    router = k3.Router(6, 5, 2, score="softmax").double()
    x = rand(4, 6)
    assert_close(router(x)[2].sum(-1), torch.ones(4, dtype=torch.float64))


def stacks(E=6, l=8, m=12, seed=0, dtype=torch.float64):
    return [rand(*s, seed=seed + i).to(dtype) for i, s in enumerate([(E, m, l), (E, l, m), (E, m, l)])]


@settings(max_examples=25, deadline=None)
@given(N=st.integers(1, 20), k=st.integers(1, 6), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float64, torch.float32]),
       m=st.sampled_from([12, 7]))
def test_grouped_and_few_equal_the_loop(N, k, seed, dtype, m):
    """Widths of 7 floats are not aligned for grouped products: the fallback must serve."""
    x, w = rand(N, 8, seed=seed).to(dtype), torch.rand(N, k, generator=torch.Generator().manual_seed(seed)).to(dtype)
    idx = rand(N, 6, seed=seed).topk(k).indices
    args = x, idx, w, *stacks(m=m, dtype=dtype), k3.situ_glu
    expected = k3.experts_loop(*args)
    tolerance = dict(atol=1e-12, rtol=1e-12) if dtype == torch.float64 else dict(atol=1e-3, rtol=1e-4)
    assert_close(k3.experts_grouped(*args), expected, **tolerance)
    assert_close(experts_few(*args), expected, **tolerance)


def test_loop_is_the_formula():
    x, (w1, w2, w3) = rand(3, 8), stacks()
    idx, w = torch.tensor([[0, 5], [2, 0], [4, 1]]), rand(3, 2, seed=9)
    expected = torch.stack([sum(w[n, s] * (w2[e] @ k3.situ_glu(w1[e] @ x[n], w3[e] @ x[n])) for s, e in enumerate(idx[n].tolist())) for n in range(3)])
    assert_close(k3.experts_loop(x, idx, w, w1, w2, w3, k3.situ_glu), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-3)])
def test_gradients_of_grouped_equal_the_loop(dtype, tolerance):
    results = []
    for run in (k3.experts_loop, k3.experts_grouped):
        args = [a.to(dtype).requires_grad_() for a in (rand(9, 8), rand(9, 2, seed=5), *stacks())]
        run(args[0], rand(9, 6, seed=3).topk(2).indices, *args[1:], k3.situ_glu).square().sum().backward()
        results.append([a.grad for a in args])
    for a, b in zip(*results):
        assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_experts_sum_in_float32():
    """Pitfall 29: bfloat16 experts, but their weighted sum is rounded once."""
    x, (w1, w2, w3) = rand(40, 8).bfloat16(), stacks(dtype=torch.bfloat16)
    idx, w = rand(40, 6, seed=3).topk(4).indices, torch.rand(40, 4)
    for run in (k3.experts_loop, k3.experts_grouped, experts_few):
        outs = torch.stack([run(x, idx[:, [s]], torch.ones(40, 1), w1, w2, w3, k3.situ_glu) for s in range(4)], 1)
        expected = torch.einsum("nk,nkl->nl", w.double(), outs.double())
        y = run(x, idx, w, w1, w2, w3, k3.situ_glu)
        assert ((y.double() - expected).abs() <= expected.abs() * 2 ** -8 + 1e-6).all()


def test_the_form_is_chosen_by_regime(monkeypatch):
    """Few tokens and no gradient: views. A slice of a stack has a gradient as large as the stack, so training is grouped."""
    ran = []
    for name in ("experts_few", "experts_grouped"):
        monkeypatch.setattr(moe, name, lambda *args, name=name, run=getattr(moe, name): ran.append(name) or run(*args))
    experts = moe.Experts(16, 8, 8, k3.Activation())
    idx, w = torch.arange(8).view(2, 4), torch.rand(2, 4)
    with torch.no_grad():
        for n in (1, 2):
            experts(torch.randn(n, 8), idx[:n], w[:n])
    experts(torch.randn(1, 8), idx[:1], w[:1]).sum().backward()
    assert ran == ["experts_few", "experts_grouped", "experts_grouped"]


def block(**changes):
    config = k3.K3Config.toy(**changes)
    from k3_teach.model import make_moe
    torch.manual_seed(0)
    return randomize(make_moe(config).double()), config


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_experts_can_be_renumbered(seed):
    """Permuting the experts with their router rows and biases changes nothing."""
    moe, config = block()
    x = rand(7, config.hidden_size, seed=seed)
    expected = moe(x)
    order = torch.randperm(config.num_experts, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for p in (moe.gate.weight, moe.gate.e_score_correction_bias, moe.experts.w1, moe.experts.w2, moe.experts.w3):
            p.copy_(p[order].clone())
    assert_close(moe(x), expected, atol=1e-12, rtol=0)


def test_latent_block_by_hand():
    moe, config = block()
    x = rand(5, config.hidden_size, seed=2)
    P = {n.removesuffix(".weight"): p.detach() for n, p in moe.named_parameters()}
    s = torch.sigmoid(x @ P["gate"].T)                                        # the router sees the full width
    chosen = (s + P["gate.e_score_correction_bias"]).topk(4).indices
    z = x @ P["routed_expert_down_proj"].T
    for n in range(5):
        u = sum(s[n, e] / s[n, chosen[n]].sum() * (P["experts.w2"][e] @ k3.situ_glu(P["experts.w1"][e] @ z[n], P["experts.w3"][e] @ z[n])) for e in chosen[n])
        u = u / (u.square().mean() + 1e-5).sqrt() * P["routed_expert_norm"]    # after the sum, before the way up
        shared = P["shared_experts.down_proj"] @ k3.situ_glu(P["shared_experts.gate_proj"] @ x[n], P["shared_experts.up_proj"] @ x[n])
        assert_close(moe(x)[n].detach(), P["routed_expert_up_proj"] @ u + shared, atol=1e-11, rtol=0)


def test_norm_belongs_after_all_partial_sums():
    """Pitfall 25: two workers with half the experts each must add before they normalise."""
    moe, config = block()
    x = rand(5, config.hidden_size, seed=2)
    idx, w, _ = moe.gate(x)
    z = moe.routed_expert_down_proj(x)
    halves = [moe.experts(z, idx, w * (idx % 2 == r)) for r in (0, 1)]
    up = lambda u: moe.routed_expert_up_proj(moe.routed_expert_norm(u))
    expected = moe(x) - moe.shared_experts(x)
    assert_close(up(halves[0] + halves[1]), expected, atol=1e-11, rtol=0)
    assert (up(halves[0]) + up(halves[1]) - expected).abs().max() > 0.1


def test_scale_of_the_weights_is_invisible_after_the_norm():
    """So a missing renormalisation must be caught in the router: here it hides up to eps."""
    moe, config = block()
    x = rand(5, config.hidden_size, seed=2)
    y = moe(x)
    moe.gate.scaling = 3.0
    assert_close(moe(x), y, atol=1e-3, rtol=0)


@pytest.mark.parametrize("changes", [dict(latent_moe_use_norm=False), dict(routed_expert_hidden_size=None, latent_moe_use_norm=False),
                                     dict(num_shared_experts=0), dict(num_experts=4, num_experts_per_token=4)])
def test_variants_run_and_train(changes):
    moe, config = block(**changes)
    moe(rand(2, 3, config.hidden_size)).square().sum().backward()
    for n, p in moe.named_parameters():
        assert (p.grad is None) == n.endswith("e_score_correction_bias"), n
