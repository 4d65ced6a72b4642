"""Causal softmax attention, and three ways to share its heads: MHA, GQA, MQA.

    a_tj = softmax_j(scale q_t . k_j + M_tj)     M is 0 for j <= t and -inf for j > t
    o_t  = sum_j a_tj v_j                        (Vaswani et al. 2017, arXiv 1706.03762)

MHA keeps a key and a value for every head and token; GQA (arXiv 2305.13245) lets groups
of query heads share them; MQA (arXiv 1911.02150) lets all heads share one.

Shapes: B batch, T new tokens, S tokens so far (the last T of them new), H query heads,
G heads of keys and values, K width of a key, V width of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.errors import InputError
from k3_teach.parts.precision import upcast
from k3_teach.parts.rope import apply_rope, rope_angles


def causal_mask(T: int, S: int, valid: Tensor | None = None, device=None) -> Tensor:
    """Who may look at whom, [T, S]: True at [t, j] if token j is not after token t.

    The T tokens are the last of S. `valid` [B, S] marks real tokens (False: padding)
    and makes the mask [B, 1, T, S]. A padding token still sees itself, so that no row
    is empty and no softmax becomes NaN; nothing that counts reads it.
    """
    ones = torch.ones(T, S, dtype=torch.bool, device=device)
    causal = ones.tril(S - T)
    if valid is None:
        return causal
    itself = causal & ~ones.tril(S - T - 1)
    return causal & valid[:, None, None, :] | itself


def attention_weights(q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None
                      ) -> Tensor:
    """a_tj of the equation, softmax in float32. `mask` None: causal.

    q [B,H,T,K], k [B,H,S,K], mask [T,S] or [B,1,T,S] -> [B,H,T,S].
    """
    scores = upcast(q @ k.mT) * scale
    if mask is None:
        mask = causal_mask(q.shape[-2], k.shape[-2], device=q.device)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


def attention_eager(q: Tensor, k: Tensor, v: Tensor, scale: float,
                    mask: Tensor | None = None) -> Tensor:
    """The definition (arXiv 1706.03762): weights, then the weighted sum.

    q [B,H,T,K], k [B,H,S,K], v [B,H,S,V], mask as above -> [B,H,T,V].
    """
    return attention_weights(q, k, scale, mask).to(v.dtype) @ v


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float,
              mask: Tensor | None = None) -> Tensor:
    """The same as `attention_eager` through torch's fused kernel. Shapes as there.

    The kernel wants keys and values of one width, and silently takes a slow path where
    they differ, so the narrower is padded with zeros.
    """
    T, S, V = q.shape[-2], k.shape[-2], v.shape[-1]
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or T > S:
        ends = [list(x.shape[-2:]) for x in (q, k, v)]
        raise InputError(f"q, k, v end in {ends}; they must end in [T, K], [S, K], "
                         "[S, V] with T at most S")
    wide = max(q.shape[-1], V)
    q, k, v = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x
               for x in (q, k, v))
    if mask is None and 1 < T < S:
        mask = causal_mask(T, S, device=q.device)
    causal = mask is None and T == S > 1
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    return o[..., :V]


class GroupedQueryAttention(nn.Module):
    """MHA (num_key_value_heads = num_heads), MQA (1), GQA between (arXiv 2305.13245).

    x [B,T,d] -> [B,T,d]. `state` keeps 2 num_key_value_heads head_dim numbers a token;
    `mask` [B,S] is False at padding. `rope_base` None: no positions (NoPE).
    """

    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int,
                 head_dim: int, rope_base: float | None = None):
        super().__init__()
        if num_heads % num_key_value_heads:
            raise InputError(f"num_key_value_heads is {num_key_value_heads}; "
                             f"it must divide num_heads ({num_heads})")
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads
        self.head_dim, self.rope_base = head_dim, rope_base
        width, kv_width = num_heads * head_dim, num_key_value_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.kv_proj = nn.Linear(hidden_size, 2 * kv_width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor, state=None, mask: Tensor | None = None,
                trace: dict | None = None) -> Tensor:
        B, T, _ = x.shape
        H, G, K = self.num_heads, self.num_key_value_heads, self.head_dim
        kv = self.kv_proj(x)
        kv = kv if state is None else state.append(kv)                  # [B, S, 2 G K]
        S = kv.shape[1]
        k, v = kv.view(B, S, 2, G, K).permute(2, 0, 3, 1, 4)            # [B, G, S, K]
        q = self.q_proj(x).view(B, T, H, K).transpose(1, 2)             # [B, H, T, K]
        if self.rope_base is not None:
            angles = rope_angles(torch.arange(S, device=x.device), K, self.rope_base)
            q, k = apply_rope(q, angles[S - T:]), apply_rope(k, angles)
        k, v = (y.repeat_interleave(H // G, 1) for y in (k, v))         # [B, H, S, K]
        mask = None if mask is None else causal_mask(T, S, mask, x.device)
        if trace is not None:
            trace["attn_weights"] = attention_weights(q, k, K ** -0.5, mask)
        o = attention(q, k, v, K ** -0.5, mask)
        return self.o_proj(o.transpose(1, 2).flatten(2))
