"""Rows of `benchmarks.gpu` about more than one operator: depth reads and whole layers."""

import copy
from collections.abc import Iterator

import torch

import k3_teach as k3
from benchmarks.baselines.attn_res import direct_reads
from benchmarks.cases.attn_res import stream_reads
from benchmarks.gpu_work import Row, Sizes, Work, normal, off
from k3_teach.model import make_mixer
from k3_teach.scale import cost, flops


def depth(c, device, N: int) -> Iterator[Row]:
    """All depth reads of a model; the error is against the definition."""
    n, block, d = 2 * c.num_hidden_layers, 2 * c.attn_res_block_size, c.hidden_size
    two = lambda x, ys, queries: stream_reads(x, ys, queries, block)
    direct = lambda x, ys, queries: direct_reads(x, ys, queries, block, k3.attn_res)

    def work(way):
        x, *outputs = normal(device, n + 1, N, d)
        queries = normal(device, n + 1, d) * d ** -0.5
        exact = lambda: direct(x[:1].double(), [y[:1].double() for y in outputs],
                               queries.double())
        part = lambda: way(x[:1], [y[:1] for y in outputs], queries)
        count = flops.depth_flops(N, d, flops.depth_sources(n, block))
        return Work(lambda: way(x, outputs, queries), count,
                    flops.depth_bytes(N, d, n, block, size=2), lambda: off(part(), exact()))

    yield f"AttnRes, {n + 1} reads, tokens {N}, two phases", lambda: work(two)
    yield f"AttnRes, {n + 1} reads, tokens {N}, a stack at each", lambda: work(direct)


def layers(c, device, sizes: Sizes) -> Iterator[Row]:
    """One mixer of each kind, with its projections, as the model calls it."""
    S = sizes.layer
    for name, after in (("KDA", ""), ("MLA", f" after {S}")):
        for what, T in ((f"prefill of {S}", S), (f"one token{after}", 1)):
            yield (f"{name} layer, {what}",
                   lambda kda=name == "KDA", T=T: layer_work(c, device, kda, T, S))


def layer_work(c, device, kda: bool, T: int, S: int) -> Work:
    """The last T of S tokens."""
    index = next(i for i in range(c.num_hidden_layers) if c.is_kda(i) == kda)
    with torch.device(device):
        layer = make_mixer(c, index).to(torch.bfloat16)
    draw = lambda tokens: normal(device, 1, tokens, c.hidden_size)
    x, state = draw(T), k3.KDAState() if kda else k3.LatentCache()
    if T == 1:      # a KDA layer's time does not depend on what came before
        layer(draw(8 if kda else S - 1), state=state)

    def call():
        before = state.snapshot()
        layer(x, state=state)
        state.restore(before)

    def error():
        part = draw(16)
        return off(layer(part), copy.deepcopy(layer).double()(part.double()))
    weights, inside = layer_counts(c, kda, T, S)
    return Work(call, 2 * T * weights + inside, 2 * weights, error)


def layer_counts(c, kda: bool, T: int, S: int) -> tuple[int, int]:
    """Numbers in the matrices, and operations of the mixer itself."""
    if kda:
        a = c.linear_attn_config
        return (cost.kda_parameters(c)[0],
                flops.kda_chunk_flops(T, a.num_heads, a.head_dim, a.head_dim))
    return (cost.mla_parameters(c), flops.attention_flops(
        T, S, c.num_attention_heads, c.qk_head_dim, c.v_head_dim))
