"""Gated multi-head latent attention without positions: the cache holds one narrow vector per token, not keys and values.

    c = RMSNorm(W_DKV x), r = W_KR x           cached: the latent c (512 in K3) and a key part r that all heads share (64)
    k_h = [W_UK,h c ; r],  v_h = W_UV,h c      each head makes its own key and value from the same c
    o_h = softmax(q_h . k_h / sqrt(192)) v_h
    y = W_o (o * sigmoid(W_g x))               the output gate, full rank       (Kimi K3 report, eq. 6; MLA: arXiv 2405.04434;
                                                                                  gate: arXiv 2505.06708)
Expanded, the keys and values are made for every cached token. Absorbed, the query goes to the latent instead:
q . W_UK c = (W_UK^T q) . c and sum_j a_j W_UV c_j = W_UV sum_j a_j c_j, both exact. One new token wants the second form.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.parts.attention import attention, attention_weights, causal_mask
from k3_teach.parts.norm import RMSNorm
from k3_teach.parts.rope import apply_rope, rope_angles

LATENT_NORM_EPS = 1e-6  # the released code builds these two norms with its default, not with rms_norm_eps


def mla_expanded(q: Tensor, latent: Tensor, kv_b: Tensor, v_dim: int, scale: float, mask: Tensor | None = None) -> Tensor:
    """Make every head's keys and values. q [B,H,T,N+R], latent [B,S,L+R], kv_b [H, N+v_dim, L] -> [B,H,T,v_dim]."""
    k, v = expand(latent, kv_b, v_dim)
    return attention(q, k, v, scale, mask)


def expand(latent: Tensor, kv_b: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [B,H,S,N+R] and values [B,H,S,v_dim] of all heads from the cached [B,S,L+R]."""
    H, _, L = kv_b.shape
    c, shared = latent.split([L, latent.shape[-1] - L], -1)
    k, v = torch.einsum("bsl,hnl->bhsn", c, kv_b).split([kv_b.shape[1] - v_dim, v_dim], -1)
    return torch.cat((k, shared[:, None].expand(-1, H, -1, -1)), -1), v


def mla_absorbed(q: Tensor, latent: Tensor, kv_b: Tensor, v_dim: int, scale: float, mask: Tensor | None = None) -> Tensor:
    """The same numbers from the latent itself, which serves as the key and as the value of every head.

    All heads and new tokens become the rows of one query against one "head", so the cache is read once.
    """
    (B, H, T, D), S, L = q.shape, latent.shape[1], kv_b.shape[2]
    w_uk, w_uv = kv_b.split([kv_b.shape[1] - v_dim, v_dim], 1)                       # [H, N, L], [H, v_dim, L]
    q_nope, q_shared = q.split([w_uk.shape[1], D - w_uk.shape[1]], -1)
    q = torch.cat((torch.einsum("bhtn,hnl->bhtl", q_nope, w_uk), q_shared), -1)      # [B, H, T, L+R]
    if mask is None and T > 1:
        mask = causal_mask(T, S, device=q.device)
    if mask is not None:
        mask = mask.expand(B, 1, T, S).repeat(1, 1, H, 1)                            # rows ordered by head, then token
    cache = latent[:, None]
    o = F.scaled_dot_product_attention(q.reshape(B, 1, H * T, -1), cache, cache, mask, scale=scale)
    return torch.einsum("bhtl,hvl->bhtv", o.view(B, H, T, -1)[..., :L], w_uv)


class MLA(nn.Module):
    """x [B,T,d] -> [B,T,d]. `state` (a LatentCache) keeps L+R numbers per token; `mask` [B,S] is False at padding."""

    def __init__(self, hidden_size: int, num_heads: int, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int,
                 v_head_dim: int, q_lora_rank: int | None = None, output_gate: bool = True, rope_base: float | None = None):
        super().__init__()
        self.num_heads, self.kv_lora_rank, self.rope_base = num_heads, kv_lora_rank, rope_base
        self.nope_dim, self.rope_dim, self.v_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        query_width = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.q_proj = linear(hidden_size, query_width)
        else:
            self.q_a_proj = linear(hidden_size, q_lora_rank)
            self.q_a_layernorm = RMSNorm(q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = linear(q_lora_rank, query_width)
        self.kv_a_proj_with_mqa = linear(hidden_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.g_proj = linear(hidden_size, num_heads * v_head_dim) if output_gate else None
        self.o_proj = linear(num_heads * v_head_dim, hidden_size)

    def queries(self, x: Tensor) -> Tensor:
        """[B,T,d] -> [B,H,T,N+R]."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if hasattr(self, "q_a_proj") else self.q_proj(x)
        return q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def latents(self, x: Tensor) -> Tensor:
        """[B,T,d] -> [B,T,L+R]: the normed latent beside the shared key, which is neither normed nor (in K3) rotated."""
        c, shared = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.rope_dim], -1)
        return torch.cat((self.kv_a_layernorm(c), shared), -1)

    def rotate(self, q: Tensor, latent: Tensor, past: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """RoPE on the shared part (only where a configuration asks for it). Positions count real tokens."""
        T = q.shape[-2]
        real = torch.ones(1, past + T, device=q.device) if mask is None else mask
        angles = rope_angles((real.cumsum(-1) - 1)[:, past:], self.rope_dim, self.rope_base)             # [B or 1, T, R/2]
        q_nope, q_shared = q.split([self.nope_dim, self.rope_dim], -1)
        c, shared = latent.split([self.kv_lora_rank, self.rope_dim], -1)
        return torch.cat((q_nope, apply_rope(q_shared, angles[:, None])), -1), torch.cat((c, apply_rope(shared, angles)), -1)

    def prefers_absorbed(self, T: int, S: int) -> bool:
        """Is reading the latent T times cheaper than expanding S cached tokens once? Compares multiply-adds per key and head."""
        extra = 2 * self.kv_lora_rank - self.nope_dim - self.v_dim                    # per query: wider keys and values
        return T < S and T * extra < self.kv_lora_rank * (self.nope_dim + self.v_dim)

    def forward(self, x: Tensor, state=None, mask: Tensor | None = None, trace: dict | None = None) -> Tensor:
        T = x.shape[1]
        if mask is not None:
            x = x.masked_fill(~mask[:, -T:, None], 0)                                # whatever is in the padding, even NaN
        q, latent = self.queries(x), self.latents(x)
        if self.rope_base is not None:
            q, latent = self.rotate(q, latent, 0 if state is None else len(state), mask)
        if state is not None:
            latent = state.append(latent)
        S = latent.shape[1]
        mask = None if mask is None else causal_mask(T, S, mask, x.device)
        kv_b = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))              # [H, N+V, L]
        if trace is not None:
            trace["attn_weights"] = attention_weights(q, expand(latent, kv_b, self.v_dim)[0], self.scale, mask)
        attend = mla_absorbed if self.prefers_absorbed(T, S) else mla_expanded
        o = attend(q, latent, kv_b, self.v_dim, self.scale, mask).transpose(1, 2).flatten(2)
        return self.o_proj(o if self.g_proj is None else o * torch.sigmoid(self.g_proj(x)))
