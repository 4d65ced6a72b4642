"""Gated multi-head latent attention (MLA) without positions: the cache holds one narrow
vector per token, not keys and values.

    c = RMSNorm(W_DKV x),  r = W_KR x      cached: the latent c, and a part r of the key
                                           that all heads share (512 and 64 in K3)
    q_h = W_UQ,h RMSNorm(W_DQ x)           a query per head, through a rank of 1536
    k_h = [W_UK,h c ; r],  v_h = W_UV,h c  every head makes its own from the same c
    o_h = softmax(q_h . k_h / sqrt(192)) v_h
    y = W_o (o * sigmoid(W_g x))           the output gate, full rank

    (Kimi K3 report, eq. 6 and 7; MLA: arXiv 2405.04434; the gate: arXiv 2505.06708)

Expanded, the keys and values are made for every cached token. Absorbed, the query goes
to the latent instead, which is exact: q . W_UK c = (W_UK^T q) . c for the scores, and
sum_j a_j W_UV c_j = W_UV sum_j a_j c_j for the output. A single new token wants the
second form.

Shapes: B batch, T new tokens, S tokens so far, H heads, d model width; widths per token
or head: L latent, N a head's own part of the key, R the shared part, V value.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.parts.attention import attention, attention_weights, causal_mask
from k3_teach.parts.norm import RMSNorm
from k3_teach.parts.precision import as_upcast, autocast_dtype, upcast
from k3_teach.parts.rope import apply_rope, rope_angles

# The released code builds the norms of c and of W_DQ x with its default eps, not with
# rms_norm_eps.
LATENT_NORM_EPS = 1e-6


def mla_expanded(q: Tensor, latent: Tensor, kv_b: Tensor, v_dim: int, scale: float,
                 mask: Tensor | None = None) -> Tensor:
    """Attention over every head's keys and values, made here (arXiv 2405.04434).

    q [B,H,T,N+R], latent [B,S,L+R], kv_b [H,N+V,L] (W_UK above W_UV), v_dim = V,
    mask [B,1,T,S], or None: causal -> [B,H,T,V].
    """
    k, v = expand(latent, kv_b, v_dim)
    return attention(q, k, v, scale, mask)


def expand(latent: Tensor, kv_b: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [B,H,S,N+R] and values [B,H,S,V] of all heads from the cached [B,S,L+R].

    kv_b [H,N+V,L], v_dim = V (arXiv 2405.04434).
    """
    H, NV, L = kv_b.shape
    c, shared = latent.split([L, latent.shape[-1] - L], -1)
    k, v = torch.einsum("bsl,hnl->bhsn", c, kv_b).split([NV - v_dim, v_dim], -1)
    return torch.cat((k, shared[:, None].expand(-1, H, -1, -1)), -1), v


def mla_absorbed(q: Tensor, latent: Tensor, kv_b: Tensor, v_dim: int, scale: float,
                 mask: Tensor | None = None) -> Tensor:
    """The same from the latent itself, which is the key and the value of every head.

    All heads and new tokens become the rows of one query against one "head", so that
    the cache is read once (arXiv 2405.04434). Shapes as in `mla_expanded`.
    """
    (B, H, T, D), S, (_, NV, L) = q.shape, latent.shape[1], kv_b.shape
    w_uk, w_uv = kv_b.split([NV - v_dim, v_dim], 1)               # [H, N, L], [H, V, L]
    q_own, q_shared = q.split([w_uk.shape[1], D - w_uk.shape[1]], -1)
    q_latent = torch.einsum("bhtn,hnl->bhtl", q_own, w_uk)        # W_UK^T q
    q = torch.cat((q_latent, q_shared), -1)                       # [B, H, T, L+R]
    if mask is None and T > 1:
        mask = causal_mask(T, S, device=q.device)
    if mask is not None:
        mask = mask.expand(B, 1, T, S).repeat(1, 1, H, 1)         # by head, then token
    q, cache = q.reshape(B, 1, H * T, -1), latent[:, None]
    o = F.scaled_dot_product_attention(q, cache, cache, mask, scale=scale)
    o = o.view(B, H, T, -1)[..., :L]                              # sum_j a_j c_j
    return torch.einsum("bhtl,hvl->bhtv", o, w_uv)


