"""Stable LatentMoE: routed experts at a smaller width, their sum normalised on return.

    z = W_down x                        d -> l     (LatentMoE, arXiv 2601.18089)
    u = sum_A p_j E_j(z)                l -> l     A and p from x: see moe.py
    y = W_up RMSNorm(u) + shared(x)     l -> d     (Kimi K3 report, section 2.3)

Half the width halves an expert, so twice as many fit into the same memory. The router
and the shared experts read the full width. The norm comes after the sum over experts,
so the scale of the routed branch does not depend on the weights p.
"""

from torch import Tensor, nn

from k3_teach.parts.moe import Experts, Router
from k3_teach.parts.norm import RMSNorm


class LatentMoE(nn.Module):
    """x [..., d] -> [..., d], and the same trace as MoE, with `latent` u [N, l].

    `norm_eps` None leaves the norm out (LatentMoE as first published).
    """

    def __init__(self, hidden_size: int, latent_size: int, gate: Router,
                 experts: Experts, shared_experts: nn.Module | None = None,
                 norm_eps: float | None = 1e-5):
        super().__init__()
        self.gate = gate
        self.routed_expert_down_proj = nn.Linear(hidden_size, latent_size, bias=False)
        self.experts = experts
        norm = None if norm_eps is None else RMSNorm(latent_size, norm_eps)
        self.routed_expert_norm = norm
        self.routed_expert_up_proj = nn.Linear(latent_size, hidden_size, bias=False)
        self.shared_experts = shared_experts

    def forward(self, x: Tensor, trace: dict | None = None) -> Tensor:
        tokens = x.flatten(0, -2)                               # [N, d]
        idx, weights, scores = self.gate(tokens)                # [N, k], [N, k], [N, E]
        u = self.experts(self.routed_expert_down_proj(tokens), idx, weights)    # [N, l]
        if trace is not None:
            trace.update(topk_idx=idx, topk_w=weights, scores=scores, latent=u)
        if self.routed_expert_norm is not None:
            u = self.routed_expert_norm(u)
        y = self.routed_expert_up_proj(u).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)
