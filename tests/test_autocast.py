"""torch.autocast on a float32 model: as close to float64 as the same model in bfloat16, and what stays in float32."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts.kda_step import step_kda
from k3_teach.parts.moe import experts_few
from tests.helpers import toy, tokens

DEVICES = ["cpu", "cuda"]


def autocast(device, dtype=torch.bfloat16):
    return torch.autocast(device, dtype=dtype)


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: autocast on CUDA is not tested")
    return request.param


def relative(a, b):
    return ((a.double().cpu() - b).norm() / b.norm()).item()


def logits_and_gradients(model, ids, context=nullcontext(), inside=False):
    with context:
        logits = model(ids)
        loss = k3.next_token_loss(logits, ids)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    grads = torch.cat([p.grad.double().cpu().flatten() for p in model.parameters() if p.requires_grad])
    return logits.detach(), grads


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_error_is_that_of_a_bfloat16_model(device, inside):
    """Against float64, all in all: logits within 5 %, gradients within 8 %, and at most half as much again as bfloat16."""
    torch.manual_seed(0)
    model, ids = k3.K3Model(k3.K3Config.toy(), dtype=torch.float64), tokens(2, 40)
    logits, grads = logits_and_gradients(model, ids)
    low = copy.deepcopy(model).to(device, torch.bfloat16)
    low = [relative(*pair) for pair in zip(logits_and_gradients(low, ids.to(device)), (logits, grads))]
    mixed = copy.deepcopy(model).to(device, torch.float32)
    mixed = logits_and_gradients(mixed, ids.to(device), autocast(device), inside)
    assert mixed[0].dtype == torch.bfloat16
    mixed = [relative(*pair) for pair in zip(mixed, (logits, grads))]
    assert 1e-3 < mixed[0] < min(0.05, 1.5 * low[0])        # not 0: something was rounded
    assert 1e-3 < mixed[1] < min(0.08, 1.5 * low[1])


def test_training(device):
    """Ten steps on one batch. The weights and what Adam keeps are float32, as are the gradients."""
    model, ids = k3.K3Model(k3.K3Config.toy()).to(device), tokens(4, 32).to(device)
    adam, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(10):
        with autocast(device):
            loss = k3.next_token_loss(model(ids), ids)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    assert losses[-1] < losses[0] - 1


def test_cache(device):
    """A prompt with padding, in two pieces, then single tokens: within rounding of one shot. The state is float32."""
    model, ids = toy(dtype=torch.float32).to(device), tokens(2, 24).to(device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :5] = False
    cache, out = model.new_cache(2), []
    with torch.no_grad(), autocast(device):
        expected = model(ids, attention_mask=mask)
        for start, end in ((0, 7), (7, 20), (20, 21), (21, 24)):
            out.append(model(ids[:, start:end], attention_mask=mask[:, :end] if start < 20 else None, cache=cache))
    assert all(s.S.dtype == torch.float32 for s in cache.states if isinstance(s, k3.KDAState))
    exact = model.double()(ids, attention_mask=mask)[mask].cpu()
    errors = [relative(y[mask], exact) for y in (torch.cat(out, 1), expected)]
    assert errors[0] < 1.3 * errors[1] + 0.02


def test_the_output_of_attention_is_float32_in_training(device, monkeypatch):
    """As K3 was trained; in evaluation it is bfloat16, as in the released code. The mixture itself is then exact."""
    from k3_teach.parts import mla as part
    seen, attend = [], part.mla_expanded
    monkeypatch.setattr(part, "mla_expanded", lambda *a: seen.append((a, attend(*a))) or seen[-1][1])
    model, ids = k3.K3Model(k3.K3Config.toy()).to(device), tokens(1, 24).to(device)
    for train in (True, False):
        model.train(train)
        seen.clear()
        with autocast(device):
            model(ids)
        (q, latent, kv_b, v_dim, scale, mask), o = seen[0]
        assert len(seen) == 3 and o.dtype == (torch.float32 if train else torch.bfloat16)
        exact = attend(q.double(), latent.double(), kv_b.double(), v_dim, scale, mask)
        assert (relative(o.detach(), exact.detach().cpu()) < 1e-6) == train


def inputs(device):
    g = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=g).to(device)


def test_what_the_release_keeps_in_float32_stays_so(device):
    """Same bits with autocast and without: router, recurrence, depth reads, norms, activation."""
    rand = inputs(device)
    q, k = (k3.l2_normalize(rand(1, 40, 2, 16)) for _ in range(2))
    v, g, beta = rand(1, 40, 2, 16), -torch.rand(1, 40, 2, 16, device=device), torch.rand(1, 40, 2, device=device)
    router = k3.Router(32, 24, 4).to(device)
    first = lambda f: lambda *args: f(*args)[0]
    cases = {
        "router": (lambda x: router(x)[2], rand(9, 32)),
        "recurrence": (first(k3.recurrent_kda), q, k, v, g, beta),
        "step": (first(step_kda), *(x[:, :1] for x in (q, k, v, g, beta))),
        "chunks": (first(k3.chunk_kda), q, k, v, g, beta),
        "depth read": (first(k3.attn_res), rand(3, 5, 16), rand(16)),
        "reads, phase 1": (first(k3.read_sealed), rand(3, 5, 16), rand(4, 16)),
        "reads, phase 2": (k3.merge_live, rand(5, 16), rand(5), rand(5, 16), rand(16)),
        "norm": (k3.RMSNorm(16, 1e-5).to(device), rand(5, 16)),
        "activation": (k3.Activation(), rand(5, 16), rand(5, 16))}
    for name, (f, *args) in cases.items():
        expected = f(*args)
        with autocast(device):
            ours = f(*args)
        assert ours.dtype == torch.float32, name
        assert torch.equal(ours, expected), name


@pytest.mark.parametrize("run", [k3.experts_grouped, experts_few, k3.experts_loop])
@pytest.mark.parametrize("m", [24, 7])
def test_experts_round_what_a_linear_would(device, run, m):
    """Autocast casts the factors of every product to bfloat16, also where a grouped product is used, and where it is not."""
    rand = inputs(device)
    x, w1, w2, w3 = rand(9, 16), rand(6, m, 16), rand(6, 16, m), rand(6, m, 16)
    idx, weights = rand(9, 6).topk(2).indices, torch.rand(9, 2, device=device)
    expected = run(*(t.bfloat16() if t.is_floating_point() else t for t in (x, idx)), weights,
                   *(w.bfloat16() for w in (w1, w2, w3)), k3.situ_glu)
    with autocast(device):
        ours = run(x, idx, weights, w1, w2, w3, k3.situ_glu)
    assert ours.dtype == torch.float32
    assert_close(ours.bfloat16(), expected, atol=0.02 * expected.abs().max().item(), rtol=0)
    exact = run(x, idx, weights, w1, w2, w3, k3.situ_glu)
    assert not torch.equal(ours, exact)


def test_float64_is_left_alone(device):
    model, ids = toy(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,)).to(device), tokens(1, 9).to(device)
    with autocast(device):
        assert torch.equal(model(ids), model(ids)) and model(ids).dtype == torch.float64
        ours = model(ids)
    assert_close(ours, model(ids), atol=1e-12, rtol=0)