class MLA(nn.Module):
    """The layer (Kimi K3 report, eq. 6 and 7): x [B,T,d] -> [B,T,d].

    `state` (a LatentCache) keeps L+R numbers a token; `mask` [B,S] is False at padding.
    Into the trace go attn_weights [B,H,T,S]. `q_lora_rank` None: one full matrix for
    the queries. `rope_base` None: no positions.
    """

    def __init__(self, hidden_size: int, num_heads: int, kv_lora_rank: int,
                 qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int,
                 q_lora_rank: int | None = None, output_gate: bool = True,
                 rope_base: float | None = None):
        super().__init__()
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.nope_dim, self.rope_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_dim, self.rope_base = v_head_dim, rope_base
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        d, latent_width = hidden_size, kv_lora_rank + qk_rope_head_dim
        query_width = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        kv_width = num_heads * (qk_nope_head_dim + v_head_dim)
        out_width = num_heads * v_head_dim
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        if q_lora_rank is None:
            self.q_proj = linear(d, query_width)
        else:
            self.q_a_proj = linear(d, q_lora_rank)
            self.q_a_layernorm = RMSNorm(q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = linear(q_lora_rank, query_width)
        self.kv_a_proj_with_mqa = linear(d, latent_width)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = linear(kv_lora_rank, kv_width)
        self.g_proj = linear(d, out_width) if output_gate else None
        self.o_proj = linear(out_width, d)

    def queries(self, x: Tensor) -> Tensor:
        """x [B,T,d] -> [B,H,T,N+R]."""
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def latents(self, x: Tensor) -> Tensor:
        """What is cached: x [B,T,d] -> [B,T,L+R].

        The latent is normed; the shared key beside it is neither normed nor (in K3)
        rotated.
        """
        latent = self.kv_a_proj_with_mqa(x)
        c, shared = latent.split([self.kv_lora_rank, self.rope_dim], -1)
        return torch.cat((self.kv_a_layernorm(c), shared), -1)

    def rotate(self, q: Tensor, latent: Tensor, past: int, mask: Tensor | None
               ) -> tuple[Tensor, Tensor]:
        """RoPE on the shared parts, where a configuration asks for it. K3 does not.

        q [B,H,T,N+R], latent [B,T,L+R], behind `past` cached tokens; positions count
        real tokens. Gives both with their last R channels turned.
        """
        T = q.shape[-2]
        real = torch.ones(1, past + T, device=q.device) if mask is None else mask
        positions = (real.cumsum(-1) - 1)[:, past:]               # [B or 1, T]
        angles = rope_angles(positions, self.rope_dim, self.rope_base)
        q_own, q_shared = q.split([self.nope_dim, self.rope_dim], -1)
        c, shared = latent.split([self.kv_lora_rank, self.rope_dim], -1)
        q = torch.cat((q_own, apply_rope(q_shared, angles[:, None])), -1)
        return q, torch.cat((c, apply_rope(shared, angles)), -1)

    def prefers_absorbed(self, T: int, S: int) -> bool:
        """Does the absorbed form take fewer multiply-adds for T new tokens of S?

        Per head, the queries and outputs of T tokens pass through W_UK and W_UV, or the
        latents of S tokens do; then every pair of a new and a cached token takes L+R
        for the score and L for the sum, or N+R and V.
        """
        L, R = self.kv_lora_rank, self.rope_dim
        key_value = self.nope_dim + self.v_dim                    # N + V
        absorbed = T * L * key_value + T * S * (2 * L + R)
        expanded = S * L * key_value + T * S * (key_value + R)
        return absorbed < expanded

    def forward(self, x: Tensor, state=None, mask: Tensor | None = None,
                trace: dict | None = None) -> Tensor:
        T = x.shape[1]
        if mask is not None:
            # Whatever is in the padding, even NaN, must not reach the cache.
            x = x.masked_fill(~mask[:, -T:, None], 0)
        q, latent = self.queries(x), self.latents(x)
        if self.rope_base is not None:
            q, latent = self.rotate(q, latent, 0 if state is None else len(state), mask)
        if state is not None:
            latent = state.append(latent)                         # [B, S, L+R]
        S = latent.shape[1]
        mask = None if mask is None else causal_mask(T, S, mask, x.device)
        kv_b = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))  # [H, N+V, L]
        if trace is not None:
            keys, _ = expand(latent, kv_b, self.v_dim)
            trace["attn_weights"] = attention_weights(q, keys, self.scale, mask)
        attend = mla_absorbed if self.prefers_absorbed(T, S) else mla_expanded
        keep = nullcontext()
        if self.training and autocast_dtype(x) is not None:
            # K3 was trained with this output in float32 (its report, version 2).
            q, latent, kv_b = (upcast(y) for y in (q, latent, kv_b))
            keep = as_upcast(x)
        with keep:
            o = attend(q, latent, kv_b, self.v_dim, self.scale, mask)   # [B, H, T, V]
        o = o.transpose(1, 2).flatten(2)                          # [B, T, H V]
        y = o if self.g_proj is None else o * torch.sigmoid(self.g_proj(x))
        return self.o_proj(y)
