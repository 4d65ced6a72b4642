"""RMSNorm: divide a vector by its root mean square, then scale each channel.

    y = w * x / sqrt(mean(x^2) + eps)        (Zhang and Sennrich 2019, arXiv 1910.07467)

The mean runs over the channels of one token. What is left of x is its direction; the
learned weight w [d] gives each channel its scale. The small eps is for x = 0.
"""

import torch
from torch import Tensor, nn

from k3_teach.parts.precision import upcast


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last axis: RMSNorm without its weight
    (arXiv 1910.07467).

    x [..., d] -> [..., d] in float32 (or float64).
    """
    x = upcast(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in the released order: normalise in float32, cast back, then weight.

    The order shows only in bfloat16: the normalised vector is rounded before it is
    multiplied by the weight. x [..., d], weight [d] -> [..., d] in the dtype of x
    (arXiv 1910.07467).
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
