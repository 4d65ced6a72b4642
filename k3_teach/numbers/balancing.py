"""Figures of chapter 06: quantiles, the simulation of the balancers, the stall."""

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import torch

from k3_teach.config import K3Config
from k3_teach.parts.balance import (
    QuantileHistogram,
    expert_load,
    margins,
    max_vio,
    quantile_bias,
)

from .figure import Figure, column


def balancing(c: K3Config) -> Iterator[Figure]:
    chapter = "06_balancing"
    a, b = column(0, 0, 10), column(10, 10, 10)
    yield Figure(chapter, "mean of the medians of {0, 0, 10} and {10, 10, 10}, and the "
                 "median of all", "5 and 10",
                 f"{(a.median() + b.median()) / 2:g} and {torch.cat([a, b]).median():g}",
                 page="mean 5; of all six 10")
    yield Figure(chapter, "biases of all layers", "82,432",
                 f"{sum(map(c.is_moe, range(c.num_hidden_layers))) * c.num_experts:,}",
                 page="82,432 biases")
    gaps = (largest_gap(), largest_gap(E=32, N=4096), largest_gap(spread=1.0))
    yield Figure(chapter, "MaxVio, exact against 1000 bins, seed 20260909, 41 points",
                 "0.02734", " or ".join(f"{gap:.5f}" for gap in gaps), "not reproducible",
                 "quoted without its set-up; three of ours, with the quantile of rank "
                 "q + 1, give three figures. 7/256 is seven tokens of 256, or one token "
                 "at 896 choose 16 and 2048 tokens")

    draw = np.random.default_rng(0)
    s = torch.from_numpy(draw.random((4000, 32)))
    b = torch.from_numpy(0.4 * draw.standard_normal(32))
    r = margins(s, b, 4)
    inside = b.min() - 1 <= r.min() and r.max() <= b.max() + 1
    yield Figure(chapter, "margins outside [min b - 1, max b + 1], of 128,000", "0",
                 "0" if inside else "some", page="max b + 1]$ holds every margin")
    gap = (-(-r).quantile(1 - 4 / 32, 0) - r.quantile(4 / 32, 0)).abs().max()
    yield Figure(chapter, "-Q_{1-k/E}(s - alpha) less Q_{k/E}(alpha - s)", "0",
                 "0" if gap < 1e-12 else f"{gap:.1e}",
                 page="$\\hat b_j = -Q_{1-k/E}(s_{ij} - \\alpha_i)$")
    yield Figure(chapter, "the narrowest of 1000 bins, when all biases are alike", "0.002",
                 f"{QuantileHistogram(torch.zeros(8), 1000).width:g}", page="2/1000")

    stall = column(0, 0, 1, 0, 2, 0, 0, 2, 2).view(1, 3, 3)
    yield Figure(chapter, "the 3 x 3 stall: dual at the stop, best assignment", "5, 4",
                 f"{float(stopped_duals(stall, (2,))):g}, {float(best_assignment(stall)):g}",
                 "with a convention", "thresholds at the (k+1)-th and (q+1)-th largest, "
                 "the report's own; midpoints reach 4", page="q+1 5 5 5 5")
    digits = torch.cartesian_prod(*[torch.arange(3)] * 9).double().view(-1, 3, 3)
    best = best_assignment(digits)
    stuck = (best == 4) & (stopped_duals(digits, (2,)) == 5)
    still = [int((stopped_duals(digits[stuck], rank) > 4 + 1e-6).sum())
             for rank in ((1,), (1, 2))]
    yield Figure(chapter, "matrices of 0, 1, 2 that stop so", "540 of 19,683",
                 f"{int(stuck.sum())} of {len(digits):,}",
                 page="best 4, dual 5 with (k+1, q+1): 540;")
    yield Figure(chapter, "of these, still stuck with the k-th largest, and with midpoints",
                 "72, 0", ", ".join(map(str, still)), page="above 4 with (k, q): 72, midpoint: 0")


# --- exact and counted quantiles ------------------------------------------------------------

def largest_gap(E: int = 16, N: int = 2048, spread: float = 0.5, k: int = 2, steps: int = 41,
                seed: int = 20260909) -> float:
    """The largest difference in MaxVio over the steps between exact and counted quantiles.

    Every step draws N tokens afresh; a score is sigmoid(noise + offset of the expert).
    """
    draw = np.random.default_rng(seed)
    offset = spread * draw.standard_normal(E)
    exact = count = torch.zeros(E, dtype=torch.float64)
    gaps = []
    for _ in range(steps):
        s = torch.from_numpy(draw.standard_normal((N, E)) + offset).sigmoid()
        seen = [max_vio(expert_load((s + b).topk(k).indices, E)) for b in (exact, count)]
        gaps.append(abs(float(seen[0] - seen[1])))
        exact, count = quantile_bias(s, exact, k, "q+1"), counted(s, count, k)
    return max(gaps)


def counted(s: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    histogram = QuantileHistogram(bias, num_bins=1000)
    histogram.add(margins(s, bias, k))
    return histogram.new_bias(k)


# --- where a fixed batch stops ------------------------------------------------------------

def stopped_duals(s: torch.Tensor, largest: tuple[int, ...], rounds: int = 200
                  ) -> torch.Tensor:
    """Where alternating minimisation ends for many 3 x 3 matrices, one expert a token.

    s [M, 3, 3] -> dual value [M]. Thresholds are the `largest`-th of three, or the mean
    of two of them: (2,) is the report's convention for k = q = 1, (1, 2) the midpoint.
    """
    def threshold(x: torch.Tensor, axis: int) -> torch.Tensor:
        ranked = x.sort(axis, descending=True).values
        rows = torch.tensor([rank - 1 for rank in largest])
        return ranked.index_select(axis, rows).mean(axis, keepdim=True)

    beta = torch.zeros_like(s[:, :1])                                   # [M, 1, 3]
    for _ in range(rounds):
        alpha = threshold(s - beta, 2)                                  # [M, 3, 1]
        beta = threshold(s - alpha, 1)
    alpha = threshold(s - beta, 2)
    over = (s - alpha - beta).clamp_min(0).sum((1, 2))
    return over + alpha.sum((1, 2)) + beta.sum((1, 2))


def best_assignment(s: torch.Tensor) -> torch.Tensor:
    """The best total of one expert a token, each once: s [M, 3, 3] -> [M]."""
    rows = torch.arange(3)
    return torch.stack([s[:, rows, order].sum(1) for order in permutations(range(3))]
                       ).amax(0)
