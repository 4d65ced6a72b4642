"""SiTU-GLU against numbers worked out by hand and against math.tanh."""

import math

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.config import K3Config
from k3_teach.model import make_moe
from k3_teach.parts.situ import situ_glu_lean

T = lambda *x: torch.tensor(x, dtype=torch.float64)


def test_table_of_the_chapter():
    """b = 3; GLU, SwiGLU and SiTU-GLU at a = -2, 0, 2, 8."""
    a, b = T(-2, 0, 2, 8), T(3, 3, 3, 3)
    assert_close(k3.glu(a, b), T(0.358, 1.5, 2.642, 2.999), atol=5e-4, rtol=0)
    assert_close(k3.swiglu(a, b), T(-0.715, 0, 5.285, 23.992), atol=5e-4, rtol=0)
    assert_close(k3.situ_glu(a, b), T(-0.658, 0, 4.861, 11.509), atol=5e-4, rtol=0)


def test_large_branches():
    assert_close(k3.swiglu(T(40), T(40)), T(1600), atol=1e-6, rtol=0)
    assert_close(k3.situ_glu(T(40), T(40)), T(92.17), atol=5e-3, rtol=0)


@pytest.mark.parametrize("a, b", [(0.3, -1.7), (-6.0, 50.0), (5.0, 0.01), (-0.5, -30.0)])
def test_formula(a, b):
    expected = 4 * math.tanh(a / 4) / (1 + math.exp(-a)) * 25 * math.tanh(b / 25)
    assert_close(k3.situ_glu(T(a), T(b)), T(expected), atol=1e-13, rtol=0)


def test_sigmoid_sees_the_uncapped_gate():
    wrong = k3.softcap(T(6), 4.0) * torch.sigmoid(k3.softcap(T(6), 4.0)) * 3
    assert (k3.situ_glu(T(6), T(3)) - wrong).abs() > 0.1


def test_bound_and_origin():
    a = torch.linspace(-60, 60, 241, dtype=torch.float64)
    z = k3.situ_glu(a[:, None], a[None])
    assert z.abs().max() < 100
    small = T(1e-3)
    assert_close(k3.situ_glu(small, small), k3.swiglu(small, small), atol=1e-12, rtol=1e-6)


def test_linear_beta_none_leaves_the_up_branch_alone():
    assert_close(k3.situ_glu(T(2), T(1000), 4.0, None), 1000 * k3.situ_glu(T(2), T(1), 4.0, None))


def test_float32_inside_one_cast_outside():
    a, b = torch.randn(1000).bfloat16(), torch.randn(1000).bfloat16() * 30
    assert torch.equal(k3.situ_glu(a, b), k3.situ_glu(a.float(), b.float()).bfloat16())


@pytest.mark.parametrize("which", ["dense", "shared", "routed"])
def test_both_branches_are_capped_everywhere(which):
    """Pitfall 30: with gate = up = 1e3 every inner coordinate is 100 and no more, in every kind of feed-forward."""
    config = K3Config.toy(routed_expert_hidden_size=None, latent_moe_use_norm=False)
    layer = k3.K3Model(config, dtype=torch.float64).layers[0].mlp if which == "dense" else make_moe(config).double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith(("gate_proj.weight", "up_proj.weight", "w1", "w3")):
                p.fill_(1e3 / p.shape[-1])
            elif name.endswith(("down_proj.weight", "w2")):
                p.fill_((which == "dense" or ("shared" in name) == (which == "shared")) / p.shape[-1])   # the mean
    y = layer(torch.ones(3, config.hidden_size, dtype=torch.float64))
    assert_close(y, torch.full_like(y, 100.0), atol=1e-9, rtol=0)


def test_unknown_activation():
    with pytest.raises(k3.InputError, match="'situ' or 'silu'"):
        k3.Activation("gelu")


LIMITS = [(4.0, 25.0), (4.0, None), (1.0, 3.0)]


@pytest.mark.parametrize("beta, linear_beta", LIMITS)
def test_lean_form_equals_the_definition(beta, linear_beta):
    """The same values and gradients, from deep in saturation to denormal numbers; in bfloat16 the same bits."""
    wide = torch.tensor([-torch.inf, -1e30, -200, -20, -1, -1e-3, -1e-300, 0, 1e-300, 1e-3, 1, 20, 200, 1e30, torch.inf], dtype=torch.float64)
    results = []
    for form in (k3.situ_glu, situ_glu_lean):
        a, b = (x.contiguous().requires_grad_() for x in torch.meshgrid(wide[1:-1], wide[1:-1], indexing="ij"))
        z = form(a, b, beta, linear_beta)
        z.backward(torch.linspace(-2, 3, z.numel(), dtype=torch.float64).view_as(z))
        results.append((z.detach(), a.grad, b.grad))
    for ours, expected in zip(*results):
        assert_close(ours, expected, atol=1e-13, rtol=1e-13)
    if linear_beta is not None:                 # infinite values, too, but no gradient there: inf * 0
        a, b = (x.contiguous() for x in torch.meshgrid(wide, wide, indexing="ij"))
        assert_close(situ_glu_lean(a, b, beta, linear_beta), k3.situ_glu(a, b, beta, linear_beta), atol=1e-13, rtol=1e-13)
    a, b = torch.randn(1000).bfloat16(), torch.randn(1000).bfloat16() * 30
    assert situ_glu_lean(a, b, beta, linear_beta).dtype == torch.bfloat16
    assert_close(situ_glu_lean(a, b, beta, linear_beta), k3.situ_glu(a, b, beta, linear_beta), atol=0, rtol=2 ** -8)


@pytest.mark.parametrize("beta, linear_beta", LIMITS)
def test_derivative_written_out(beta, linear_beta):
    a, b = (torch.randn(7, dtype=torch.float64) * scale for scale in (4, 20))
    assert torch.autograd.gradcheck(situ_glu_lean, (a.requires_grad_(), b.requires_grad_(), beta, linear_beta))


def test_second_derivative_is_refused():
    """Silence would be a wrong number wherever another path has one: here 6 a from the cube."""
    a, b = torch.randn(2, 5, requires_grad=True)
    with pytest.raises(k3.InputError, match="no second derivative"):
        torch.autograd.grad((situ_glu_lean(a, b) + a ** 3).sum(), a, create_graph=True)


def test_training_keeps_three_tensors():
    """What the lean form is for: t, s, u instead of twice as many."""
    def kept(form):
        sizes = []
        a, b = torch.randn(2, 100, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append((t.data_ptr(), t.numel())), lambda t: t):
            z = form(a, b)
        return sum(n for _, n in set(sizes)), z
    assert kept(situ_glu_lean)[0] == 300 and kept(k3.situ_glu)[0] >= 600
