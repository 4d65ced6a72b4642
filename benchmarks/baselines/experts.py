"""A loop over the experts that takes each one's matrices out of the stack.

It stands for the common ports: a one-hot mask finds the tokens of an expert, and `W[e]`
its matrices. Each such slice costs a gradient as large as the whole stack, so training
time grows with the square of the number of experts. `experts_loop` of the package is the
loop without that: it takes the stack apart once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def indexed_loop(x: Tensor, idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor,
                 act) -> Tensor:
    """Shapes as in `k3_teach.parts.moe.experts_loop`."""
    y = torch.zeros_like(x)
    mask = F.one_hot(idx, len(w1)).permute(2, 1, 0)             # [E, k, N]
    for e in mask.sum((1, 2)).nonzero().flatten().tolist():
        slot, token = torch.where(mask[e])
        out = F.linear(act(F.linear(x[token], w1[e]), F.linear(x[token], w3[e])), w2[e])
        y = y.index_add(0, token, out * weights[token, slot, None])
    return y
