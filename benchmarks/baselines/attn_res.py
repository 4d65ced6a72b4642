"""Attention Residuals as the equation says: every read stacks all its sources.

A read of n sources makes a copy of them and mixes it, and does so again for the next
sub-layer, although only the live sum has changed (arXiv 2603.15031).
"""

from collections.abc import Callable

import torch
from torch import Tensor

MANY = 64           # tokens


def direct_reads(x: Tensor, outputs: list[Tensor], queries: Tensor, block: int,
                 read: Callable) -> list[Tensor]:
    """All mixtures of a stream: x and outputs [..., d], queries [len(outputs) + 1, d].

    A block is sealed after the read of its first sub-layer, as in the model. `read` is
    `k3_teach.parts.attn_res.attn_res`, the definition, or `read_without_keys`.
    """
    sealed, live, mixtures = [], x, []
    for i, query in enumerate(queries):
        sources = sealed if live is None else [*sealed, live]
        mixtures.append(read(torch.stack(sources), query)[0])
        if i == len(outputs):
            return mixtures
        if i % block == 0:
            sealed, live = [*sealed, live], None
        live = outputs[i] if live is None else live + outputs[i]


def read_without_keys(sources: Tensor, query: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """One read as fast as torch gives it. Shapes as in `attn_res`.

    q . k = q . u / rms(u) needs no keys. A product for each token is the faster mixture
    of many tokens; its gradient, and a few tokens, are slower so than a plain sum.
    """
    norm = torch.linalg.vector_norm(sources, dim=-1)
    rms = (norm.square() / sources.shape[-1] + eps).sqrt()
    a = (sources @ query / rms).softmax(0)                      # [n, ...]
    if a[0].numel() >= MANY and not sources.requires_grad:
        return torch.einsum("n...,n...d->...d", a, sources), a
    return (a[..., None] * sources).sum(0), a
