"""Load balancing without a loss term: a bias per expert, set between training steps.

The router picks the top k of s + b and mixes with s: the bias moves tokens, not
weights. Here are the rules for the bias; `balancer` applies them to a model.

    sign      b_j <- b_j + u sign(mean load - load_j)    (Wang et al., arXiv 2408.15664)
    quantile  b_j <- quantile_{k/E} over tokens of r_ij, then b <- b - mean(b)
              r_ij = alpha_i - s_ij                      (Kimi K3 report, eq. 14)
              alpha_i = (k+1)-th largest of s_i + b

Token i takes expert j when s_ij + b_j > alpha_i, that is when b_j is above the margin
r_ij. With the thresholds alpha held still, the bias that lets in a share k/E of the
tokens is the k/E quantile of the margins. But where j is the (k+1)-th itself, r_ij is
its old bias: it keeps that bias while all it lacks is tokens for which it was next in
line. In this dead zone a fixed batch can stall before it is level. The mean is taken
off because a constant changes no choice but would drift. (Blog posts on it write
s - beta, with beta = -b.)

Shapes: N tokens, E experts, k = top_k; scores s [N, E], bias b [E], margins r [N, E].
"""

import math

import torch
from torch import Tensor

from k3_teach.errors import InputError

CHUNK = 1 << 22  # margins binned at once: bounds the memory of the int64 bin numbers


def expert_load(idx: Tensor, num_experts: int) -> Tensor:
    """Tokens per expert: idx [N, k] -> int64 [E]. InputError for one outside 0..E-1."""
    flat = idx.flatten()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise InputError(f"expert index outside 0..{num_experts - 1}")
    return torch.bincount(flat, minlength=num_experts)


def max_vio(load: Tensor) -> Tensor:
    """(max - mean) / mean (arXiv 2408.15664): load [E] -> scalar; 0 for no load."""
    load = load.float()
    tiny = torch.finfo(load.dtype).tiny
    return (load.max() - load.mean()) / load.mean().clamp_min(tiny)


def sign_update(bias: Tensor, load: Tensor, step: float) -> Tensor:
    """b + u sign(mean - load): bias, load [E] -> [E] (arXiv 2408.15664, alg. 1)."""
    # E times (mean - load), in whole numbers: an expert exactly at the mean stays.
    return bias + step * torch.sign(load.sum() - load.numel() * load).to(bias.dtype)


# --- quantile balancing, exact --------------------------------------------------------

def kth_smallest(x: Tensor, rank: int) -> Tensor:
    """The rank-th smallest, counted from 1, along the last axis: [..., n] -> [...]."""
    n = x.shape[-1]
    if rank <= n // 2:  # look from the nearer end only
        return x.topk(rank, largest=False, sorted=False).values.amax(-1)
    return x.topk(n - rank + 1, sorted=False).values.amin(-1)


def margins(scores: Tensor, bias: Tensor, top_k: int, midpoint: bool = False) -> Tensor:
    """r_ij = alpha_i - s_ij, the bias at which token i would just take j (eq. 14).

    Raw scores [N, E], bias [E] -> [N, E]; b enters through alpha only. midpoint: alpha
    is halfway from the k-th to the (k+1)-th largest, the ends of the optimal
    thresholds. For k = E it is the smallest. InputError for shapes that do not fit, and
    k outside 1..E.
    """
    E = bias.shape[0]
    if scores.ndim != 2 or scores.shape[1] != E:
        shape = list(scores.shape)
        raise InputError(f"scores {shape} do not fit {E} experts; need [N, E]")
    if not 1 <= top_k <= E:
        allowed = f"between 1 and the number of experts ({E})"
        raise InputError(f"top_k is {top_k}; it must be {allowed}")
    biased = scores + bias
    below = max(E - top_k, 1)  # the (k+1)-th largest is the (E-k)-th smallest
    alpha = kth_smallest(biased, below)
    if midpoint and top_k < E:
        alpha = (alpha + kth_smallest(biased, below + 1)) / 2
    return alpha[:, None] - scores


