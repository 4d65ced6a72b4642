"""Attention Residuals: all depth reads of a model, two phases against a stack at each read."""

from collections.abc import Iterator

import torch

from benchmarks.baselines.attn_res import direct_reads, read_without_keys
from benchmarks.case import Case, with_gradients
from k3_teach.parts.attn_res import TwoPhaseStream, attn_res
from k3_teach.scale.flops import depth_bytes, depth_flops, depth_sources

OURS, EPS = "two phases", 1e-5
READS = {"stack at each read": read_without_keys, "stack, by definition": attn_res}


def cases(quick: bool) -> Iterator[Case]:
    layers, block = (4, 2) if quick else (93, 12)
    for tokens, d in ((8, 16),) if quick else ((256, 1024), (1, 512)):
        yield reads(layers, block, tokens, d)
    yield reads(layers, block, *((8, 16) if quick else (256, 1024)), backward=True)


def stream_reads(x, outputs, queries, block: int) -> list[torch.Tensor]:
    """All mixtures of a model's stream: x and outputs [n, d], queries [len(outputs) + 1, d]."""
    stream, mixtures = TwoPhaseStream(x, EPS, queries), []
    for i, (query, y) in enumerate(zip(queries, outputs)):
        mixtures.append(stream.read(query))
        if i % block == 0:
            stream.seal()
        stream.add(y)
    return [*mixtures, stream.read(queries[-1])]


def reads(layers: int, block: int, tokens: int, d: int, backward: bool = False) -> Case:
    """Two sub-layers a layer, and the last read; outputs are drawn, not computed."""
    n, size = 2 * layers, 2 * block
    torch.manual_seed(0)
    x, *outputs = torch.randn(n + 1, tokens, d)
    queries = torch.randn(n + 1, d) * d ** -0.5
    ways = {OURS: lambda x, queries, *ys: stream_reads(x, ys, queries, size),
            **{name: lambda x, queries, *ys, read=read: direct_reads(x, ys, queries, size, read)
               for name, read in READS.items()}}
    inputs = (x, queries, *outputs)
    flops = depth_flops(tokens, d, depth_sources(n, size))
    name = f"{layers} layers, N {tokens}, d {d}"
    if backward:
        contenders = {key: with_gradients(way, *inputs) for key, way in ways.items()}
        return Case("AttnRes forward and backward", name, contenders, OURS, 3 * flops,
                    tolerance=1e-3, seconds=8.0)
    contenders = {key: lambda way=way: way(*inputs) for key, way in ways.items()}
    return Case("AttnRes forward", name, contenders, OURS, flops,
                depth_bytes(tokens, d, n, size))
