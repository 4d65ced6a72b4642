"""Rotary position embedding, for comparison: K3's text model rotates nothing (NoPE).

    q' = R(m theta) q,   k' = R(n theta) k,   q' . k' = q . R((n - m) theta) k     (Su et al. 2021, arXiv 2104.09864)

Channels 2i and 2i+1 form a plane that turns by theta_i = base^(-2i/d) per position.
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError


def rope_angles(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """The angle of every plane at every position. positions [..., T] -> [..., T, dim/2], in radians, float64."""
    if dim % 2:
        raise InputError(f"dim is {dim}; RoPE needs an even width, since channels turn in pairs")
    theta = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    return positions[..., None] * theta


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of channels of x [..., T, dim] by angles [..., T, dim/2] (broadcast over leading axes)."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
