"""Mistakes in the router, the experts and their activation."""

from k3_teach.conformance.mistakes.mistake import Edit, Mistake
from k3_teach.model import make_moe
from k3_teach.parts.latent_moe import LatentMoE
from k3_teach.parts.moe import Router, experts_few, experts_grouped
from k3_teach.parts.situ import Activation

MISTAKES = [
    Mistake(25, "latent norm of partial sums, then their sum", (
        Edit(LatentMoE.forward,
             "u = self.experts(self.routed_expert_down_proj(tokens), idx, weights)", """
             z, norm = self.routed_expert_down_proj(tokens), self.routed_expert_norm
             halves = [self.experts(z, idx, weights * (idx % 2 == rank)) for rank in (0, 1)]
             u = sum(norm(half) for half in halves)
             """),
        Edit(LatentMoE.forward,
             "if self.routed_expert_norm is not None:",
             "if False:"))),
    Mistake(26, "routed_expert_norm is not applied", (Edit(
        LatentMoE.forward,
        "if self.routed_expert_norm is not None:",
        "if False:"),)),
    Mistake(27, "logits of the router in bfloat16", (Edit(
        Router.forward,
        "logits = F.linear(upcast(x), upcast(self.weight))",
        "logits = F.linear(upcast(x), upcast(self.weight)).bfloat16().to(x.dtype)"),)),
    Mistake(28, "the bias of the router in bfloat16", (Edit(
        Router.forward,
        "bias = self.e_score_correction_bias",
        "bias = self.e_score_correction_bias.bfloat16()"),),
        "only a near-tie between two experts can show it"),
    Mistake(29, "results of the experts summed in bfloat16", (
        Edit(experts_grouped,
             'y = F.embedding_bag(where, out, per_sample_weights=weights.to(out), mode="sum")',
             "y = (weights[..., None] * out[where]).bfloat16().sum(1)"),
        Edit(experts_few,
             "return (weights[..., None] * out).sum(1).to(x.dtype)",
             "return (weights[..., None] * out).bfloat16().sum(1).to(x.dtype)"))),
    Mistake(30, "SiTU with one argument: up is not capped", (Edit(
        Activation.forward,
        "return situ_glu_lean(gate, up, self.beta, self.linear_beta)",
        "return situ_glu_lean(gate, up, self.beta, None)"),),
        "up is far below 25 in a model with ordinary weights"),
    Mistake(30, "shared experts left on SiLU", (Edit(
        make_moe,
        """
        shared = GatedMLP(d, shared_width, act) if c.num_shared_experts else None
        """, """
        act = Activation("silu")
        shared = GatedMLP(d, shared_width, act) if c.num_shared_experts else None
        """),)),
    Mistake(30, "the sigmoid sees the capped gate", (Edit(
        Activation.forward,
        "return situ_glu_lean(gate, up, self.beta, self.linear_beta)", """
        a, b = softcap(gate, self.beta), softcap(up, self.linear_beta)
        return a * torch.sigmoid(a) * b
        """),)),
    Mistake(30, "the caps exchanged: softcap(a, 25) sigmoid(4 a)", (Edit(
        Activation.forward,
        "return situ_glu_lean(gate, up, self.beta, self.linear_beta)",
        "return softcap(gate, self.linear_beta) * torch.sigmoid(self.beta * gate) * up"),)),
    Mistake(34, "balancing goes on in evaluation", (Edit(
        Router.forward,
        "return idx, weights, scores", """
        from k3_teach.parts.balance import expert_load, sign_update
        bias.data = sign_update(bias, expert_load(idx, len(bias)), 0.01)
        return idx, weights, scores
        """),),
        "the first forward pass is right, and the second is not"),
]
