"""Depth reads: the sum by hand, the two-phase form, and the order of reads and seals in the released model."""

import pytest
import torch
from hypothesis import example, given, settings
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


STEPS = st.lists(st.sampled_from(["read", "add", "seal"]), max_size=60)
NARROW = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def walk(stream, steps, outputs, queries, trace=None):
    """Take a stream through the steps that it allows; all that was read, stacked."""
    queries, outputs, reads = iter(queries), iter(outputs), []
    for step in steps:
        if step == "read":
            reads.append(stream.read(next(queries), trace, f"{len(reads)}"))
        elif step == "add":
            stream.add(next(outputs))
        elif stream.prefix is not None:
            stream.seal()
    return torch.stack([*reads, stream.read(next(queries), trace, "last")])


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 30.0]), dtype=st.sampled_from(list(NARROW)))
@example(steps=["seal"] + ["add", "read"] * 30, seed=0, scale=1.0, dtype=torch.float64)     # more reads than are mixed at once
@example(steps=["read", "seal", "add"] * 12, seed=0, scale=1.0, dtype=torch.float64)        # Full Attention Residuals
@example(steps=["seal", "read", "read", "add"], seed=0, scale=1.0, dtype=torch.bfloat16)    # nothing live
def test_two_phase_stream_reads_what_the_stream_reads(steps, seed, scale, dtype):
    """Any order of reads, adds and seals: mixtures, weights and all gradients."""
    x, outputs, queries = rand(2, 3, 8, seed=seed), scale * rand(60, 2, 3, 8, seed=seed + 1), scale * rand(61, 8, seed=seed + 2)
    results = []
    for make in (lambda x, q: k3.BlockStream(x, 1e-5), lambda x, q: k3.TwoPhaseStream(x, 1e-5, q[:steps.count("read") + 1])):
        leaves, trace = [v.to(dtype).requires_grad_() for v in (x, outputs, queries)], {}
        read = walk(make(leaves[0], leaves[2]), steps, leaves[1], leaves[2], trace)
        assert read.dtype == dtype
        grads = torch.autograd.grad(read, leaves, rand(*read.shape, seed=seed + 3).to(dtype), materialize_grads=True)
        results.append((read, trace, grads))
    (read, trace, grads), (read2, trace2, grads2) = results
    tolerance, size = NARROW[dtype], max(1, outputs.abs().max().item())
    assert_close(read2, read, atol=tolerance * size, rtol=0)
    assert trace.keys() == trace2.keys() and all(torch.equal(trace[n], trace2[n]) for n in trace)
    if dtype == torch.float64:                        # rounded gradients cancel
        for a, b in zip(grads2, grads, strict=True):
            assert_close(a, b, atol=1e-11 * max(1, b.abs().max().item()), rtol=0)


def test_two_phase_stream_ends_with_its_queries():
    stream = k3.TwoPhaseStream(rand(2, 4), 1e-5, rand(2, 4, seed=1))
    stream.read(None)
    stream.seal()
    stream.read(None)
    with pytest.raises(k3.InputError, match="read 3 of a stream that was made with 2 queries"):
        stream.read(None)


def test_tokens_do_not_meet_in_two_phases():
    """Not a bit of what token 0 reads depends on the others."""
    x, outputs, queries = rand(1, 7, 16), rand(40, 1, 7, 16, seed=1), rand(41, 16, seed=2)
    steps = ["read", "seal", *["add", "read"] * 9] * 4
    others = outputs.clone()
    others[:, :, 1:] = 100 * rand(40, 1, 6, 16, seed=3)
    a, b = (walk(k3.TwoPhaseStream(x, 1e-5, queries), steps, v, queries) for v in (outputs, others))
    assert torch.equal(a[:, :, 0], b[:, :, 0]) and not torch.equal(a, b)


@pytest.mark.parametrize("size", [1, 2, 4, 9, 12])
def test_model_announces_the_queries_that_its_layers_read_with(size, monkeypatch):
    model, seen = toy(attn_res_block_size=size), []
    read = k3.TwoPhaseStream.read
    monkeypatch.setattr(k3.TwoPhaseStream, "read", lambda self, query, *rest: seen.append(query) or read(self, query, *rest))
    logits = model(tokens(2, 5))
    assert torch.equal(torch.stack(seen), model.new_stream(torch.zeros(1, 1, 64)).queries)
    monkeypatch.setattr(model, "new_stream", lambda x: k3.BlockStream(x, model.config.rms_norm_eps))
    assert_close(logits, model(tokens(2, 5)), atol=1e-11, rtol=0)


def test_sealed_sources_are_fetched_in_few_portions(monkeypatch):
    """187 reads of a network as deep as K3: 16 fetches, and never more than 12 mixtures wait."""
    portions, phase_1 = [], k3.parts.attn_res.read_sealed
    def counted(sealed, queries, eps):
        portions.append((len(sealed), len(queries)))
        return phase_1(sealed, queries, eps)
    monkeypatch.setattr(k3.parts.attn_res, "read_sealed", counted)
    block = ["read", "add", "read", "add"]
    steps = [s for i in range(93) for s in (["read", "seal", *block[1:]] if i % 12 == 0 else block)]
    walk(k3.TwoPhaseStream(torch.zeros(2, 4), 1e-5, torch.zeros(187, 4)), steps, torch.zeros(186, 2, 4), torch.zeros(187, 4))
    assert portions == [(n, 12) for n in range(1, 8) for _ in range(2)] + [(8, 12), (8, 6)]


def test_two_phase_stream_compiles_without_a_break():
    x, outputs, queries = rand(2, 3, 8), rand(8, 2, 3, 8, seed=1), rand(11, 8, seed=2)
    steps = ["read", "seal", *["add", "read"] * 4] * 2
    f = lambda x, outputs, queries: walk(k3.TwoPhaseStream(x, 1e-5, queries), steps, outputs, queries)
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    assert_close(compiled(x, outputs, queries), f(x, outputs, queries))


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
            logits = model.lm_head(model.norm(moved.read(query)))
        assert_close(logits, expected.detach(), atol=1e-11, rtol=0)


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
