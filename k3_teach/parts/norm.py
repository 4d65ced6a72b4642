"""RMSNorm: divide a vector by its root mean square, so that only its direction is left, then scale each channel.

    y = w * x / sqrt(mean(x^2) + eps)                                     (Zhang and Sennrich 2019, arXiv 1910.07467)
"""

import torch
from torch import Tensor, nn

from k3_teach.parts.precision import upcast


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, in float32 (or float64). x [..., d] -> [..., d]."""
    x = upcast(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in the released order: normalise in float32, cast back, then multiply by the weight.

    The order shows only in bfloat16: the normalised vector is rounded before the weight is applied.
    x [..., d], weight [d] -> [..., d] in the dtype of x.
    """
    return weight * rms_normalize(x, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight. There is no bias and no "1 + weight"."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
