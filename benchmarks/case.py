"""What a module of `cases` yields: a race to be timed, or numbers that it has taken itself.

A case is made when its turn comes and let go after it, with all its tensors.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Disagreement(AssertionError):
    """Two contenders that should compute the same, do not."""


@dataclass(frozen=True)
class Case:
    """One row: several ways to do the same work, each a function without arguments.

    `contenders` hold `ours`. One call of any of them does `flops` floating-point
    operations and moves `bytes` at least (counted, not measured; None: not counted), and
    handles `tokens`, if a rate is wanted. What they return is compared before, within
    `tolerance` of the largest number, or by `check`. `floors` compute nothing and are
    timed beside them, such as a copy of the same bytes. `foreign` names those of other
    packages, whose disagreement is theirs: they are left out. `not_run` says why someone
    sits this size out. `seconds` and `rounds` go to `race`.
    """

    group: str                                      # the table in which it stands
    name: str                                       # the sizes
    contenders: Mapping[str, Callable[[], Any]]
    ours: str
    flops: int | None = None
    bytes: int | None = None
    tokens: int | None = None
    tolerance: float = 1e-4
    check: Callable[[dict[str, Any]], None] | None = None
    floors: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    foreign: Collection[str] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 2.0
    rounds: int = 15

    def agree(self, results: dict[str, Any]) -> None:
        """Disagreement unless all results (tensors, or nests of them) are close to ours."""
        if self.check is not None:
            return self.check(results)
        for name, result in results.items():
            if differs := self.difference(result, results[self.ours]):
                raise Disagreement(f"{self.group}, {self.name}: {name} and {self.ours} {differs}")

    def difference(self, result: Any, ours: Any) -> str:
        """In words; empty if it is allowed."""
        error = distance(result, ours)
        return "" if error <= self.tolerance else (
            f"differ by {error:.1e} of the largest number; allowed is {self.tolerance:.1e}")


@dataclass(frozen=True)
class Quantity:
    """One row of numbers that are not times, such as bytes of memory, by contender.

    `parts` names those that are parts of ours, no rivals; `not_run` as in a `Case`.
    """

    group: str
    name: str
    values: Mapping[str, float]
    ours: str
    unit: str = "MB"
    note: str = ""
    parts: Collection[str] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)


def distance(a: Any, b: Any) -> float:
    """max |a - b| / max |b|, the largest over a nest of tensors.

    Infinite for NaN, and where the shapes or the nests differ.
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        alike = type(a) is type(b) and len(a) == len(b)
        return max(map(distance, a, b)) if alike else math.inf
    if a.shape != b.shape:
        return math.inf
    size = b.abs().max().double().clamp_min(torch.finfo(torch.float32).tiny)
    return float(((a - b).abs().max() / size).nan_to_num(nan=math.inf))


def with_gradients(function: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    """A contender that runs forward and backward: gives outputs and gradients.

    The outputs meet fixed weights, so that every one of them has a gradient of its own.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    weights: list[Tensor] = []

    def call():
        out = function(*leaves)
        outputs = (out,) if isinstance(out, Tensor) else tuple(out)
        if not weights:
            draw = torch.Generator().manual_seed(0)
            weights.extend(torch.randn(o.shape, generator=draw, dtype=o.dtype) for o in outputs)
        gradients = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
        return ([o.detach() for o in outputs],
                [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients)])

    return call
