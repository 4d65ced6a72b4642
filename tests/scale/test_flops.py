"""Counts by formula against products that torch counts, against loops, and against known figures."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import k3_teach as k3
from k3_teach.parts.moe import experts_loop
from k3_teach.scale import cost, flops
from tests.helpers import tokens, toy
from tests.test_model import VARIANTS


def counted(fn) -> dict:
    """Floating-point operations of the matrix products in `fn`, as torch counts them, by kind."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fn()
    return {str(kind): n for kind, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("C, K, V", [(4, 6, 8), (16, 5, 3), (1, 2, 2)])
def test_a_chunk_of_kda_product_by_product(C, K, V):
    """The equations of a chunk, written down with one product for each term; the inverse as nested loops."""
    q, k, v, S = torch.zeros(C, K), torch.zeros(C, K), torch.zeros(C, V), torch.zeros(K, V)

    def chunk():
        attend, overlap = q @ k.T, k @ k.T
        u = overlap @ (v - k @ S)           # (I + A)^-1 is as large as the scores
        return q @ S + attend @ u, k.T @ u

    inverse = sum(2 for i in range(C) for j in range(i) for _ in range(j + 1, i))
    assert flops.kda_chunk_flops(2 * C, 3, K, V, C) == 2 * 3 * (sum(counted(chunk).values()) + inverse)


def test_kda_at_released_size():
    """96 heads of 128 x 128, chunks of 32: 131,382 operations a token and head, of which the state takes three quarters."""
    assert flops.kda_chunk_flops(1, 1, 128, 128) == 6 * 128 ** 2 + 4 * 32 * 256 + 310 == 131_382
    assert flops.kda_step_flops(1, 96, 128, 128) == 7 * 96 * 128 ** 2
    assert flops.kda_bytes(1, 1, 96, 128, 128) == 4 * 96 * (5 * 128 + 1 + 2 * 128 ** 2)


@pytest.mark.parametrize("T, S", [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_attention_counts_the_pairs_of_the_mask(T, S):
    pairs = int(k3.causal_mask(T, S).sum())
    assert flops.attention_flops(T, S, 3, 5, 7) == 2 * pairs * 3 * (5 + 7)


def test_absorbed_mla_is_what_a_step_multiplies():
    """By einsum, without the kernel, whose value is R wider than it need be."""
    S, H, L, R, N, V = 10, 3, 8, 2, 4, 6
    q, latent, kv_b = torch.zeros(H, N + R), torch.zeros(S, L + R), torch.zeros(H, N + V, L)

    def step():
        q_latent = torch.cat((torch.einsum("hn,hnl->hl", q[:, :N], kv_b[:, :N]), q[:, N:]), -1)
        o = (q_latent @ latent.T) @ latent[:, :L]
        return torch.einsum("hl,hvl->hv", o, kv_b[:, N:])

    assert flops.mla_absorbed_flops(1, S, H, L, R, N, V) == sum(counted(step).values())
    assert flops.mla_absorbed_bytes(S, H, L, R, N, V) == latent.nbytes + kv_b.nbytes


def test_experts_are_what_the_loop_multiplies():
    E, k, N, l, m = 6, 2, 11, 4, 8
    w1, w3, w2 = torch.zeros(E, m, l), torch.zeros(E, m, l), torch.zeros(E, l, m)
    idx = torch.rand(N, E).topk(k).indices
    loop = lambda: experts_loop(torch.zeros(N, l), idx, torch.ones(N, k), w1, w2, w3, torch.mul)
    assert flops.experts_flops(N, k, l, m) == sum(counted(loop).values())
    assert flops.experts_bytes(N, E, l, m) == w1.nbytes + w2.nbytes + w3.nbytes + 2 * 4 * N * l


@pytest.mark.parametrize("block", [1, 2, 3])
def test_depth_sources_are_those_of_the_model(block):
    model = toy(attn_res_block_size=block)
    _, trace = model(tokens(1, 2), return_trace=True)
    seen = [trace[f"L{i}.{name}"].shape[-1] for i in range(len(model.layers)) for name in ("attn_read", "mlp_read")]
    assert flops.depth_sources(2 * len(model.layers), 2 * block) == [*seen, trace["output_read"].shape[-1]]


def test_depth_at_released_size():
    """187 reads, of nine sources at the end; a block's finished ones are fetched once, 1 to 8 of them."""
    sources = flops.depth_sources(186, 24)
    assert len(sources) == 187 and sources[:2] == [1, 2] and sources[24:26] == [2, 3] and sources[-1] == 9
    assert flops.depth_flops(1, 7168, sources) == 4 * 7168 * sum(sources)
    assert flops.depth_bytes(1, 1, 48, 24, size=1) == 48 + 49 + (1 + 2)
    assert flops.depth_bytes(1, 1, 186, 24, size=1) == 186 + 187 + (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)


@pytest.mark.parametrize("name", ["plain residual", "no latent", "low-rank gate", "no MLA gate", "no q-LoRA", "dense", "all KDA",
                                  "no shared experts"])
def test_weights_of_a_token_are_what_the_layers_multiply(name):
    """Every matrix but the one that MLA expands with meets each token in a plain product.

    Vectors and convolutions, which are in the count of weights, are none; depth reads are left out of the model.
    """
    model, T = toy(**VARIANTS[name] | dict(attn_res_block_size=None)), 7
    c = model.config
    expand = len(c.mla_layers) * c.num_attention_heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    no_product = sum(p.numel() for p in model.parameters() if p.ndim == 1 or p.ndim == 3 and p.shape[1] == 1)
    rows = flops.multiply_adds(c, T)
    weights = sum(rows[row.name] for row in cost.components(c) if row.active)
    assert weights == cost.active_parameters(c)
    products = sum(n for kind, n in counted(lambda: model(tokens(1, T))).items() if kind in ("aten.mm", "aten.addmm"))
    assert products == 2 * T * (weights - no_product - expand)


def test_the_model_at_released_size():
    c = k3.K3Config.k3()
    short, long = flops.multiply_adds(c, 1), flops.multiply_adds(c, 10 ** 6, decoding=True)
    assert short["KDA state"] == 3 * 69 * 96 * 128 ** 2 and short["MLA attention"] == 24 * 30_720
    assert long["MLA attention"] == 24 * 104_448 * 10 ** 6
    assert short["AttnRes reads"] == 2 * 7168 * sum(flops.depth_sources(186, 24))
    assert {name for name in short if short[name] != long[name]} == {"MLA attention"}
    assert "AttnRes reads" not in flops.multiply_adds(k3.K3Config.toy(attn_res_block_size=None), 1)


def test_products_of_a_decoded_token_at_released_size():
    """Counted over the model on paper, with its cache: matrices exactly, MLA's kernel 64 values a pair wider, the write left out."""
    c, T = k3.K3Config.k3(), 40
    model = k3.K3Model(c, device="meta", dtype=torch.bfloat16)
    cache, ids = model.new_cache(), torch.zeros(1, T, dtype=torch.long, device="meta")
    with torch.no_grad():
        model(ids, cache=cache)
        grouped = {torch.ops.aten._grouped_mm: lambda a, b, *_, out_shape=None, **__: 2 * a[0] * a[1] * b[-1]}
        with FlopCounterMode(display=False, custom_mapping=grouped) as counter, sdpa_kernel(SDPBackend.MATH):
            model(ids[:, :1], cache=cache)
    seen = {name: sum(kinds.values()) // 2 for name, kinds in counter.get_flop_counts().items()}
    rows = {row.name: row for row in cost.components(c)}
    mixers = [seen[f"K3Model.layers.{i}.self_attn"] for i in range(93)]
    matrices = lambda name: rows[name].active - rows[name].vectors
    kda, mla = matrices("KDA mixers") + 2 * 96 * 128 ** 2, matrices("MLA mixers") + 96 * (576 + 576) * (T + 1)
    assert mixers == [kda if c.is_kda(i) else mla for i in range(93)]
    moe = sum(row.active - row.vectors for name, row in rows.items() if name.startswith("MoE"))
    assert {seen[f"K3Model.layers.{i}.block_sparse_moe"] for i in range(1, 93)} == {moe}
    assert seen["K3Model.lm_head"] == rows["output head"].active
    assert cache.nbytes() == cost.cache_bytes(c, T + 1)["total"]


def test_experts_in_use_against_draws():
    generator = torch.Generator().manual_seed(0)
    for tokens_, tolerance in ((1, 0), (8, 0.02), (64, 0.02), (512, 0.005)):
        drawn = [torch.rand(tokens_, 896, generator=generator).topk(16).indices.unique().numel() for _ in range(20)]
        assert flops.experts_in_use(896, 16, tokens_) == pytest.approx(sum(drawn) / 20, rel=tolerance + 1e-12)


def test_bytes_of_a_step_of_decoding():
    """By hand: a batch of one touches its 16 experts in every layer; a batch without end all that is stored but the embedding."""
    c = k3.K3Config.k3()
    one, many = flops.decode_bytes(c, 1, 1000), flops.decode_bytes(c, 10 ** 6, 0)
    assert one["routed experts"] == pytest.approx(92 * 16 * 17_547_264, rel=1e-12)
    assert one["KDA states"] == 2 * (434_110_464 + 15_261_696) and one["MLA rows"] == 1000 * 24 * 576 * 2
    stored = cost.checkpoint_bytes(c, vision=False)["total"]
    assert many["routed experts"] + many["other weights"] == pytest.approx(stored - 2 * 163_840 * 7168, rel=1e-12)
    assert flops.decode_bytes(c, 4, 0, 2)["routed experts"] == flops.decode_bytes(c, 8, 0)["routed experts"]
    assert flops.decode_bytes(k3.K3Config.toy(num_experts=0), 2, 5)["routed experts"] == 0
