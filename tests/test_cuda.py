"""On a GPU the same equalities hold as on the CPU. Without one, every test says what is missing.

K3_TEST_DEVICE=cpu runs what needs no fla on the CPU, to try this file itself.
"""

import os

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts import kda_layer
from k3_teach.parts.kda_fla import fla_kda, fla_missing, fla_refuses
from k3_teach.parts.moe import experts_few
from tests import test_golden
from tests.helpers import tokens, toy
from tests.parts.test_kda import BOUNDED, DEEP, NAMES, inputs, relative, with_gradients

DEVICE = os.environ.get("K3_TEST_DEVICE", "cuda")


@pytest.fixture(scope="module", autouse=True)
def device():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device (torch.cuda.is_available() is False)")
    return torch.device(DEVICE)


@pytest.fixture
def fla(device):
    if device.type != "cuda":
        pytest.skip("fla's kernels need a CUDA device")
    if fla_missing() is not None:
        pytest.skip(f"fla cannot be tested: {fla_missing()}")


def on(device, function):
    """The function on the device, of arguments and for results on the CPU; gradients cross the copies."""
    def call(*args, **options):
        out = function(*(a.to(device) if isinstance(a, torch.Tensor) else a for a in args), **options)
        return out.cpu() if isinstance(out, torch.Tensor) else tuple(x.cpu() for x in out)
    return call