def margin_quantile(r: Tensor, top_k: int, rank: str = "q") -> Tensor:
    """The k/E quantile of every column: margins [N, E] -> [E]. With q = N k/E:

    rank "q": the ceil(q)-th smallest, as read from a histogram (report, appendix D);
    "q+1": the (floor(q)+1)-th, the minimiser that appendix C takes; "midpoint": halfway
    between them. InputError for another name or without tokens.
    """
    N, E = r.shape
    if rank not in ("q", "q+1", "midpoint") or N == 0:
        need = "'q', 'q+1' or 'midpoint', and a token"
        raise InputError(f"rank is {rank!r}, N {N}; need {need}")
    lower = -(-N * top_k // E)  # ceil(q)
    upper = min(N * top_k // E + 1, N)
    columns = r.T.contiguous()
    if rank == "midpoint":
        return (kth_smallest(columns, lower) + kth_smallest(columns, upper)) / 2
    return kth_smallest(columns, lower if rank == "q" else upper)


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int, rank: str = "q") -> Tensor:
    """One step of exact quantile balancing (eq. 14): scores [N, E], bias [E] -> [E].

    rank: see `margin_quantile`; "midpoint" is taken on both axes. The bias stays as it
    is without tokens, and for k = E, where it decides nothing.
    """
    r = margins(scores, bias, top_k, rank == "midpoint")
    if r.shape[0] == 0 or top_k == bias.shape[0]:
        return bias.clone()
    b = margin_quantile(r, top_k, rank)
    return (b - b.mean()).to(bias.dtype)


def dual_value(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """What balancing minimises: sum_i (sum of the k largest of s_i + b) - q sum_j b_j.

    The dual of balanced assignment with the best alpha (report, eq. 23), so never below
    the best balanced total. scores [N, E], bias [E] -> scalar; q = N k/E.
    """
    q = scores.shape[0] * top_k / scores.shape[1]
    return (scores + bias).topk(top_k).values.sum() - q * bias.sum()


# --- quantile balancing, counted ------------------------------------------------------

class QuantileHistogram:
    """The quantile from counts, which micro-batches and ranks can add up (appendix D).

    The bias [E] fixes the range [min b - span, max b + span], which margins of scores
    in [0, span] cannot leave. `counts` [E, num_bins] is all the state. The result is
    within one bin of the exact one. InputError for a bias not finite, no bins, and no
    data.
    """

    def __init__(self, bias: Tensor, num_bins: int = 1000, span: float = 1.0):
        self.bias, self.num_bins = bias.detach().clone(), num_bins
        self.low, high = float(bias.min()) - span, float(bias.max()) + span
        if num_bins < 1 or not 0 < high - self.low < math.inf:
            need = "a bin, a finite range"
            raise InputError(f"{num_bins} bins on {self.low}..{high}; need {need}")
        self.width = (high - self.low) / num_bins
        self.counts = self.bias.new_zeros(len(bias), num_bins, dtype=torch.int64)

    def position(self, value: Tensor) -> Tensor:
        """Where a value lies, in bins from `low`. Any shape; `value` is the inverse."""
        return (value - self.low) / self.width

    def value(self, position: Tensor) -> Tensor:
        return position * self.width + self.low

    def add(self, r: Tensor) -> None:
        """Count margins [N, E]. InputError, before any is counted, for a wrong one."""
        E, bins = self.counts.shape
        if r.ndim != 2 or r.shape[1] != E:
            raise InputError(f"margins {tuple(r.shape)} do not fit {E} experts")
        if not len(r):
            return
        first, last = (float(self.position(end)) for end in r.aminmax())
        if not (first >= -1 and last <= bins + 1):  # a bin of slack; NaN fails too
            bounds = f"{self.low:.4g}..{self.value(bins):.4g}"
            raise InputError(f"margins outside {bounds}, or NaN")
        for part in r.split(max(1, CHUNK // E)):
            bin = self.position(part).clamp_(0, bins - 1).long()
            bin += torch.arange(E, device=r.device) * bins
            counted = torch.bincount(bin.flatten(), minlength=E * bins)
            self.counts += counted.view(E, bins)

    def merge(self, other: "QuantileHistogram") -> None:
        """Add another's counts. InputError unless the bins are the same."""
        mine = (self.low, self.width, self.counts.shape)
        if mine != (other.low, other.width, other.counts.shape):
            raise InputError("histograms with different bins cannot be added")
        self.counts += other.counts.to(self.counts.device)

    def quantile(self, top_k: int) -> Tensor:
        """First bin whose count so far reaches ceil(q), linear inside: float64 [E]."""
        cumulative, E = self.counts.cumsum(1), self.counts.shape[0]
        total = cumulative[:, -1:]
        if not bool((total > 0).all()):
            raise InputError("no margins were added")
        bins = (cumulative < -(-total * top_k // E)).sum(1, keepdim=True)
        inside = self.counts.gather(1, bins)  # not 0: the cumulative count rises here
        before = cumulative.gather(1, bins) - inside
        share = (total.double() * top_k / E - before) / inside
        return self.value(bins + share).squeeze(1)

    def new_bias(self, top_k: int) -> Tensor:
        """The mean-centred bias [E]; as it was for k = E and without data."""
        if top_k == self.counts.shape[0] or not bool(self.counts.any()):
            return self.bias.clone()
        b = self.quantile(top_k)
        return (b - b.mean()).to(self.bias.dtype)
