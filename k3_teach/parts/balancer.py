"""Load balancing in a model: watch the routers, then set their biases between steps.

The rules are in `balance`. Nothing here is differentiated.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3_teach.errors import InputError, shown
from k3_teach.parts.balance import (
    QuantileHistogram,
    expert_load,
    margins,
    max_vio,
    quantile_bias,
    sign_update,
)


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
            bias = router.e_score_correction_bias
            self.histogram.add(margins(scores, bias, router.top_k))
        if self.scores is not None:
            self.scores = torch.cat([self.scores, scores])
        self.load += load

    def all_reduce(self, group) -> None:
        if self.scores is not None:
            raise InputError(
                "quantile_exact cannot add scores over ranks; use 'quantile'")
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
    copies). Every forward in training mode counts, except where activation
    checkpointing repeats it; evaluation neither counts nor changes. K3Model shows
    routers no padding. After step(): `load[name]` int64 [E] and `max_vio[name]` of the
    layers with data. InputError, naming the layer, for scores that are not finite (with
    "quantile": not in [0, 1]) and for a bias below float32.
    """

    def __init__(self, model: nn.Module, method: str = "quantile", step: float = 1e-3,
                 num_bins: int = 1000, all_reduce: bool = True, group=None):
        if not isinstance(model, nn.Module):
            raise InputError(f"model is {shown(model)}; it must be a module")
        if method not in ("quantile", "quantile_exact", "sign", "none"):
            allowed = "'quantile', 'quantile_exact', 'sign' or 'none'"
            raise InputError(f"method is {shown(method)}; it must be {allowed}")
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
                raise InputError(
                    f"{name}: the bias is {bias.dtype}; it must stay float32")
            if self.all_reduce and dist.is_available() and dist.is_initialized():
                tally.all_reduce(self.group)
            del self.tallies[name]
            if bool(tally.load.any()):
                self.load[name] = tally.load
                self.max_vio[name] = float(max_vio(tally.load))
                bias.copy_(self._new_bias(bias, tally, router.top_k))

    def _new_bias(self, bias: Tensor, tally: Tally, top_k: int) -> Tensor:
        if self.method == "quantile":
            return tally.histogram.new_bias(top_k)
        if self.method == "quantile_exact":
            return quantile_bias(tally.scores, bias, top_k)
        if self.method == "sign":
            return sign_update(bias, tally.load, self.step_size)
        return bias
