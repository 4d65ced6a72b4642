"""Routed experts: from one token, when few are in use, to thousands, when all are."""

from collections.abc import Iterator

import torch
from torch.func import functional_call

from benchmarks.baselines.experts import indexed_loop, sorted_loop
from benchmarks.case import Case, with_gradients
from k3_teach.parts.moe import Experts, experts_loop
from k3_teach.parts.situ import Activation
from k3_teach.scale.flops import BACKWARD, experts_bytes, experts_flops

OURS, INNER = "Experts", 128
LOOPS = {"loop with masks": experts_loop, "loop, W[e]": indexed_loop, "sorted loop": sorted_loop}
K3, SMALL = (896, 16), (64, 4)              # experts, chosen


def cases(quick: bool) -> Iterator[Case]:
    if quick:
        yield forward(32, 4, 1, 16)
        yield forward(32, 4, 20, 16)
        yield training(32, 4, 20, 16)
        return
    for width in (64, 256):
        for tokens in (1, 16, 256, 2048):
            yield forward(*K3, tokens, width)
    yield forward(*SMALL, 2048, 256)
    yield training(*K3, 256, 64)
    yield training(*K3, 2048, 64)
    yield training(*SMALL, 2048, 256)


def inputs(E: int, k: int, tokens: int, width: int) -> tuple:
    """Tokens, choices that differ for each, weights that sum to 1, and the three stacks."""
    torch.manual_seed(0)
    experts = Experts(E, width, INNER, Activation(), std=width ** -0.5).requires_grad_(False)
    x, idx = torch.randn(tokens, width), torch.rand(tokens, E).topk(k).indices
    weights = torch.rand(tokens, k)
    weights /= weights.sum(-1, keepdim=True)
    return experts, idx, (x, weights, experts.w1, experts.w2, experts.w3)


def label(E: int, k: int, tokens: int, width: int) -> str:
    return f"{E} choose {k}, N {tokens}, l {width}, m {INNER}"


def forms(experts: Experts, idx) -> dict:
    """Every way as a function of x, weights, w1, w2, w3."""
    def ours(x, weights, w1, w2, w3):
        return functional_call(experts, {"w1": w1, "w2": w2, "w3": w3}, (x, idx, weights))

    loops = {name: lambda x, weights, *w, loop=loop: loop(x, idx, weights, *w, experts.act)
             for name, loop in LOOPS.items()}
    return {OURS: ours} | loops


def forward(E: int, k: int, tokens: int, width: int) -> Case:
    experts, idx, x = inputs(E, k, tokens, width)
    contenders = {name: torch.no_grad()(lambda form=form: form(*x))
                  for name, form in forms(experts, idx).items()}
    in_use = len(idx.unique())
    return Case("Experts forward", label(E, k, tokens, width), contenders, OURS,
                experts_flops(tokens, k, width, INNER), experts_bytes(tokens, in_use, width, INNER),
                tokens)


def training(E: int, k: int, tokens: int, width: int) -> Case:
    """`W[e]` from a stack of 896 has a gradient of the whole stack each time: half a minute."""
    experts, idx, x = inputs(E, k, tokens, width)
    ways, not_run = forms(experts, idx), {}
    if E > 64:
        del ways["loop, W[e]"]
        not_run = {"loop, W[e]": "half a minute"}
    contenders = {name: with_gradients(form, *x) for name, form in ways.items()}
    return Case("Experts forward and backward", label(E, k, tokens, width), contenders, OURS,
                BACKWARD * experts_flops(tokens, k, width, INNER), tokens=tokens, tolerance=1e-3,
                not_run=not_run)
