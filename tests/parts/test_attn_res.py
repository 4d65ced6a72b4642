"""Depth reads: the sum by hand, the two-phase form, and the order of reads and seals in the released model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import k3_teach as k3
from tests.helpers import toy, tokens


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_read_by_hand():
    u, q = rand(3, 5), rand(5, seed=1)
    s = torch.stack([(u[i] / (u[i].square().mean() + 1e-5).sqrt()) @ q for i in range(3)])
    a = s.exp() / s.exp().sum()
    h, weights = k3.attn_res(u, q)
    assert_close(weights, a)
    assert_close(h, a[0] * u[0] + a[1] * u[1] + a[2] * u[2])


def test_worked_example():
    """Weights 0.2, 0.6, 0.2 read 0.2 u0 + 0.6 u1 + 0.2 u2: one-hot sources of equal size and a query of logs."""
    u = torch.eye(3, dtype=torch.float64)
    q = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64).log() / 3 ** 0.5       # a unit source has rms 1/sqrt(3)
    h, weights = k3.attn_res(u, q, eps=0.0)
    assert_close(weights, torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64))
    assert_close(h, torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64))


def test_values_are_raw_and_keys_are_normed():
    """Pitfall 24. Scaling a source leaves its weight alone and scales what is read."""
    u, q = rand(3, 16), rand(16, seed=1)
    loud = u.clone()
    loud[2] *= 1000
    (h, a), (h2, a2) = k3.attn_res(u, q), k3.attn_res(loud, q)
    assert_close(a2, a, atol=1e-4, rtol=0)
    assert h2.norm() > 100 * h.norm()


def test_zero_query_is_the_mean():
    u = rand(4, 2, 6)
    assert_close(k3.attn_res(u, torch.zeros(6).double())[0], u.mean(0))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 9), P=st.integers(1, 5), seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_two_phase_is_exact(n, P, seed, scale):
    sealed, live, queries = rand(n, 2, 3, 8, seed=seed), rand(2, 3, 8, seed=seed + 1) * scale, rand(P, 8, seed=seed + 2) * scale
    mixtures, log_sums = k3.read_sealed(sealed, queries)
    for p in range(P):
        assert_close(mixtures[p], k3.attn_res(sealed, queries[p])[0], atol=1e-12, rtol=1e-12)
        merged = k3.merge_live(mixtures[p], log_sums[p], live, queries[p])
        assert_close(merged, k3.attn_res(torch.cat((sealed, live[None])), queries[p])[0], atol=1e-12, rtol=1e-12)


def test_full_attention_residuals_is_a_seal_before_every_sub_layer():
    """Every output is a source of its own, the embedding the first."""
    outputs, queries = rand(5, 2, 8), rand(6, 8, seed=1)
    stream = k3.BlockStream(outputs[0])
    for i in range(1, 5):
        read = stream.read(queries[i])
        assert_close(read, k3.attn_res(outputs[:i], queries[i])[0])
        stream.seal()
        stream.add(outputs[i])
    assert_close(stream.read(queries[5]), k3.attn_res(outputs, queries[5])[0])


def test_sources_per_layer_in_k3():
    """The table of the released state machine: how many sources each read sees, and where blocks are sealed."""
    x = torch.zeros(1, 2)
    stream, before_mixer, before_ffn, seals = k3.BlockStream(x), [], [], []
    for layer in range(93):
        before_mixer.append(stream.num_sealed + 1)
        if layer % 12 == 0:
            stream.seal()
            seals.append(layer)
        stream.add(x)
        before_ffn.append(stream.num_sealed + 1)
        stream.add(x)
    assert seals == [0, 12, 24, 36, 48, 60, 72, 84]
    assert before_mixer[0] == 1 and before_ffn[0] == 2 and before_mixer[11] == 2
    assert [before_mixer[i] for i in seals[1:]] == [2, 3, 4, 5, 6, 7, 8]
    assert [before_ffn[i] for i in seals] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert before_mixer[85] == before_ffn[92] == stream.num_sealed + 1 == 9


def test_model_reads_as_many_sources():
    model = toy()
    _, trace = model(tokens(1, 3), return_trace=True)
    count = lambda name: [trace[f"L{i}.{name}"].shape[-1] for i in range(9)]
    assert count("attn_read") == [1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert count("mlp_read") == [2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert trace["output_read"].shape[-1] == 4
    assert [trace[f"L{i}.nblocks"].item() for i in range(9)] == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_snapshots_are_written_once():
    """Pitfall 22: what is sealed stays as it was until the end: the embedding first, then the sums of whole blocks."""
    model, ids = toy(), tokens(1, 5)
    _, trace = model(ids, return_trace=True)
    stream = k3.BlockStream(model.embed_tokens(ids).detach(), 1e-5)
    copies = []
    with torch.no_grad():
        for layer in model.layers:
            layer(stream)
            copies += [s.clone() for s in stream.sealed[len(copies):]]
    assert len(copies) == 3
    block = lambda layers: sum(trace[f"L{i}.{m}_out"] for i in layers for m in ("attn", "mlp")).detach()
    expected = [model.embed_tokens(ids).detach(), block(range(4)), block(range(4, 8))]
    for kept, copy, e in zip(stream.sealed, copies, expected):
        assert torch.equal(kept, copy)
        assert_close(kept, e, atol=1e-11, rtol=0)


def test_the_stack_can_be_cut_anywhere():
    """Pitfall 23: the live sum and all snapshots are the whole state between layers."""
    model, ids = toy(), tokens(1, 5)
    expected = model(ids)
    for cut in range(1, 9):
        with torch.no_grad():
            stream = k3.BlockStream(model.embed_tokens(ids), 1e-5)
            for layer in model.layers[:cut]:
                layer(stream)
            moved = k3.BlockStream(stream.prefix.clone(), 1e-5)
            moved.sealed = [s.clone() for s in stream.sealed]
            for layer in model.layers[cut:]:
                layer(moved)
            query = model.output_attn_res_norm.weight * model.output_attn_res_proj.weight[0]
            assert torch.equal(model.lm_head(model.norm(moved.read(query))), expected.detach())


def test_embedding_leaves_the_sum():
    """After layer 0's seal the embedding is a source of its own and not part of the live sum."""
    model, ids = toy(), tokens(1, 4)
    _, trace = model(ids, return_trace=True)
    assert_close(trace["L0.prefix"], trace["L0.attn_out"] + trace["L0.mlp_out"])
    assert_close(trace["L3.prefix"], sum(trace[f"L{i}.{m}_out"] for i in range(4) for m in ("attn", "mlp")), atol=1e-12, rtol=0)
    assert_close(trace["L4.prefix"], trace["L4.attn_out"] + trace["L4.mlp_out"])


def test_untrained_network_computes_the_plain_residual():
    """With zero queries every read is a mean, and the norm after it cannot tell a mean from a sum. With blocks of one
    layer... the sum of all sources is the plain residual, so the first block agrees up to eps."""
    changes = dict(num_hidden_layers=4, kda_layers=(1, 2, 3), full_attn_layers=(4,), attn_res_block_size=4)
    torch.manual_seed(0)
    depth = k3.K3Model(k3.K3Config.toy(**changes), dtype=torch.float64)
    plain = k3.K3Model(k3.K3Config.toy(**changes | dict(attn_res_block_size=None)), dtype=torch.float64)
    plain.load_state_dict({n: p for n, p in depth.state_dict().items() if "_res_" not in n})
    with torch.no_grad():
        for model in (depth, plain):
            model.embed_tokens.weight.copy_(torch.randn(256, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    ids = tokens(1, 6)
    assert_close(depth(ids), plain(ids), atol=1e-4, rtol=0)


def test_two_seals_in_a_row_are_refused():
    stream = k3.BlockStream(rand(2, 4))
    stream.seal()
    with pytest.raises(k3.InputError, match="seal"):
        stream.seal()
