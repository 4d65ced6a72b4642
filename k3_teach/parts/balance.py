"""Load balancing without a loss term: a bias per expert, set between training steps.

The router picks the top k of `scores + bias` and mixes with the scores alone: the bias moves tokens, never weights.

    sign      b_j <- b_j + u sign(mean load - load_j)                        (Wang et al., arXiv 2408.15664)
    quantile  b_j <- quantile_{k/E} over tokens of (alpha_i - s_ij), then b <- b - mean(b)
              alpha_i = (k+1)-th largest of s_i + b                          (Kimi K3 report, eq. 14, appendix D)

Why a quantile: token i takes expert j when s_ij + b_j > alpha_i, that is when b_j exceeds the margin alpha_i - s_ij.
With the thresholds alpha held still, the bias that lets in a share k/E of the tokens is the k/E quantile of the
margins. Where j is the (k+1)-th itself its margin is its old bias, so an expert short of the target load by no more
than the tokens it was next in line for keeps its bias: a dead zone, and how a fixed batch can stall before it is level.
The report and the released code write s + b; the blog posts on the derivation write s - beta, with beta = -b.

Shapes: N tokens, E experts, k = top_k. scores s [N, E], bias b [E], margins r [N, E], load [E].
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3_teach.errors import InputError

CHUNK = 1 << 22  # margins binned at once: bounds the memory of the int64 bin numbers


def expert_load(idx: Tensor, num_experts: int) -> Tensor:
    """Tokens per expert: idx [N, k] -> int64 [E]. InputError for an index outside 0..E-1."""
    flat = idx.flatten()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise InputError(f"expert index outside 0..{num_experts - 1}")
    return torch.bincount(flat, minlength=num_experts)


def max_vio(load: Tensor) -> Tensor:
    """(max load - mean load) / mean load (arXiv 2408.15664): [E] -> scalar; 0 if even, and if nothing was routed."""
    load = load.float()
    return (load.max() - load.mean()) / load.mean().clamp_min(torch.finfo(load.dtype).tiny)


def sign_update(bias: Tensor, load: Tensor, step: float) -> Tensor:
    """b + u sign(mean - load) (arXiv 2408.15664, algorithm 1): bias [E], load [E] -> [E]."""
    # E times (mean - load): in whole numbers, an expert exactly at the mean stays where it is.
    return bias + step * torch.sign(load.sum() - load.numel() * load).to(bias.dtype)


# --- quantile balancing, exact -------------------------------------------------------------------------------------

def kth_smallest(x: Tensor, rank: int) -> Tensor:
    """The rank-th smallest, counted from 1, along the last axis: [..., n] -> [...]. Looks from the nearer end only."""
    n = x.shape[-1]
    if rank <= n // 2:
        return x.topk(rank, largest=False, sorted=False).values.amax(-1)
    return x.topk(n - rank + 1, sorted=False).values.amin(-1)


def margins(scores: Tensor, bias: Tensor, top_k: int, midpoint: bool = False) -> Tensor:
    """r_ij = alpha_i - s_ij, the bias at which token i would just take expert j (Kimi K3 report, eq. 14).

    Raw scores [N, E], bias [E] -> [N, E]. The old bias enters through alpha_i, the (k+1)-th largest of s_i + b, only.
    midpoint: alpha halfway between the k-th and the (k+1)-th largest, the ends of the interval of optimal thresholds.
    For k = E there is no (k+1)-th; alpha is the smallest then, so that the margins stay finite.
    InputError for shapes that do not fit and for k outside 1..E.
    """
    num_experts = bias.shape[0]
    if scores.ndim != 2 or scores.shape[1] != num_experts:
        raise InputError(f"scores {tuple(scores.shape)} do not fit bias {tuple(bias.shape)}; need [N, E] and [E]")
    if not 1 <= top_k <= num_experts:
        raise InputError(f"top_k is {top_k}; it must be between 1 and the number of experts ({num_experts})")
    biased = scores + bias
    below = max(num_experts - top_k, 1)  # the (k+1)-th largest is the (E-k)-th smallest
    alpha = kth_smallest(biased, below)
    if midpoint and top_k < num_experts:
        alpha = (alpha + kth_smallest(biased, below + 1)) / 2
    return alpha[:, None] - scores


def margin_quantile(r: Tensor, top_k: int, rank: str = "q") -> Tensor:
    """The k/E quantile of every column: margins [N, E] -> [E]. With q = N k/E, the target load:

    rank "q": the ceil(q)-th smallest, what appendix D of the report reads from its histogram; "q+1": the
    (floor(q)+1)-th, the minimiser that appendix C takes; "midpoint": halfway between them.
    InputError for another name or without tokens.
    """
    num_tokens, num_experts = r.shape
    if rank not in ("q", "q+1", "midpoint") or num_tokens == 0:
        raise InputError(f"rank is {rank!r} and N is {num_tokens}; need 'q', 'q+1' or 'midpoint', and a token")
    lower = -(-num_tokens * top_k // num_experts)
    upper = min(num_tokens * top_k // num_experts + 1, num_tokens)
    columns = r.T.contiguous()  # for small k/E, only a short tail of a column can hold the quantile
    if rank == "midpoint":
        return (kth_smallest(columns, lower) + kth_smallest(columns, upper)) / 2
    return kth_smallest(columns, lower if rank == "q" else upper)


def centred(bias: Tensor) -> Tensor:
    """Minus its mean: a constant on all experts changes no choice, but would drift."""
    return bias - bias.mean()


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int, rank: str = "q") -> Tensor:
    """One step of exact quantile balancing (Kimi K3 report, eq. 14): raw scores [N, E], bias [E] -> new bias, mean 0.

    rank: see `margin_quantile`; "midpoint" is taken on both axes.
    k = E chooses every expert whatever the bias, and no tokens say nothing: both return the bias unchanged.
    """
    r = margins(scores, bias, top_k, rank == "midpoint")
    if r.shape[0] == 0 or top_k == bias.shape[0]:
        return bias.clone()
    return centred(margin_quantile(r, top_k, rank)).to(bias.dtype)


def dual_value(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """What balancing minimises: sum_i (sum of the k largest of s_i + b) - q sum_j b_j, q = N k/E. Scalar.

    The dual of balanced assignment with the best alpha put in (Kimi K3 report, eq. 23), so never below the best total.
    """
    target = scores.shape[0] * top_k / scores.shape[1]
    return (scores + bias).topk(top_k).values.sum() - target * bias.sum()


# --- quantile balancing, counted -----------------------------------------------------------------------------------

class QuantileHistogram:
    """The quantile from counts, which micro-batches and ranks can add up (Kimi K3 report, appendix D).

    The bias [E] fixes the range [min b - span, max b + span]; scores in [0, span] cannot leave it (sigmoid: span 1).
    `counts` [E, num_bins] int64 is all the state. The result lies within one bin width of the exact quantile.
    InputError for a bias that is not finite and for no bins.
    """

    def __init__(self, bias: Tensor, num_bins: int = 1000, span: float = 1.0):
        self.bias, self.num_bins = bias.detach().clone(), num_bins
        self.low, high = float(bias.min()) - span, float(bias.max()) + span
        if num_bins < 1 or not 0 < high - self.low < math.inf:
            raise InputError(f"{num_bins} bins on [{self.low}, {high}]; need a bin and a finite range")
        self.width = (high - self.low) / num_bins
        self.counts = torch.zeros(bias.shape[0], num_bins, dtype=torch.int64, device=bias.device)

    def position(self, value: Tensor) -> Tensor:
        """Where a value lies, in bins: bin n is [n, n+1). The writer uses this line, the reader its inverse below."""
        return (value - self.low) / self.width

    def value(self, position: Tensor) -> Tensor:
        return position * self.width + self.low

    def add(self, r: Tensor) -> None:
        """Count margins [N, E]. InputError for NaN and for values outside the range; nothing is counted then."""
        num_experts = self.counts.shape[0]
        if r.ndim != 2 or r.shape[1] != num_experts:
            raise InputError(f"margins {tuple(r.shape)} do not fit {num_experts} experts")
        if not len(r):
            return
        first, last = (float(self.position(end)) for end in r.aminmax())
        if not (first >= -1 and last <= self.num_bins + 1):  # a bin of slack for rounding; NaN fails too
            raise InputError(f"margins outside {self.low:.4g}..{self.value(self.num_bins):.4g}, or NaN")
        for rows in r.split(max(1, CHUNK // num_experts)):
            bins = self.position(rows).clamp_(0, self.num_bins - 1).long()
            bins += torch.arange(num_experts, device=r.device) * self.num_bins
            self.counts += torch.bincount(bins.flatten(), minlength=self.counts.numel()).view_as(self.counts)

    def merge(self, other: "QuantileHistogram") -> None:
        """Add another's counts. InputError unless the bins are the same."""
        if (self.low, self.width, self.counts.shape) != (other.low, other.width, other.counts.shape):
            raise InputError("histograms with different bins cannot be added")
        self.counts += other.counts.to(self.counts.device)

    def quantile(self, top_k: int) -> Tensor:
        """First bin whose cumulative count reaches ceil(q), linear inside: float64 [E]. InputError without data."""
        cumulative, num_experts = self.counts.cumsum(1), self.counts.shape[0]
        total = cumulative[:, -1:]
        if not bool((total > 0).all()):
            raise InputError("no margins were added")
        bins = (cumulative < -(-total * top_k // num_experts)).sum(1, keepdim=True)
        inside = self.counts.gather(1, bins)  # not 0: the cumulative count rises here
        before = cumulative.gather(1, bins) - inside
        return self.value(bins + (total.double() * top_k / num_experts - before) / inside).squeeze(1)

    def new_bias(self, top_k: int) -> Tensor:
        """The mean-centred bias [E]; unchanged for k = E and without data, as in `quantile_bias`."""
        if top_k == self.counts.shape[0] or not bool(self.counts.any()):
            return self.bias.clone()
        return centred(self.quantile(top_k)).to(self.bias.dtype)


# --- in a model ----------------------------------------------------------------------------------------------------

def is_router(module: nn.Module) -> bool:
    return isinstance(getattr(module, "e_score_correction_bias", None), nn.Parameter) and hasattr(module, "top_k")


def recomputing() -> bool:
    """Inside a backward pass, where a forward repeats one already counted (activation checkpointing, both kinds)."""
    # The number of the running backward pass, -1 outside one. No public name, but PyTorch's FSDP2 asks the same way.
    return torch._C._current_graph_task_id() != -1


class Tally:
    """What one router has shown since the last step: load, and counted margins or scores if the method needs them."""

    def __init__(self, bias: Tensor, method: str, num_bins: int):
        self.load = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
        self.histogram = QuantileHistogram(bias, num_bins) if method == "quantile" else None
        self.scores = bias.new_empty(0, bias.shape[0]) if method == "quantile_exact" else None

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
            raise InputError("quantile_exact keeps scores, which cannot be added over ranks; use 'quantile'")
        for counts in [self.load] if self.histogram is None else [self.load, self.histogram.counts]:
            dist.all_reduce(counts, group=group)


class Balancer:
    """Watches the routers of a model and sets their biases between optimiser steps.

        balancer = Balancer(model)
        loss.backward(); optimiser.step(); balancer.step()

    method: "quantile" (histogram), "quantile_exact" (keeps all scores; one process), "sign" (by `step`), or "none"
    (only measures). After a step there is no state beside the biases, which the model saves.
    all_reduce: sum counts over `group` where torch.distributed is initialised. All its ranks call step(). It must be
    the ranks that saw different tokens: copies of the same tokens (tensor parallel) would be counted twice.

    Every forward in training mode counts, with or without gradient; not the recomputation of activation checkpointing.
    Padding counts, since routers run on it. A router in evaluation mode is neither counted nor changed.
    After step(), for the layers with data: `load[name]` int64 [E], `max_vio[name]` float.
    InputError, naming the layer: scores that are not finite (or, with "quantile", not in [0, 1]); a bias below float32.
    """

    def __init__(self, model: nn.Module, method: str = "quantile", step: float = 1e-3, num_bins: int = 1000,
                 all_reduce: bool = True, group=None):
        if method not in ("quantile", "quantile_exact", "sign", "none"):
            raise InputError(f"method is {method!r}; it must be 'quantile', 'quantile_exact', 'sign' or 'none'")
        self.method, self.step_size, self.num_bins = method, step, num_bins
        self.all_reduce, self.group = all_reduce, group
        self.routers = {name: module for name, module in model.named_modules() if is_router(module)}
        self.tallies: dict[str, Tally] = {}
        self.load: dict[str, Tensor] = {}
        self.max_vio: dict[str, float] = {}
        self.hooks = [r.register_forward_hook(partial(self._observe, name)) for name, r in self.routers.items()]

    def remove(self) -> None:
        """Stop watching; the biases stay as they are."""
        for hook in self.hooks:
            hook.remove()

    def _tally(self, name: str) -> Tally:
        if name not in self.tallies:  # not before the first forward: the histogram's range follows the bias
            self.tallies[name] = Tally(self.routers[name].e_score_correction_bias.detach(), self.method, self.num_bins)
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
        """Set the biases from what was counted since the last step, and count afresh."""
        self.load, self.max_vio = {}, {}
        for name, router in self.routers.items():
            if router.training:
                self._update(name, router)

    def _update(self, name: str, router: nn.Module) -> None:
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
