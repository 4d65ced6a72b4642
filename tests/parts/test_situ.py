"""SiTU-GLU against numbers worked out by hand and against math.tanh."""

import math

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.config import K3Config
from k3_teach.model import make_moe

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
