"""A mixture of experts: many small feed-forward networks; each token uses a few.

    s   = sigmoid(W x)              a score for every expert    (Kimi K3 report, eq. 13)
    A   = the k largest of s + b    the bias b only takes part in this choice
    p_j = c s_j / sum_A s           j in A; c is the routed scaling factor, 1 in K3
    y   = sum_A p_j E_j(x)          E_j(x) = w2_j act(w1_j x, w3_j x): see situ.py

Shapes: N tokens, d model width, E experts, k experts per token, l the width that an
expert reads and writes, m its inner width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.errors import InputError
from k3_teach.parts.grouped import grouped_linear
from k3_teach.parts.precision import (
    KeepFloat32, as_upcast, float32_parameter, upcast)


def limit_to_groups(choice: Tensor, num_groups: int, topk_group: int) -> Tensor:
    """Keep the `topk_group` groups whose best two scores sum highest, the rest -inf.

    choice [N, E] -> [N, E]. A group is a run of E/groups experts (DeepSeek-V3, arXiv
    2412.19437). K3 has but one group, and does not call this.
    """
    grouped = choice.unflatten(-1, (num_groups, -1))             # [N, groups, E/groups]
    score = grouped.topk(2, -1).values.sum(-1)                   # [N, groups]
    best = score.topk(topk_group, -1).indices                    # [N, topk_group]
    keep = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~keep[..., None], -torch.inf).flatten(-2)


def route(scores: Tensor, bias: Tensor, top_k: int, renormalize: bool = True,
          scaling: float = 1.0, num_groups: int = 1, topk_group: int = 1
          ) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token, and the weights of their outputs (eq. 13).

    scores [N, E], bias [E] -> idx [N, k], weights [N, k], both sorted by biased score.
    The bias decides who is chosen; the weights come from the raw scores. With top_k = 1
    there is nothing to renormalise. InputError for top_k outside 1..E.
    """
    num_experts = scores.shape[-1]
    if not 1 <= top_k <= num_experts:
        allowed = f"between 1 and the number of experts ({num_experts})"
        raise InputError(f"top_k is {top_k}; it must be {allowed}")
    choice = scores.detach() + bias
    if num_groups > 1 and num_groups > topk_group:
        if num_experts % num_groups or top_k > topk_group * (num_experts // num_groups):
            raise InputError(
                f"num_groups is {num_groups}, topk_group {topk_group}; groups must "
                f"divide {num_experts} experts and keep {top_k} of them")
        choice = limit_to_groups(choice, num_groups, topk_group)
    idx = choice.topk(top_k, -1).indices                         # [N, k]
    weights = scores.gather(-1, idx)                             # [N, k]
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return idx, weights * scaling


class Router(KeepFloat32, nn.Module):
    """Scores every expert for every token and chooses.

    x [N, d] -> idx [N, k], weights [N, k], scores [N, E]. Float32 even in a bfloat16
    model: near-ties decide who computes, and rounding would decide them otherwise.
    """

    float32_names = ("e_score_correction_bias",)

    def __init__(self, hidden_size: int, num_experts: int, top_k: int,
                 score: str = "sigmoid", renormalize: bool = True, scaling: float = 1.0,
                 num_groups: int = 1, topk_group: int = 1):
        super().__init__()
        if score not in ("sigmoid", "softmax"):
            raise InputError(f"score is {score!r}; it must be 'sigmoid' or 'softmax'")
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5 ** 0.5)
        # Set between training steps by parts/balancer.py, never by the gradient.
        bias = float32_parameter(torch.zeros(num_experts), requires_grad=False)
        self.e_score_correction_bias = bias
        self.score, self.top_k = score, top_k
        self.renormalize, self.scaling = renormalize, scaling
        self.num_groups, self.topk_group = num_groups, topk_group

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with as_upcast(x):
            logits = F.linear(upcast(x), upcast(self.weight))
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        bias = self.e_score_correction_bias
        idx, weights = route(scores, bias, self.top_k, self.renormalize, self.scaling,
                             self.num_groups, self.topk_group)
        return idx, weights, scores


# --- running the chosen experts -------------------------------------------------------

