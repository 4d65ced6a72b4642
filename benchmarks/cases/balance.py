"""Quantile balancing: one update of the biases from all scores of a batch."""

from collections.abc import Iterator

import torch

from benchmarks.baselines.balance import selected, sorted_quantile
from benchmarks.case import Case, Disagreement
from k3_teach.parts.balance import QuantileHistogram, margins, quantile_bias
from k3_teach.scale.flops import balance_bytes

OURS = "quantile_bias"


def cases(quick: bool) -> Iterator[Case]:
    for tokens, experts, k in ((64, 16, 2),) if quick else ((4096, 896, 16), (65536, 896, 16)):
        yield update(tokens, experts, k)


def counted(scores, bias, top_k: int):
    """The update through a histogram, as it is made from micro-batches."""
    histogram = QuantileHistogram(bias)
    histogram.add(margins(scores, bias, top_k))
    return histogram.new_bias(top_k)


def update(tokens: int, experts: int, k: int) -> Case:
    torch.manual_seed(0)
    scores, bias = torch.rand(tokens, experts), 0.01 * torch.randn(experts)

    def check(results):
        """The exact ones to rounding, the counted one within a bin of its histogram."""
        bin, exact = QuantileHistogram(bias).width, results[OURS]
        for name, allowed in (("torch.quantile", 1e-6), ("kthvalue", 1e-6), ("histogram", 2 * bin)):
            error = float((results.get(name, exact) - exact).abs().max())
            if not error <= allowed:
                raise Disagreement(f"{name} is {error:.1e} away; allowed is {allowed:.1e}")

    return Case("Quantile balancing", f"N {tokens}, {experts} choose {k}", {
        OURS: lambda: quantile_bias(scores, bias, k),
        "histogram": lambda: counted(scores, bias, k),
        "torch.quantile": lambda: sorted_quantile(scores, bias, k),
        "kthvalue": lambda: selected(scores, bias, k)},
        OURS, bytes=balance_bytes(tokens, experts), tokens=tokens, check=check)
