"""MLA as ordinary attention: for prefill without padding the values to the keys' width, and
for decoding with a cache of every head's keys and values.

The expanded cache is what a model gets that keeps keys and values as any attention does:
H (N+R+V) numbers a token and layer, against L+R of the latent (arXiv 2405.04434).
"""

import torch.nn.functional as F
from torch import Tensor

from k3_teach.parts.mla import expand


def unpadded(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Torch's attention on keys and values of different widths. q, k [B,H,T,N+R], v [B,H,T,V]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def expanded_step(q: Tensor, new: Tensor, kv_b: Tensor, keys: Tensor, values: Tensor,
                  scale: float) -> Tensor:
    """One new token: its key and value take the last place in the cache, then it reads.

    q [B,H,1,N+R], new [B,1,L+R], kv_b [H,N+V,L], keys [B,H,S,N+R], values [B,H,S,V]
    -> [B,H,1,V]. Keys and values are contiguous, as a cache holds them. The scores stand
    as a column: a matrix times a vector reads the keys in their order, and is twice as fast.
    """
    k, v = expand(new, kv_b, values.shape[-1])
    keys[:, :, -1:], values[:, :, -1:] = k, v
    return (keys @ q.mT * scale).softmax(-2).mT @ values
