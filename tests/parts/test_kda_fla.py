"""What we say to fla's kernels, without a GPU: a stand-in keeps their conventions and computes by the recurrence."""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts import kda_fla
from tests.parts.test_kda import inputs, relative


def kernels(calls):
    """The two functions as fla 0.6 documents them. Whatever else they are given is a TypeError."""
    def run(name, q, k, v, g, beta, scale, initial_state, output_final_state, dtype):
        assert initial_state is None or initial_state.dtype == torch.float32
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        wide = [None if x is None else x.double() for x in (q * scale, k, v, g, beta, initial_state)]
        o, S = k3.recurrent_kda(*wide)
        calls.append((name, q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype))
        return o.to(dtype), S.float() if output_final_state else None

    def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, safe_gate=False):
        assert not (safe_gate and (g < -5).any()), "fla's safe_gate overflows below -5"
        return run(f"chunk{' safe' * safe_gate}", q, k, v, g, beta, scale, initial_state, output_final_state, q.dtype)

    def fused_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        assert not torch.is_grad_enabled(), "this kernel has no backward"
        return run("step", q, k, v, g, beta, scale, initial_state, output_final_state, v.dtype)
    return chunk_kda, fused_recurrent_kda


@pytest.fixture
def fla(monkeypatch):
    """A module `fla` that can be imported; its calls are in `fla.calls`."""
    root, ops, kda = ModuleType("fla"), ModuleType("fla.ops"), ModuleType("fla.ops.kda")
    root.__version__, root.calls, root.ops, ops.kda = "0.6.0", [], ops, kda
    kda.chunk_kda, kda.fused_recurrent_kda = kernels(root.calls)
    for module in (root, ops, kda):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("K3_TEACH_FLA", raising=False)
    kda_fla._not_importable.cache_clear()
    yield root
    kda_fla._not_importable.cache_clear()


def as_in_a_layer(args, dtype=torch.bfloat16):
    """q, k, g, beta and the state in float32; v in the dtype of the model."""
    return [a.to(dtype if i == 2 else torch.float32) for i, a in enumerate(args)]


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("gate, bound, name", [
    ("mixed", -5.0, "chunk safe"), ("mixed", -4.0, "chunk safe"), ("mixed", None, "chunk"), ("mixed deep", -60.0, "chunk")])
def test_chunks(fla, gate, bound, name, state):
    args = as_in_a_layer(inputs(9, gate=gate))
    args[5] = args[5] if state else None
    rounded = [args[0].bfloat16(), args[1].bfloat16(), *args[2:]]
    o, S = kda_fla.fla_kda(*args, bound)
    expected = k3.recurrent_kda(*rounded)
    assert o.dtype == S.dtype == torch.float32
    assert relative(o, expected[0].double()) < 2 ** -8 and relative(S, expected[1].double()) < 1e-6
    bf16, f32 = torch.bfloat16, torch.float32
    assert fla.calls == [(name, bf16, bf16, bf16, f32, f32)]


def test_one_token_is_exact_in_float32(fla):
    args = as_in_a_layer(inputs(1))
    with torch.no_grad():
        o, S = kda_fla.fla_kda(*args, -5.0)
    expected = k3.recurrent_kda(*args)
    assert_close(o, expected[0], atol=1e-6, rtol=0)
    assert_close(S, expected[1], atol=1e-6, rtol=0)
    assert fla.calls == [("step", *(torch.float32,) * 5)] and o.dtype == torch.float32
    kda_fla.fla_kda(*args, -5.0)                    # with gradients it is a chunk of one token
    assert fla.calls[1][0] == "chunk safe"


def test_gradients_reach_every_input(fla):
    args = [a.requires_grad_() for a in as_in_a_layer(inputs(9))]
    o, S = kda_fla.fla_kda(*args, -5.0)
    (o.sum() + S.sum()).backward()
    assert all(a.grad is not None and a.grad.dtype == a.dtype and a.grad.abs().max() > 0 for a in args)


def test_shapes_are_checked_before_the_kernel(fla):
    args = as_in_a_layer(inputs(9))
    with pytest.raises(k3.InputError, match="beta has the shape"):
        kda_fla.fla_kda(*args[:4], args[4][:, :3], args[5])
    assert fla.calls == []


def values(device="cuda", dtype=torch.bfloat16, width=128):
    with FakeTensorMode():
        return torch.empty(1, 4, 2, width, dtype=dtype, device=device)


def test_served_is_sixteen_bit_on_cuda(fla):
    assert kda_fla.fla_refuses(values()) is None and kda_fla.fla_refuses(values(dtype=torch.float16)) is None
    for v, reason in ((values("cpu"), "CUDA only"), (values(dtype=torch.float32), "would round torch.float32"),
                      (values(dtype=torch.float64), "would round"), (values(width=8), "not 8"), (values(width=512), "not 512")):
        assert reason in kda_fla.fla_refuses(v)


def test_it_can_be_switched_off(fla, monkeypatch):
    monkeypatch.setenv("K3_TEACH_FLA", "0")
    assert "K3_TEACH_FLA=0" in kda_fla.fla_refuses(values())
    monkeypatch.setenv("K3_TEACH_FLA", "1")
    assert kda_fla.fla_refuses(values()) is None


def test_an_old_one_is_not_used(fla):
    fla.__version__ = "0.5.2"
    assert "0.5.2 is older than 0.6" in kda_fla.fla_refuses(values())
    kda_fla._not_importable.cache_clear()
    fla.__version__ = "0.10.0rc1"
    assert kda_fla.fla_refuses(values()) is None


def test_without_it_the_reason_is_given(fla, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)      # so that the import fails
    assert "not installed" in kda_fla.fla_refuses(values())


@pytest.mark.filterwarnings("error")
def test_asking_does_not_break_a_graph(fla):
    ask = lambda x: x + 1 if kda_fla.fla_missing() is None else x
    torch._dynamo.reset()
    assert torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_layer_through_it_is_the_same_layer(fla, monkeypatch, bound):
    """Prefill in two pieces, then two tokens, as on a GPU; padding on the left."""
    torch.manual_seed(0)
    layer = k3.KDA(32, num_heads=2, head_dim=16, gate_lower_bound=bound)
    x, mask = torch.randn(2, 12, 32), torch.arange(12) >= torch.tensor([[0], [3]])

    def run():
        state = k3.KDAState()
        with torch.no_grad():
            ends = (5, 10, 11, 12)
            return torch.cat([layer(x[:, a:b], state, mask[:, :b]) for a, b in zip((0, *ends), ends)], 1)
    expected = run()
    monkeypatch.setattr("k3_teach.parts.kda_layer.fla_refuses", lambda v: None)
    assert_close(run()[mask], expected[mask], atol=1e-5, rtol=0)
    assert [c[0] for c in fla.calls] == ["chunk safe" if bound else "chunk"] * 2 + ["step"] * 2
