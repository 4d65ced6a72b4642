"""What a row of `benchmarks.gpu` is, and what all of them share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class Refused(Exception):
    """Why a row cannot be run here, in a few words."""


@dataclass
class Work:
    """One call, its FLOPs and bytes as `scale.flops` counts them, and its largest error on
    a small slice, relative to the largest number of the same in float64."""

    call: Callable[[], object]
    flops: int
    bytes: int | None = None
    error: Callable[[], float] | None = None
    note: str = ""


Row = tuple[str, Callable[[], Work]]


@dataclass(frozen=True)
class Sizes:
    """What is run; the widths come from the configuration."""

    kda: tuple[int, ...] = (4096, 16384)
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    expert_tokens: tuple[int, ...] = (1, 16, 256, 2048)
    depth_tokens: tuple[int, ...] = (1, 1024)
    layer: int = 8192
    slice: int = 256


QUICK = Sizes((24, 40), (24, 40), (1, 20), (1, 3), 24, 20)


def normal(device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def off(actual, exact) -> float:
    """max |a - e| / max |e|, over tensors or pairs of them."""
    if isinstance(exact, (tuple, list)):
        return max(off(a, e) for a, e in zip(actual, exact))
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()
