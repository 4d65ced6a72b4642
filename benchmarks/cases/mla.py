"""MLA: prefill through torch's fused kernel, and decoding from the latent itself."""

from collections.abc import Iterator

import torch

from benchmarks.baselines.mla import expanded_step, unpadded
from benchmarks.case import Case
from k3_teach.parts.attention import attention, attention_eager
from k3_teach.parts.mla import expand, mla_absorbed, mla_expanded
from k3_teach.scale.flops import attention_flops, mla_absorbed_bytes, mla_absorbed_flops

H, N, R, V, L = 16, 128, 64, 128, 512       # K3's widths, with 16 of its 96 heads
SCALE = (N + R) ** -0.5


def cases(quick: bool) -> Iterator[Case]:
    for T in (64,) if quick else (1024, 4096):
        yield prefill(T)
    for S in (128,) if quick else (8192, 32768):
        yield decode(S)


def prefill(T: int) -> Case:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, H, T, N + R, generator=draw)
    v = torch.randn(1, H, T, V, generator=draw)
    contenders = {"attention": lambda: attention(q, k, v, SCALE),
                  "sdpa, not padded": lambda: unpadded(q, k, v, SCALE)}
    not_run = {"eager": "1 GB of scores"} if T > 2048 else {}
    if not not_run:
        contenders["eager"] = lambda: attention_eager(q, k, v, SCALE)
    return Case("MLA prefill, attention alone", f"T {T}, H {H}, {N + R}/{V}", contenders,
                "attention", attention_flops(T, T, H, N + R, V), tokens=T, not_run=not_run)


def decode(S: int) -> Case:
    """The new token is the last of S. Making all keys and values again takes seconds at 32k."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, H, 1, N + R, generator=draw)
    latent = torch.randn(1, S, L + R, generator=draw)
    kv_b = torch.randn(H, N + V, L, generator=draw) * L ** -0.5
    keys, values = (x.contiguous() for x in expand(latent, kv_b, V))
    new = latent[:, -1:]
    contenders = {
        "mla_absorbed": lambda: mla_absorbed(q, latent, kv_b, V, SCALE),
        "expanded cache": lambda: expanded_step(q, new, kv_b, keys, values, SCALE),
        "latent expanded each step": lambda: mla_expanded(q, latent, kv_b, V, SCALE)}
    not_run = {}
    if S > 8192:
        del contenders["latent expanded each step"]
        not_run = {"latent expanded each step": "seconds a token"}
    return Case("MLA, one token", f"S {S}, H {H}, L {L}+{R}", contenders, "mla_absorbed",
                mla_absorbed_flops(1, S, H, L, R, N, V), mla_absorbed_bytes(S, H, L, R, N, V),
                not_run=not_run)
