"""Attention Residuals as the equation says: every read stacks all its sources.

A read of n sources makes a copy of them, their keys and the mixture, and does so again
for the next sub-layer, although only the live sum has changed (arXiv 2603.15031).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def direct_reads(x: Tensor, outputs: list[Tensor], queries: Tensor, block: int,
                 read: Callable) -> list[Tensor]:
    """All mixtures of a stream: x and outputs [..., d], queries [len(outputs) + 1, d].

    A block is sealed after the read of its first sub-layer, as in the model. `read` is
    `k3_teach.parts.attn_res.attn_res`.
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
