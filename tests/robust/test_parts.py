"""Every function that the package exports, and every argument of it, against every bad value."""

import inspect

import pytest
import torch

import k3_teach as k3
from tests.robust.bad import try_all

B, T, S, H, K, V, D, E, N = 2, 3, 5, 2, 4, 6, 8, 4, 5
GENERATOR = torch.Generator().manual_seed(0)


def r(*shape):
    return torch.randn(*shape, generator=GENERATOR)


ATTENTION = dict(q=r(B, H, T, K), k=r(B, H, S, K), v=r(B, H, S, V), scale=0.5, mask=k3.causal_mask(T, S))
MLA = dict(q=r(B, H, T, K + 2), latent=r(B, S, D + 2), kv_b=r(H, K + V, D), v_dim=V, scale=0.5, mask=torch.ones(B, 1, T, S, dtype=torch.bool))
KDA = dict(q=r(B, T, H, K), k=r(B, T, H, K), v=r(B, T, H, V), g=-r(B, T, H, K).abs(), beta=r(B, T, H).sigmoid(), initial_state=r(B, H, K, V))
COMPRESSED = dict(q=r(B, H, T, D), kv=r(B, S, D), ratio=2, window=2, scale=0.5, scores=r(B, S), recent=False)
INDEXED = dict(top_k=1, index_q=r(B, 2, T, 3), index_k=r(B, 2, 3), index_weights=r(B, 2, T), overlap=False)
EXPERTS = dict(x=r(N, D), idx=torch.randint(E, (N, 2), generator=GENERATOR), weights=r(N, 2), w1=r(E, 3, D), w2=r(E, D, 3), w3=r(E, 3, D), act=k3.glu)
GATE = dict(z=r(B, T, H, K), A_log=r(H), dt_bias=r(H, K))
TWO = dict(gate=r(B, D), up=r(B, D))
CALLS = {
    "attention": ATTENTION, "attention_eager": ATTENTION, "causal_mask": dict(T=T, S=S, valid=torch.ones(B, S, dtype=torch.bool), device=None),
    "mla_absorbed": MLA, "mla_expanded": MLA, "csa": COMPRESSED | INDEXED, "hca": COMPRESSED,
    "recurrent_kda": KDA, "chunk_kda": KDA | dict(chunk_size=2, gate_lower_bound=-5.0), "l2_normalize": dict(x=r(B, D), eps=1e-6),
    "short_conv": dict(x=r(B, T, D), weight=r(D, 1, 4), taps=r(B, 3, D)), "bounded_gate": GATE | dict(lower_bound=-5.0), "softplus_gate": GATE,
    "attn_res": dict(sources=r(3, B, T, D), query=r(D), eps=1e-5), "read_sealed": dict(sealed=r(3, B, T, D), queries=r(2, D), eps=1e-5),
    "merge_live": dict(mixture=r(B, T, D), log_sum=r(B, T), live=r(B, T, D), query=r(D), eps=1e-5), "rms_norm": dict(x=r(B, D), weight=r(D), eps=1e-5),
    "rope_angles": dict(positions=torch.arange(T), dim=4, base=1e4), "apply_rope": dict(x=r(B, T, K), angles=r(T, K // 2)),
    "softcap": dict(x=r(3), beta=4.0), "glu": TWO, "swiglu": TWO, "situ_glu": TWO | dict(beta=4.0, linear_beta=25.0),
    "route": dict(scores=r(N, E).sigmoid(), bias=r(E), top_k=2, renormalize=True, scaling=1.0, num_groups=2, topk_group=1),
    "experts_loop": EXPERTS, "experts_grouped": EXPERTS, "expert_load": dict(idx=EXPERTS["idx"], num_experts=E), "max_vio": dict(load=torch.arange(E)),
    "sign_update": dict(bias=r(E), load=torch.arange(E), step=0.1), "quantile_bias": dict(scores=r(N, E).sigmoid(), bias=r(E), top_k=2, rank="q"),
    "newton_schulz": dict(G=r(4, 3), steps=2, coefficients=(3.4, -4.7, 2.0)), "per_head": dict(G=r(4, 3), num_heads=2, fn=k3.newton_schulz),
    "muon_direction": dict(momentum=r(4, 3), num_heads=2, steps=2, rms=0.2),
    "next_token_loss": dict(logits=r(B, T, 7), ids=torch.randint(7, (B, T), generator=GENERATOR), attention_mask=torch.ones(B, T, dtype=torch.bool)),
}


def test_every_exported_function_of_tensors_is_here():
    functions = {n for n, f in vars(k3).items() if inspect.isfunction(f)}
    assert functions - CALLS.keys() == {"generate", "load_checkpoint", "save_checkpoint", "init_parameters", "speculate", "speculate_greedy"}
    for name, arguments in CALLS.items():
        assert set(arguments) == set(inspect.signature(getattr(k3, name)).parameters), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_function_gives_a_result_or_our_error(name):
    call, arguments = getattr(k3, name), CALLS[name]
    call(**arguments)
    raw, refused = try_all(call, arguments, leave_out={"act", "fn"})     # another function may do as it likes
    assert raw == [] and refused >= 20 * len(set(arguments) - {"act", "fn"})


@pytest.mark.parametrize("name, change, message", [
    ("attention", dict(v=r(0, H, S, V)), r"v is torch.float32 \[0, 2, 5, 6\]; it must be floats \[\*, S, V\] with S = 5"),
    ("experts_loop", dict(idx=EXPERTS["idx"] + 4), r"idx holds other values than 0..3"),
    ("attn_res", dict(query=r(D).double()), "query is torch.float64 and sources torch.float32; they must be float64 all, or none of them"),
    ("mla_absorbed", dict(latent=r(B, S, D + 3)), r"must end in \[T, N\+R\], \[S, L\+R\], \[N\+V, L\]"),
    ("route", dict(top_k=True), "top_k is True; it must be an integer from 0 to"),
    ("short_conv", dict(taps=r(B, 2, D)), "taps holds 2 tokens; for a weight of width 4 it must hold 3"),
    ("rms_norm", dict(weight=r(D).to("meta")), "weight is on meta; it must be on cpu, as x is")])
def test_what_torch_takes_in_silence_or_refuses_in_riddles(name, change, message):
    """The first two give numbers without an error where nothing checks: of memory that is not theirs, of no expert."""
    with pytest.raises(k3.InputError, match=message):
        getattr(k3, name)(**CALLS[name] | change)


@pytest.mark.parametrize("shared", [(1, 1), (1, H), (B, 1)])
def test_heads_and_rows_may_share_keys_and_values(shared):
    for change in (dict(k=r(*shared, S, K)), dict(v=r(*shared, S, V)), dict(k=r(*shared, S, K), v=r(*shared, S, V))):
        torch.testing.assert_close(k3.attention(**ATTENTION | change), k3.attention_eager(**ATTENTION | change))


@pytest.mark.parametrize("name", ["attention", "rms_norm", "attn_res", "recurrent_kda", "glu"])
def test_nan_passes_through(name):
    first = next(iter(CALLS[name]))
    out = getattr(k3, name)(**CALLS[name] | {first: CALLS[name][first] * float("nan")})
    assert (out[0] if isinstance(out, tuple) else out).isnan().any()
