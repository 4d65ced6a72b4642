"""Mistakes outside the forty: most are loud, and equality with the released model shows them."""

from k3_teach.conformance.mistakes.mistake import Edit, Mistake
from k3_teach.model import DecoderLayer, make_mixer, make_moe
from k3_teach.parts.attn_res import BlockStream
from k3_teach.parts.kda_layer import KDA, GatedHeadNorm
from k3_teach.parts.latent_moe import LatentMoE
from k3_teach.parts.mla import MLA
from k3_teach.parts.moe import route

HEAD_NORM = """
normed = rms_normalize(o, self.eps) * upcast(self.weight)
return normed * torch.sigmoid(upcast(gate))
"""

KDA_ONES = [
    Mistake(0, "no 1/sqrt(K) on the query of KDA", (Edit(
        KDA.forward,
        "q = l2_normalize(self.heads(q)) * self.head_dim ** -0.5",
        "q = l2_normalize(self.heads(q))"),)),
    Mistake(0, "beta = 1", (Edit(
        KDA.forward,
        "g, beta = self.log_decay(x), torch.sigmoid(upcast(self.b_proj(x)))",
        "g, beta = self.log_decay(x), torch.ones_like(upcast(self.b_proj(x)))"),)),
    Mistake(0, "one decay for all channels of a head", (Edit(
        KDA.forward,
        "g, beta = self.log_decay(x), torch.sigmoid(upcast(self.b_proj(x)))", """
        g, beta = self.log_decay(x), torch.sigmoid(upcast(self.b_proj(x)))
        g = g.mean(-1, keepdim=True).expand_as(g)
        """),)),
    Mistake(0, "the output gate before the norm", (Edit(
        GatedHeadNorm.forward, HEAD_NORM, """
        gated = o * torch.sigmoid(upcast(gate))
        return rms_normalize(gated, self.eps) * upcast(self.weight)
        """),)),
]

MLA_ONES = [
    Mistake(0, "RoPE on the shared part of the keys", (Edit(
        make_mixer,
        "rope_base = None if c.mla_use_nope else c.rope_theta",
        "rope_base = c.rope_theta"),)),
    Mistake(0, "scores divided by the root of a head's own width", (Edit(
        MLA.__init__,
        "self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5",
        "self.scale = qk_nope_head_dim ** -0.5"),)),
    Mistake(0, "no output gate in MLA", (Edit(
        MLA.forward,
        "y = o if self.g_proj is None else o * torch.sigmoid(self.g_proj(x))",
        "y = o"),)),
]

DEPTH_ONES = [
    Mistake(0, "one depth read for each layer", (Edit(
        DecoderLayer.forward,
        'mlp_in = stream.read(self.query("mlp"), trace, "mlp_read")', """
        stream.read(self.query("mlp"), trace, "mlp_read")
        mlp_in = stream.prefix
        """),)),
    Mistake(0, "the embedding stays in the sum", (Edit(
        BlockStream.seal,
        "self.prefix = None",
        "self.prefix = self.prefix if self.num_sealed == 1 else None"),)),
]

EXPERT_ONES = [
    Mistake(0, "latent norm before the experts", (
        Edit(LatentMoE.forward,
             "u = self.experts(self.routed_expert_down_proj(tokens), idx, weights)", """
             z = self.routed_expert_norm(self.routed_expert_down_proj(tokens))
             u = self.experts(z, idx, weights)
             """),
        Edit(LatentMoE.forward,
             "if self.routed_expert_norm is not None:",
             "if False:"))),
    Mistake(0, "softmax scores", (Edit(
        make_moe,
        "c.moe_router_activation_func, c.moe_renormalize,",
        '"softmax", c.moe_renormalize,'),)),
    Mistake(0, "the bias in the weights of the mixture", (Edit(
        route,
        "weights = scores.gather(-1, idx)",
        "weights = (scores + bias).gather(-1, idx)"),)),
    Mistake(0, "no renormalisation of the chosen weights", (Edit(
        route,
        "if renormalize and top_k > 1:",
        "if False:"),)),
]

MISTAKES = [*KDA_ONES, *MLA_ONES, *DEPTH_ONES, *EXPERT_ONES]