def experts_loop(x: Tensor, idx: Tensor, weights: Tensor,
                 w1: Tensor, w2: Tensor, w3: Tensor, act) -> Tensor:
    """The definition (eq. 13), one expert after another: sum_A p_j E_j(x).

    x [N, l], idx and weights [N, k], w1 and w3 [E, m, l], w2 [E, l, m] -> [N, l].
    The sum is taken in float32.
    """
    y = torch.zeros_like(upcast(x))
    for e, (w1_e, w2_e, w3_e) in enumerate(zip(w1.unbind(), w2.unbind(), w3.unbind())):
        token, slot = (idx == e).nonzero(as_tuple=True)
        if len(token):
            out = act(x[token] @ w1_e.T, x[token] @ w3_e.T) @ w2_e.T
            y = y.index_add(0, token, upcast(out) * weights[token, slot, None])
    return y.to(x.dtype)


def experts_grouped(x: Tensor, idx: Tensor, weights: Tensor,
                    w1: Tensor, w2: Tensor, w3: Tensor, act) -> Tensor:
    """The same as `experts_loop` in three grouped products. Shapes as there.

    The N k pairs (token, expert) are sorted by expert. An `embedding_bag` is a weighted
    sum of rows: it collects a token's results without a copy of them in between. It can
    be differentiated once.
    """
    expert, order = idx.flatten().sort(stable=True)              # [N k]
    token = order // idx.shape[1]
    experts = torch.arange(len(w1), device=x.device)
    ends = torch.searchsorted(expert, experts, right=True).int() # [E]
    rows = x.index_select(0, token)                              # [N k, l]
    inner = act(grouped_linear(rows, w1, ends), grouped_linear(rows, w3, ends))
    out = upcast(grouped_linear(inner, w2, ends))                # [N k, l]
    where = order.argsort().view_as(idx)                         # [N, k], row in out
    y = F.embedding_bag(where, out, per_sample_weights=weights.to(out), mode="sum")
    return y.to(x.dtype)                                         # [N, l]


def experts_few(x: Tensor, idx: Tensor, weights: Tensor,
                w1: Tensor, w2: Tensor, w3: Tensor, act) -> Tensor:
    """The same as `experts_loop` when few experts are in use, as in decoding.

    It takes views of their matrices and leaves the idle ones alone. Shapes as there.
    """
    experts = idx.flatten().tolist()
    each = lambda rows, w: torch.stack([w[e] @ row for e, row in zip(experts, rows)])
    rows = x.repeat_interleave(idx.shape[1], 0)                  # [N k, l]
    out = each(act(each(rows, w1), each(rows, w3)), w2)          # [N k, l]
    out = upcast(out).view(*idx.shape, -1)                       # [N, k, l]
    return (weights[..., None] * out).sum(1).to(x.dtype)


class Experts(nn.Module):
    """E feed-forward networks, their matrices stacked.

    w1 (gate) and w3 (up) [E, m, l], w2 (down) [E, l, m]: row e of `w1` is
    `experts.{e}.w1.weight` in the release. x [N, l], idx and weights [N, k] -> [N, l].
    """

    def __init__(self, num_experts: int, width: int, intermediate_size: int,
                 act: nn.Module, std: float = 0.02):
        super().__init__()
        inward, outward = (intermediate_size, width), (width, intermediate_size)
        self.w1 = nn.Parameter(torch.empty(num_experts, *inward).normal_(0, std))
        self.w2 = nn.Parameter(torch.empty(num_experts, *outward).normal_(0, std))
        self.w3 = nn.Parameter(torch.empty(num_experts, *inward).normal_(0, std))
        self.act = act

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        if len(x) == 0:
            return x
        # Not in training: the gradient of a slice of a stack is as large as the stack.
        few = idx.numel() <= len(self.w1) / 4 and not torch.is_grad_enabled()
        # It reads idx in Python, which has no values in a graph or on the meta device.
        few = few and not (torch.compiler.is_compiling() or idx.is_meta)
        run = experts_few if few else experts_grouped
        return run(x, idx, weights, self.w1, self.w2, self.w3, self.act)


class MoE(nn.Module):
    """Router, routed experts, and an optional shared branch that every token uses.

    x [..., d] -> [..., d]. Into the trace go topk_idx, topk_w [N, k], scores [N, E],
    and the sum over the routed experts as `latent` [N, d] (narrower in LatentMoE).
    """

    def __init__(self, gate: Router, experts: Experts,
                 shared_experts: nn.Module | None = None):
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def forward(self, x: Tensor, trace: dict | None = None) -> Tensor:
        tokens = x.flatten(0, -2)                                # [N, d]
        idx, weights, scores = self.gate(tokens)
        y = self.experts(tokens, idx, weights)
        if trace is not None:
            trace.update(topk_idx=idx, topk_w=weights, scores=scores, latent=y)
        y = y.view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)
