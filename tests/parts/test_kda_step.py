"""One step of KDA against the recurrence: values, gradients, extremes, and a state that is left alone."""

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts.kda_step import step_kda


def inputs(B=2, H=3, K=8, V=5, T=1, g=None, seed=0, dtype=torch.float64):
    """q, k, v, g, beta, S; every log decay is `g`, or its size is drawn from 1e-6 to 1e2."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    q, k, v, beta = unit(randn(B, T, H, K)) * K ** -0.5, unit(randn(B, T, H, K)), randn(B, T, H, V), randn(B, T, H).sigmoid()
    drawn = -10 ** (8 * torch.rand(B, T, H, K, generator=generator, dtype=torch.float64) - 6)
    g = drawn if g is None else torch.full_like(drawn, g)
    return [x.to(dtype) for x in (q, k, v, g, beta, randn(B, H, K, V))]


@pytest.mark.parametrize("g", [None, 0.0, -1e-6, -5.0, -1e3])
@pytest.mark.parametrize("first", [False, True])
def test_step_equals_the_recurrence(g, first):
    *args, S = inputs(g=g)
    S = None if first else 100 * S
    for found, expected in zip(step_kda(*args, S), k3.recurrent_kda(*args, S)):
        assert_close(found, expected, atol=0, rtol=1e-13 if first else 1e-12)


def test_gradients_equal_those_of_the_recurrence():
    def gradients(form):
        args = [x.requires_grad_() for x in inputs()]
        o, S = form(*args)
        return torch.autograd.grad(o.square().sum() + S.sin().sum(), args)
    for found, expected in zip(gradients(step_kda), gradients(k3.recurrent_kda)):
        assert_close(found, expected, atol=1e-13, rtol=1e-13)


def test_the_old_state_is_not_written_into():
    """A snapshot of a cache is a reference to the state."""
    *args, S = inputs()
    before = S.clone()
    _, new = step_kda(*args, S)
    assert torch.equal(S, before) and not torch.equal(new, before)
    *args, _ = inputs(g=0.0)
    args[4] = torch.zeros_like(args[4])         # padding neither forgets nor writes
    assert torch.equal(step_kda(*args, S)[1], S)


def test_a_thousand_steps_in_float32():
    """Slow decay, similar keys: no further from float64 than the recurrence in float32."""
    q, k, v, g, beta, S = inputs(B=1, T=1000, g=-1e-4)
    k = torch.nn.functional.normalize(k[:, :1] + 0.1 * k, dim=-1)
    exact, _ = k3.recurrent_kda(q, k, v, g, beta, S)
    q, k, v, g, beta, S = (x.float() for x in (q, k, v, g, beta, S))
    off = lambda o: (o.double() - exact).abs().max().item()
    slow, state, out = k3.recurrent_kda(q, k, v, g, beta, S)[0], S, []
    for token in zip(*(x.split(1, 1) for x in (q, k, v, g, beta))):
        o, state = step_kda(*token, state)
        out.append(o)
    assert off(torch.cat(out, 1)) < 2 * off(slow) < 1e-4


def test_bfloat16_inputs_are_computed_in_float32():
    args = inputs(dtype=torch.bfloat16)
    for found, expected in zip(step_kda(*args), step_kda(*(x.float() for x in args))):
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_what_is_refused():
    *args, S = inputs()
    with pytest.raises(k3.InputError, match="initial_state has the shape"):
        step_kda(*args, S.mT)
    with pytest.raises(k3.InputError, match="q holds 2 tokens"):
        step_kda(*inputs(T=2))


def test_the_layer_decodes_with_it(monkeypatch):
    import k3_teach.parts.kda_layer as module
    seen = []
    monkeypatch.setattr(module, "step_kda", lambda q, *rest: seen.append(q.shape[1]) or step_kda(q, *rest))
    layer, state = k3.KDA(24, num_heads=3, head_dim=8), k3.KDAState()
    for T in (5, 1, 2, 1):
        layer(torch.randn(1, T, 24), state=state)
    assert seen == [1, 1]


def test_autocast_does_not_round_the_state():
    args = [x.float() for x in inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        found = step_kda(*args)
    for a, b in zip(found, step_kda(*args)):
        assert torch.equal(a, b)
