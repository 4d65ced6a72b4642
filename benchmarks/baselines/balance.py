"""Quantile balancing with torch's own functions for a quantile and for the n-th smallest."""

import torch
from torch import Tensor

from k3_teach.parts.balance import margins


def sorted_quantile(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The ceil(N k/E)-th smallest margin of each expert, its mean taken off.

    scores [N, E], bias [E] -> [E]. It sorts every column. The lower neighbour of
    (N-1) k/E is that rank. It refuses more than 16 million elements in older versions of
    torch.
    """
    r = margins(scores, bias, top_k)
    b = torch.quantile(r, top_k / r.shape[1], dim=0, interpolation="lower")
    return b - b.mean()


def selected(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The same by selection, which sorts nothing, with the margins of an expert in a row."""
    r = margins(scores, bias, top_k)
    N, E = r.shape
    b = r.T.contiguous().kthvalue(-(-N * top_k // E)).values        # the ceiling of N k/E
    return b - b.mean()
