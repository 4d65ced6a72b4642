"""Causal softmax attention, and three ways to share its heads: MHA, GQA, MQA.

    a_tj = softmax_j(scale q_t . k_j + M_tj),   o_t = sum_j a_tj v_j          M is 0 for j <= t and -inf for j > t

MHA keeps a key and a value per head and token; GQA (arXiv 2305.13245) lets groups of query heads share them; MQA
(arXiv 1911.02150) lets all heads share one. Shapes: B batch, H heads, T new tokens, S tokens so far (T of them new).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.errors import InputError
from k3_teach.parts.precision import upcast
from k3_teach.parts.rope import apply_rope, rope_angles


def causal_mask(T: int, S: int, valid: Tensor | None = None, device=None) -> Tensor:
    """Who may look at whom: True at [t, j] if token j is not after token t, the T tokens being the last of S.

    `valid` [B, S] marks real tokens (False: padding) and makes the mask [B, 1, T, S]. A padding token still sees itself,
    so no row is empty and no softmax becomes NaN; nothing that counts reads it.
    """
    ones = torch.ones(T, S, dtype=torch.bool, device=device)
    causal = ones.tril(S - T)
    if valid is None:
        return causal
    itself = causal & ~ones.tril(S - T - 1)
    return causal & valid[:, None, None, :] | itself


def attention_weights(q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """a_tj of the equation. q [B,H,T,D], k [B,H,S,D] -> [B,H,T,S], softmax in float32."""
    scores = upcast(q @ k.mT) * scale
    mask = causal_mask(q.shape[-2], k.shape[-2], device=q.device) if mask is None else mask
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


def attention_eager(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """The definition: weights, then the weighted sum. q [B,H,T,D], k [B,H,S,D], v [B,H,S,V] -> [B,H,T,V]."""
    return attention_weights(q, k, scale, mask).to(v.dtype) @ v


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """The same through torch's fused kernel. `mask` None: causal, the T queries being the last of the S positions.

    The kernel wants keys and values of one width and silently takes a slow path otherwise, so the narrower is padded.
    """
    T, S, V = q.shape[-2], k.shape[-2], v.shape[-1]
    wide = max(q.shape[-1], V)
    q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    if mask is None and 1 < T < S:
        mask = causal_mask(T, S, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and T == S > 1, scale=scale)[..., :V]


class GroupedQueryAttention(nn.Module):
    """MHA (num_key_value_heads = num_heads), MQA (1), and GQA between. x [B,T,d] -> [B,T,d].

    `state` keeps 2 num_key_value_heads head_dim numbers per token. `rope_base` None: no positions (NoPE).
    """

    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int, head_dim: int, rope_base: float | None = None):
        super().__init__()
        if num_heads % num_key_value_heads:
            raise InputError(f"num_key_value_heads is {num_key_value_heads}; it must divide num_heads ({num_heads})")
        self.num_heads, self.num_key_value_heads, self.head_dim, self.rope_base = num_heads, num_key_value_heads, head_dim, rope_base
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(hidden_size, 2 * num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, state=None, mask: Tensor | None = None, trace: dict | None = None) -> Tensor:
        B, T, _ = x.shape
        kv = self.kv_proj(x)
        kv = kv if state is None else state.append(kv)                                       # [B, S, 2 G D]
        S = kv.shape[1]
        k, v = kv.view(B, S, 2, self.num_key_value_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        if self.rope_base is not None:
            angles = rope_angles(torch.arange(S, device=x.device), self.head_dim, self.rope_base)
            q, k = apply_rope(q, angles[S - T:]), apply_rope(k, angles)
        k, v = (y.repeat_interleave(self.num_heads // self.num_key_value_heads, 1) for y in (k, v))
        mask = None if mask is None else causal_mask(T, S, mask, x.device)
        if trace is not None:
            trace["attn_weights"] = attention_weights(q, k, self.head_dim ** -0.5, mask)
        o = attention(q, k, v, self.head_dim ** -0.5, mask)
        return self.o_proj(o.transpose(1, 2).flatten(2))
