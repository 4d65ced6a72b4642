"""Mistakes in multi-head latent attention."""

from k3_teach.conformance.mistakes.mistake import Edit, Mistake
from k3_teach.parts.attention import causal_mask
from k3_teach.parts.mla import MLA

MISTAKES = [
    Mistake(35, "one eps for all norms", (
        Edit(MLA.__init__,
             "self.q_a_layernorm = RMSNorm(q_lora_rank, LATENT_NORM_EPS)",
             "self.q_a_layernorm = RMSNorm(q_lora_rank, 1e-5)"),
        Edit(MLA.__init__,
             "self.kv_a_layernorm = RMSNorm(kv_lora_rank, LATENT_NORM_EPS)",
             "self.kv_a_layernorm = RMSNorm(kv_lora_rank, 1e-5)")),
        "latents of ordinary size are far above either eps"),
    Mistake(19, "the keys of left padding are visible", (Edit(
        causal_mask,
        "return causal & valid[:, None, None, :] | itself",
        "return causal.expand(len(valid), 1, T, S)"),),
        "without padding there is nothing to see"),
]
