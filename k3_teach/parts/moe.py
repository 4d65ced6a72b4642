"""A mixture of experts: many small feed-forward networks, of which each token uses a few.

    s = sigmoid(W x)                       a score for every expert                 (Kimi K3 report, eq. 13)
    A = the k largest of s + b             the bias b only takes part in this choice
    p_j = c s_j / sum_A s                  j in A; c is the routed scaling factor
    y = sum_A p_j E_j(x)

Shapes: N tokens, d model width, l expert input width, m expert inner width, E experts, k experts per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.errors import InputError
from k3_teach.parts.precision import KeepFloat32, float32_parameter, upcast


def limit_to_groups(choice: Tensor, num_groups: int, topk_group: int) -> Tensor:
    """Keep the `topk_group` groups of experts whose best two scores sum highest; the rest become -inf. choice [N, E]."""
    grouped = choice.unflatten(-1, (num_groups, -1))                                        # [N, groups, E/groups]
    best = grouped.topk(2, -1).values.sum(-1).topk(topk_group, -1).indices                  # [N, topk_group]
    keep = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~keep[..., None], -torch.inf).flatten(-2)


def route(scores: Tensor, bias: Tensor, top_k: int, renormalize: bool = True, scaling: float = 1.0,
          num_groups: int = 1, topk_group: int = 1) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token and the weights of their outputs.

    scores [N, E] and bias [E] -> idx [N, k], weights [N, k], both sorted by biased score. The bias decides who is chosen;
    the weights come from the raw scores. With top_k = 1 there is nothing to renormalise.
    """
    if not 1 <= top_k <= scores.shape[-1]:
        raise InputError(f"top_k is {top_k}; it must be between 1 and the number of experts ({scores.shape[-1]})")
    choice = scores.detach() + bias
    if num_groups > 1 and num_groups > topk_group:
        choice = limit_to_groups(choice, num_groups, topk_group)
    idx = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, idx)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return idx, weights * scaling


class Router(KeepFloat32, nn.Module):
    """Scores every expert for every token and chooses. Float32 even in a bfloat16 model: near-ties decide who computes.

    x [N, d] -> idx [N, k], weights [N, k], scores [N, E].
    """

    float32_names = ("e_score_correction_bias",)

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, score: str = "sigmoid", renormalize: bool = True,
                 scaling: float = 1.0, num_groups: int = 1, topk_group: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5 ** 0.5)
        # Set between training steps by parts/balance.py, never by the gradient.
        self.e_score_correction_bias = float32_parameter(torch.zeros(num_experts), requires_grad=False)
        self.score, self.top_k, self.renormalize, self.scaling = score, top_k, renormalize, scaling
        self.num_groups, self.topk_group = num_groups, topk_group

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(upcast(x), upcast(self.weight))
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        idx, weights = route(scores, self.e_score_correction_bias, self.top_k, self.renormalize, self.scaling,
                             self.num_groups, self.topk_group)
        return idx, weights, scores


# --- running the chosen experts ------------------------------------------------------------------------------------

def experts_loop(x: Tensor, idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, act) -> Tensor:
    """The definition, one expert after another: sum over the chosen of weight * w2 act(w1 x, w3 x).

    x [N, l], idx and weights [N, k], w1 and w3 [E, m, l], w2 [E, l, m] -> [N, l]. The sum is taken in float32.
    """
    y = torch.zeros_like(upcast(x))
    for e, (w1_e, w2_e, w3_e) in enumerate(zip(w1.unbind(), w2.unbind(), w3.unbind())):
        token, slot = (idx == e).nonzero(as_tuple=True)
        if len(token):
            out = act(x[token] @ w1_e.T, x[token] @ w3_e.T) @ w2_e.T
            y = y.index_add(0, token, upcast(out) * weights[token, slot, None])
    return y.to(x.dtype)


def grouped_linear(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of `x` [R, a] sorted by expert, `ends[e]` the first row after expert e's; w [E, b, a] -> x @ w[e].T, [R, b].

    One grouped matrix product where torch has it for this dtype and alignment, else one product per expert in use.
    """
    aligned = all(n * x.element_size() % 16 == 0 for n in w.shape[1:])
    if aligned and x.dtype != torch.float64 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, w.mT, offs=ends)
    rows = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([x_e @ w_e.T for x_e, w_e in zip(x.split(rows), w.unbind()) if len(x_e)])


def experts_grouped(x: Tensor, idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, act) -> Tensor:
    """The same as `experts_loop`: sort the N k pairs (token, expert) by expert, three grouped products, add back."""
    expert, order = idx.flatten().sort(stable=True)
    token = order // idx.shape[1]
    ends = torch.searchsorted(expert, torch.arange(len(w1), device=x.device), right=True).int()
    rows = x.index_select(0, token)
    out = grouped_linear(act(grouped_linear(rows, w1, ends), grouped_linear(rows, w3, ends)), w2, ends)
    out = upcast(out) * weights.flatten().index_select(0, order)[:, None]
    return torch.zeros_like(upcast(x)).index_add(0, token, out).to(x.dtype)


def experts_few(x: Tensor, idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, act) -> Tensor:
    """The same when few experts are in use, as in decoding: views of their matrices, no walk over the idle ones."""
    out = [act(w1[e] @ row, w3[e] @ row) @ w2[e].T for row, chosen in zip(x, idx.tolist()) for e in chosen]
    out = upcast(torch.stack(out)).view(*idx.shape, -1)
    return torch.einsum("nk,nkl->nl", weights, out).to(x.dtype)


class Experts(nn.Module):
    """E feed-forward networks with their matrices stacked. Row e of `w1` is `experts.{e}.w1.weight` in the released file.

    w1 gate and w3 up [E, m, l], w2 down [E, l, m]. x [N, l], idx and weights [N, k] -> [N, l].
    """

    def __init__(self, num_experts: int, width: int, intermediate_size: int, act: nn.Module, std: float = 0.02):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, intermediate_size, width).normal_(0, std))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, intermediate_size).normal_(0, std))
        self.w3 = nn.Parameter(torch.empty(num_experts, intermediate_size, width).normal_(0, std))
        self.act = act

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        if len(x) == 0:
            return x
        few = idx.numel() < len(self.w1) / 8 and not torch.is_grad_enabled()  # slicing a stack costs a full-size gradient
        run = experts_few if few else experts_grouped
        return run(x, idx, weights, self.w1, self.w2, self.w3, self.act)


class MoE(nn.Module):
    """Router, routed experts, and an optional shared branch that every token uses. x [..., d] -> [..., d]."""

    def __init__(self, gate: Router, experts: Experts, shared_experts: nn.Module | None = None):
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def forward(self, x: Tensor, trace: dict | None = None) -> Tensor:
        tokens = x.flatten(0, -2)
        idx, weights, scores = self.gate(tokens)
        y = self.experts(tokens, idx, weights)
        if trace is not None:
            trace.update(topk_idx=idx, topk_w=weights, scores=scores, latent=y)
        y = y.view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)
