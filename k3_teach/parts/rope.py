"""Rotary position embedding, for comparison: K3's text model rotates nothing (NoPE).

    q' = R(m theta) q,   k' = R(n theta) k         the query at position m, the key at n
    q' . k' = q . R((n - m) theta) k               only their distance is left
                                                   (Su et al. 2021, arXiv 2104.09864)

R(phi) turns channels 2i and 2i+1 as a plane, by the angle phi_i; in a head of width K,
theta_i = base^(-2i/K), so that the first planes turn fast and the last ones slowly.
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError


def rope_angles(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """The angle of every plane at every position (arXiv 2104.09864): radians, float64.

    positions [..., T] -> [..., T, dim/2]. InputError for an odd dim.
    """
    if dim % 2:
        allowed = "RoPE needs an even width, since channels turn in pairs"
        raise InputError(f"dim is {dim}; {allowed}")
    channel = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    theta = base ** (-channel / dim)
    return positions[..., None] * theta


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of channels by its angle (arXiv 2104.09864).

    x [..., T, dim], angles [..., T, dim/2] -> [..., T, dim]; leading axes broadcast.
    """
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
