"""RMSNorm: the formula, the order of casts, and what may stay in float32."""

import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts.precision import upcast


def test_formula():
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert_close(k3.rms_norm(x, torch.tensor([1.0, 2.0]).double(), 0.0), torch.tensor([[3.0, 8.0]]).double() / 12.5 ** 0.5)


def test_eps_is_inside_the_root_on_the_mean():
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    assert_close(k3.rms_norm(x, torch.ones(4).double(), 1e-6), torch.full((1, 4), 1 / 2 ** 0.5).double(), atol=1e-7, rtol=0)


def test_cast_comes_before_the_weight():
    """In bfloat16 the order is visible: round the normalised vector, then multiply, then round again."""
    torch.manual_seed(0)
    x, w = torch.randn(200, 64).bfloat16(), torch.randn(64).bfloat16()
    n = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(k3.rms_norm(x, w, 1e-5), w * n)
    other = (w.float() * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5))).bfloat16()
    assert not torch.equal(k3.rms_norm(x, w, 1e-5), other)


def test_upcast():
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]:
        assert upcast(torch.zeros(1, dtype=dtype)).dtype == expected


def test_kept_parameters_follow_wider_types_and_devices():
    router = k3.Router(4, 3, 1)
    assert router.bfloat16().e_score_correction_bias.dtype == torch.float32
    assert router.half().e_score_correction_bias.dtype == torch.float32
    assert router.double().e_score_correction_bias.dtype == torch.float64
    assert router.to("meta").e_score_correction_bias.is_meta


def test_gradients_of_kept_parameters_stay_with_them():
    kda = k3.KDA(8, 2, 4)
    kda(torch.randn(1, 3, 8)).sum().backward()
    kda.bfloat16()
    assert kda.A_log.grad.dtype == torch.float32 and kda.q_proj.weight.grad.dtype == torch.bfloat16
