"""Load balancing without a loss term: a bias per expert, set between training steps.

The router picks the top k of s + b and mixes with s: the bias moves tokens, not weights.

    sign      b_j <- b_j + u sign(mean load - load_j)    (Wang et al., arXiv 2408.15664)
    quantile  b_j <- quantile_{k/E} over tokens of r_ij, then b <- b - mean(b)
              r_ij = alpha_i - s_ij                      (Kimi K3 report, eq. 14)
              alpha_i = (k+1)-th largest of s_i + b

Token i takes expert j when s_ij + b_j > alpha_i, that is when b_j is above the margin r_ij.
With the thresholds alpha held still, the bias that lets in a share k/E of the tokens is the
k/E quantile of the margins. But where j is the (k+1)-th itself, r_ij is its old bias: it
keeps that bias while all it lacks is tokens for which it was next in line. In this dead
zone a fixed batch can stall before it is level. The mean is taken off because a constant
changes no choice but would drift. (Blog posts on it write s - beta, with beta = -b.)

Shapes: N tokens, E experts, k = top_k; scores s [N, E], bias b [E], margins r [N, E].
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3_teach.errors import InputError

CHUNK = 1 << 22  # margins binned at once: bounds the memory of the int64 bin numbers


def expert_load(idx: Tensor, num_experts: int) -> Tensor:
    """Tokens per expert: idx [N, k] -> int64 [E]. InputError for one outside 0..E-1."""
    flat = idx.flatten()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise InputError(f"expert index outside 0..{num_experts - 1}")
    return torch.bincount(flat, minlength=num_experts)


def max_vio(load: Tensor) -> Tensor:
    """(max - mean) / mean (arXiv 2408.15664): load [E] -> scalar; 0 for no load at all."""
    load = load.float()
    return (load.max() - load.mean()) / load.mean().clamp_min(torch.finfo(load.dtype).tiny)


def sign_update(bias: Tensor, load: Tensor, step: float) -> Tensor:
    """b + u sign(mean - load) (arXiv 2408.15664, algorithm 1): bias, load [E] -> [E]."""
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

    Raw scores [N, E], bias [E] -> [N, E]; b enters through alpha only. midpoint: alpha is
    halfway from the k-th to the (k+1)-th largest, the ends of the optimal thresholds. For
    k = E it is the smallest. InputError for shapes that do not fit, and k outside 1..E.
    """
    E = bias.shape[0]
    if scores.ndim != 2 or scores.shape[1] != E:
        raise InputError(f"scores {list(scores.shape)} do not fit {E} experts; need [N, E]")
    if not 1 <= top_k <= E:
        raise InputError(f"top_k is {top_k}; it must be between 1 and the number of experts ({E})")
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
        raise InputError(f"rank is {rank!r}, N {N}; need 'q', 'q+1' or 'midpoint', and a token")
    lower = -(-N * top_k // E)  # ceil(q)
    upper = min(N * top_k // E + 1, N)
    columns = r.T.contiguous()
    if rank == "midpoint":
        return (kth_smallest(columns, lower) + kth_smallest(columns, upper)) / 2
    return kth_smallest(columns, lower if rank == "q" else upper)


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int, rank: str = "q") -> Tensor:
    """One step of exact quantile balancing (eq. 14): scores [N, E], bias [E] -> [E].

    rank: see `margin_quantile`; "midpoint" is taken on both axes. The bias stays as it is
    without tokens, and for k = E, where it decides nothing.
    """
    r = margins(scores, bias, top_k, rank == "midpoint")
    if r.shape[0] == 0 or top_k == bias.shape[0]:
        return bias.clone()
    b = margin_quantile(r, top_k, rank)
    return (b - b.mean()).to(bias.dtype)


def dual_value(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """What balancing minimises: sum_i (sum of the k largest of s_i + b) - q sum_j b_j.

    The dual of balanced assignment with the best alpha (report, eq. 23), so never below the
    best balanced total. scores [N, E], bias [E] -> scalar; q = N k/E.
    """
    q = scores.shape[0] * top_k / scores.shape[1]
    return (scores + bias).topk(top_k).values.sum() - q * bias.sum()


# --- quantile balancing, counted ------------------------------------------------------

class QuantileHistogram:
    """The quantile from counts, which micro-batches and ranks can add up (appendix D).

    The bias [E] fixes the range [min b - span, max b + span], which margins of scores in
    [0, span] cannot leave. `counts` [E, num_bins] is all the state. The result is within
    one bin of the exact one. InputError for a bias not finite, no bins, and no data.
    """

    def __init__(self, bias: Tensor, num_bins: int = 1000, span: float = 1.0):
        self.bias, self.num_bins = bias.detach().clone(), num_bins
        self.low, high = float(bias.min()) - span, float(bias.max()) + span
        if num_bins < 1 or not 0 < high - self.low < math.inf:
            raise InputError(f"{num_bins} bins on {self.low}..{high}; need a bin, a finite range")
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
            raise InputError(f"margins outside {self.low:.4g}..{self.value(bins):.4g}, or NaN")
        for part in r.split(max(1, CHUNK // E)):
            bin = self.position(part).clamp_(0, bins - 1).long()
            bin += torch.arange(E, device=r.device) * bins
            self.counts += torch.bincount(bin.flatten(), minlength=E * bins).view(E, bins)

    def merge(self, other: "QuantileHistogram") -> None:
        """Add another's counts. InputError unless the bins are the same."""
        mine = (self.low, self.width, self.counts.shape)
        if mine != (other.low, other.width, other.counts.shape):
            raise InputError("histograms with different bins cannot be added")
        self.counts += other.counts.to(self.counts.device)

    def quantile(self, top_k: int) -> Tensor:
        """First bin whose cumulative count reaches ceil(q), linear inside: float64 [E]."""
        cumulative, E = self.counts.cumsum(1), self.counts.shape[0]
        total = cumulative[:, -1:]
        if not bool((total > 0).all()):
            raise InputError("no margins were added")
        bins = (cumulative < -(-total * top_k // E)).sum(1, keepdim=True)
        inside = self.counts.gather(1, bins)  # not 0: the cumulative count rises here
        before = cumulative.gather(1, bins) - inside
        return self.value(bins + (total.double() * top_k / E - before) / inside).squeeze(1)

    def new_bias(self, top_k: int) -> Tensor:
        """The mean-centred bias [E]; as it was for k = E and without data."""
        if top_k == self.counts.shape[0] or not bool(self.counts.any()):
            return self.bias.clone()
        b = self.quantile(top_k)
        return (b - b.mean()).to(self.bias.dtype)


# --- in a model -----------------------------------------------------------------------

def is_router(module: nn.Module) -> bool:
    bias = getattr(module, "e_score_correction_bias", None)
    return isinstance(bias, nn.Parameter) and hasattr(module, "top_k")


def recomputing() -> bool:
    """In a backward pass, where activation checkpointing repeats a counted forward."""
    return torch._C._current_graph_task_id() != -1  # no public name; FSDP2 asks so too


class Tally:
    """What one router has shown since the last step: load, and margins or scores."""

    def __init__(self, bias: Tensor, method: str, num_bins: int):
        count, keep = method == "quantile", method == "quantile_exact"
        self.load = torch.zeros_like(bias, dtype=torch.int64)
        self.histogram = QuantileHistogram(bias, num_bins) if count else None
        self.scores = bias.new_empty(0, len(bias)) if keep else None

    def add(self, router: nn.Module, idx: Tensor, scores: Tensor) -> None:
        if scores.numel() and not all(math.isfinite(end) for end in scores.aminmax()):
            raise InputError("router scores hold NaN or infinity")
        load = expert_load(idx, len(self.load))
        if self.histogram is not None:
            self.histogram.add(margins(scores, router.e_score_correction_bias, router.top_k))
        if self.scores is not None:
            self.scores = torch.cat([self.scores, scores])
        self.load += load

    def all_reduce(self, group) -> None:
        if self.scores is not None:
            raise InputError("quantile_exact cannot add scores over ranks; use 'quantile'")
        dist.all_reduce(self.load, group=group)
        if self.histogram is not None:
            dist.all_reduce(self.histogram.counts, group=group)


class Balancer:
    """Watches the routers of a model and sets their biases between optimiser steps.

        balancer = Balancer(model)
        loss.backward(); optimiser.step(); balancer.step()

    method: "quantile" (histogram), "quantile_exact" (keeps all scores; one process),
    "sign" (by `step`), or "none" (only measures). all_reduce: sum counts over the ranks
    of `group`; all must call step(), and have seen different tokens (no tensor-parallel
    copies). Every forward in training mode counts, except where activation checkpointing
    repeats it; evaluation neither counts nor changes. K3Model shows routers no padding.
    After step(): `load[name]` int64 [E] and `max_vio[name]` of the layers with data.
    InputError, naming the layer, for scores that are not finite (with "quantile": not in
    [0, 1]) and for a bias below float32.
    """

    def __init__(self, model: nn.Module, method: str = "quantile", step: float = 1e-3,
                 num_bins: int = 1000, all_reduce: bool = True, group=None):
        if method not in ("quantile", "quantile_exact", "sign", "none"):
            allowed = "'quantile', 'quantile_exact', 'sign' or 'none'"
            raise InputError(f"method is {method!r}; it must be {allowed}")
        self.method, self.step_size, self.num_bins = method, step, num_bins
        self.all_reduce, self.group = all_reduce, group
        self.routers = {name: m for name, m in model.named_modules() if is_router(m)}
        self.tallies, self.load, self.max_vio = {}, {}, {}  # by the name of the router
        self.hooks = [router.register_forward_hook(partial(self._observe, name))
                      for name, router in self.routers.items()]

    def remove(self) -> None:
        """Stop watching; the biases stay as they are."""
        for hook in self.hooks:
            hook.remove()

    def _tally(self, name: str) -> Tally:
        if name not in self.tallies:  # made late: a histogram's range follows the bias
            bias = self.routers[name].e_score_correction_bias.detach()
            self.tallies[name] = Tally(bias, self.method, self.num_bins)
        return self.tallies[name]

    @torch.compiler.disable
    def _observe(self, name: str, router: nn.Module, inputs, output) -> None:
        if not router.training or recomputing():
            return
        idx, _, scores = output
        try:
            self._tally(name).add(router, idx, scores.detach())
        except InputError as error:
            raise InputError(f"{name}: {error}") from error

    @torch.no_grad()
    def step(self) -> None:
        """Set the biases from what was counted since the last step; count afresh."""
        self.load, self.max_vio = {}, {}
        for name, router in self.routers.items():
            if not router.training:
                continue
            bias, tally = router.e_score_correction_bias, self._tally(name)
            if bias.dtype not in (torch.float32, torch.float64):
                raise InputError(f"{name}: the bias is {bias.dtype}; it must stay float32")
            if self.all_reduce and dist.is_available() and dist.is_initialized():
                tally.all_reduce(self.group)
            del self.tallies[name]
            if bool(tally.load.any()):
                self.load[name], self.max_vio[name] = tally.load, float(max_vio(tally.load))
                bias.copy_(self._new_bias(bias, tally, router.top_k))

    def _new_bias(self, bias: Tensor, tally: Tally, top_k: int) -> Tensor:
        if self.method == "quantile":
            return tally.histogram.new_bias(top_k)
        if self.method == "quantile_exact":
            return quantile_bias(tally.scores, bias, top_k)
        return sign_update(bias, tally.load, self.step_size) if self.method == "sign" else bias
