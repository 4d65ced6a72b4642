"""Quantile balancing with torch's own quantile, which sorts every column.

It refuses more than 16 million elements in older versions of torch.
"""

import torch
from torch import Tensor

from k3_teach.parts.balance import margins


def sorted_quantile(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The ceil(N k/E)-th smallest margin of each expert, its mean taken off.

    scores [N, E], bias [E] -> [E]. The lower neighbour of (N-1) k/E is that rank, unless
    N k/E is a whole number.
    """
    r = margins(scores, bias, top_k)
    b = torch.quantile(r, top_k / r.shape[1], dim=0, interpolation="lower")
    return b - b.mean()