def rms(actual, expected):
    """The size of the error as a whole: single entries of 16-bit results are noisy."""
    return ((actual.double() - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()


# --- KDA ------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("gate, bound", [(g, -5.0) for g in BOUNDED] + [(g, None) for g in BOUNDED + DEEP])
def test_chunks_equal_the_recurrence(device, gate, bound, dtype, tolerance):
    args = inputs(75, gate=gate)
    expected = with_gradients(k3.recurrent_kda, args, torch.float64)
    for function, options in ((k3.recurrent_kda, {}), (k3.chunk_kda, dict(gate_lower_bound=bound))):
        for name, a, e in zip(NAMES, with_gradients(on(device, function), args, dtype, **options), expected):
            assert a.isfinite().all(), name
            if e.abs().max() > 1e-20:
                assert relative(a, e) < tolerance, name


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_future_changes_no_bit(device, bound):
    args = [a.float() for a in inputs(70)]
    changed = [a.clone() for a in args]
    changed[3][:, 45:] = -5 * torch.rand_like(args[3][:, 45:])
    first, second = (on(device, k3.chunk_kda)(*xs, gate_lower_bound=bound)[0][:, :45] for xs in (args, changed))
    assert torch.equal(first, second)


def for_fla(T, gate="mixed", width=64):
    """q, k, v as bfloat16 numbers, so that only the arithmetic differs; in float64."""
    args = inputs(T, K=width, V=width, gate=gate)
    return [a.bfloat16().double() if i < 3 else a.float().double() for i, a in enumerate(args)]


def narrow(args, device):
    return [a.to(device, torch.bfloat16 if i < 3 else torch.float32) for i, a in enumerate(args)]


@pytest.mark.parametrize("gate, bound", [(g, -5.0) for g in BOUNDED] + [(g, None) for g in ("mixed", "deep", "bursts")])
@pytest.mark.parametrize("T, width", [(1, 64), (75, 16), (75, 128), (300, 64)])
def test_fla_equals_the_recurrence(device, fla, gate, bound, T, width):
    args = for_fla(T, gate, width)
    expected = with_gradients(k3.recurrent_kda, args, torch.float64)
    cast = lambda *args: on(device, fla_kda)(*(a.bfloat16() if i < 3 else a for i, a in enumerate(args)), gate_lower_bound=bound)
    for name, a, e in zip(NAMES, with_gradients(cast, args, torch.float32), expected):
        assert a.isfinite().all(), name
        if e.abs().max() > 1e-6:
            assert rms(a, e) < (0.01 if name in ("o", "S") else 0.03), name


def test_fla_for_one_token_is_exact_in_float32(device, fla):
    args = for_fla(1)
    with torch.no_grad():
        o, S = fla_kda(*narrow(args, device), gate_lower_bound=-5.0)
    for a, e in zip((o, S), k3.recurrent_kda(*args)):
        assert relative(a.cpu(), e) < 1e-5


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_future_changes_no_bit_in_fla(device, fla, bound):
    args = narrow(for_fla(70), device)
    changed = [a.clone() for a in args]
    changed[3][:, 45:] = -5 * torch.rand_like(args[3][:, 45:])
    first, second = (fla_kda(*xs, gate_lower_bound=bound)[0][:, :45] for xs in (args, changed))
    assert torch.equal(first, second)


def test_the_layer_calls_fla(device, fla, monkeypatch):
    """A bfloat16 layer does, in both directions; a float32 layer does not."""
    seen = []
    monkeypatch.setattr(kda_layer, "fla_kda", lambda *a: seen.append(a[2].dtype) or fla_kda(*a))
    for dtype in (torch.bfloat16, torch.float32):
        layer = k3.KDA(64, num_heads=2, head_dim=32).to(device, dtype)
        layer(torch.randn(1, 9, 64, device=device, dtype=dtype)).sum().backward()
    assert seen == [torch.bfloat16]


# --- the other parts ------------------------------------------------------------------

@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("width", [32, 12])      # 12: rows that no grouped product takes
def test_experts_in_all_forms(device, width, dtype, tolerance):
    """Half of the experts are idle: their gradients are zero, not what was in the memory."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
    x, (w1, w3), w2 = rand(40, width), 0.2 * rand(2, 16, 24, width), 0.2 * rand(16, width, 24)
    idx = torch.stack([torch.randperm(8, generator=g)[:4] for _ in range(40)])
    weights = rand(40, 4).softmax(-1)
    wo = rand(40, width)
    args = [t.to(dtype).double() for t in (x, weights, w1, w2, w3)]

    def run(function, kind, where):
        leaves = [a.to(where, kind if i != 1 else torch.promote_types(kind, torch.float32), copy=True).requires_grad_()
                  for i, a in enumerate(args)]
        y = function(leaves[0], idx.to(where), *leaves[1:], k3.swiglu)
        (y * wo.to(y)).sum().backward()
        return [y.detach().cpu(), *(a.grad.cpu() for a in leaves)]
    expected = run(k3.experts_loop, torch.float64, "cpu")
    for function in (k3.experts_loop, k3.experts_grouped, experts_few):
        actual = run(function, dtype, device)
        assert all(rms(a, e) < tolerance for a, e in zip(actual, expected))
        assert all(a[8:].abs().max() == 0 for a in actual[3:])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("T, S", [(1, 40), (5, 40), (40, 40)])
@pytest.mark.parametrize("padded", [False, True])
def test_mla_absorbed_and_expanded(device, T, S, padded, dtype, tolerance):
    """At 512 + 64 channels, wider than any flash kernel takes."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
    args = [a.to(dtype) for a in (rand(2, 3, T, 192), rand(2, S, 576), rand(3, 256, 512) / 512 ** 0.5)]
    valid = torch.arange(S) >= torch.tensor([[0], [3]])
    mask = k3.causal_mask(T, S, valid) if padded else None
    expected = k3.mla_expanded(*(a.double() for a in args), 128, 192 ** -0.5, mask)
    for function in (k3.mla_absorbed, k3.mla_expanded):
        assert rms(on(device, function)(*args, 128, 192 ** -0.5, mask), expected) < tolerance


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_depth_reads(device, dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((9, 2, 5, 32), (32,))]
    expected = k3.attn_res(*(a.double() for a in args))
    for a, e in zip(on(device, k3.attn_res)(*args), expected):
        assert rms(a, e) < tolerance


# --- the whole model ------------------------------------------------------------------

@pytest.mark.parametrize("folder", test_golden.FOLDERS)
@pytest.mark.parametrize("check", [
    test_golden.test_logits_and_every_trace, test_golden.test_padding_and_the_step_after_it,
    test_golden.test_loss_and_gradients, test_golden.test_float32_agrees_to_its_own_precision], ids=lambda c: c.__name__)
def test_golden_values(device, check, folder):
    model = k3.load_checkpoint(test_golden.GOLDEN / folder, dtype=torch.float64).to(device)
    io = test_golden.load_file(test_golden.GOLDEN / folder / "io.safetensors")
    # The number of blocks is counted by Python, not on the device.
    check((model, {n: t if n.endswith("nblocks") else t.to(device) for n, t in io.items()}))


def test_logits_and_gradients_of_a_toy(device):
    ids, model = tokens(2, 40), toy()
    there = toy().to(device)
    for m, i in ((model, ids), (there, ids.to(device))):
        k3.next_token_loss(m(i), i).backward()
    assert_close(there(ids.to(device)).cpu(), model(ids), atol=1e-9, rtol=0)
    for (name, p), q in zip(model.named_parameters(), there.parameters()):
        if p.grad is not None:
            assert_close(q.grad.cpu(), p.grad, atol=1e-9, rtol=1e-9, msg=lambda m: f"{name}: {m}")


def error_of(logits, exact):
    """The median, since a near-tie of the router may send a token elsewhere."""
    return (logits.double().cpu() - exact).abs().median().item() / exact.abs().median().item()


@pytest.mark.parametrize("use_fla", ["0", "1"])
def test_bfloat16_is_as_good_as_on_the_cpu(device, monkeypatch, use_fla):
    monkeypatch.setenv("K3_TEACH_FLA", use_fla)
    ids, exact = tokens(2, 40), toy()(tokens(2, 40)).detach()
    here = error_of(toy(dtype=torch.bfloat16)(ids), exact)
    there = error_of(toy(dtype=torch.bfloat16).to(device)(ids.to(device)), exact)
    assert 0 < there < 2 * here


def test_autocast_is_as_good_as_a_bfloat16_model(device):
    ids, exact = tokens(2, 40), toy()(tokens(2, 40)).detach()
    plain = error_of(toy(dtype=torch.bfloat16)(ids), exact)
    model = toy(dtype=torch.float32).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(ids.to(device))
        loss = k3.next_token_loss(logits, ids.to(device))
    assert 0 < error_of(logits, exact) < 2 * plain
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 6], [11, 1]])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.bfloat16, None)])
def test_pieces_through_the_cache(device, cuts, dtype, tolerance):
    ids, model = tokens(2, 12).to(device), toy(dtype=dtype).to(device)
    cache = model.new_cache(2)
    parts = torch.cat([model(piece, cache=cache) for piece in ids.split(cuts, 1)], 1)
    whole = model(ids).detach()
    if tolerance is not None:
        assert_close(parts, whole, atol=tolerance, rtol=0)
    else:
        exact = toy()(ids.cpu()).detach()
        assert error_of(parts, exact) < 2 * error_of(whole, exact) + 0.01
    before = cache.snapshot()
    step = model(ids[:, :1], cache=cache)
    cache.rollback(before)
    assert torch.equal(model(ids[:, :1], cache=cache), step)


def test_one_generated_token(device):
    """Prefill and one step, as `generate` would: the same token as in float64 on the CPU."""
    chosen = []
    for model, ids in ((toy(), tokens(1, 30)), (toy(dtype=torch.float32).to(device), tokens(1, 30).to(device))):
        cache = model.new_cache()
        first = model(ids, cache=cache)[:, -1:].argmax(-1)
        chosen.append([first.item(), model(first, cache=cache).argmax(-1).item()])
    assert chosen[0] == chosen[1]


def test_a_float32_model_never_meets_fla(device):
    assert fla_refuses(torch.zeros(1, 2, 2, 16, device=device)) is not None
