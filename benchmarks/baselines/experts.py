"""Loops over the experts, as public code has them.

`experts_loop` of the package is a third: it looks for the tokens of every expert, too, but
takes the stacks of matrices apart once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def indexed_loop(x: Tensor, idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor,
                 act) -> Tensor:
    """A one-hot mask finds the tokens of an expert, and `W[e]` its matrices.

    It stands for the common ports. Each such slice costs a gradient as large as the whole
    stack, so training time grows with the square of the number of experts. Shapes as in
    `k3_teach.parts.moe.experts_loop`.
    """
    y = torch.zeros_like(x)
    mask = F.one_hot(idx, len(w1)).permute(2, 1, 0)             # [E, k, N]
    for e in mask.sum((1, 2)).nonzero().flatten().tolist():
        slot, token = torch.where(mask[e])
        out = F.linear(act(F.linear(x[token], w1[e]), F.linear(x[token], w3[e])), w2[e])
        y.index_add_(0, token, out * weights[token, slot, None])
    return y


def sorted_loop(x: Tensor, idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor,
                act) -> Tensor:
    """Pairs of token and expert sorted once, then a product for each expert in use.

    It stands for the loops of inference code, which add up all results at the end.
    Shapes as above.
    """
    expert, order = idx.flatten().sort()                        # [N k]
    token = order // idx.shape[1]
    used, counts = expert.unique_consecutive(return_counts=True)
    rows = zip(used.tolist(), x[token].split(counts.tolist()))
    if w1.requires_grad:                # once, for the reason above
        w1, w2, w3 = w1.unbind(), w2.unbind(), w3.unbind()
    out = torch.cat([F.linear(act(F.linear(r, w1[e]), F.linear(r, w3[e])), w2[e])
                     for e, r in rows])
    return torch.zeros_like(x).index_add_(0, token, out * weights.flatten()[order, None])
