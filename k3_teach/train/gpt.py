"""A plain GPT, to compare with: what everybody builds when nothing is known to be better.

    h <- h + attention(norm(h))      each head turned by RoPE, softmax over all tokens so far
    h <- h + W_down(silu(W_gate n) * W_up n),  n = norm(h)

Pre-norm (RMSNorm), SwiGLU, embeddings and head of their own, no biases: the Transformer of
LLaMA (Touvron et al. 2023, arXiv 2302.13971). Parameters are called and begin as in
K3Model, so that one engine trains both.

Shapes: B batch, T tokens, d model width, H heads, K = d / H width of a head.
"""

import torch
from torch import Tensor, nn

from k3_teach.config import K3Config
from k3_teach.errors import InputError
from k3_teach.init import init_parameters
from k3_teach.parts.attention import attention
from k3_teach.parts.norm import RMSNorm
from k3_teach.parts.rope import apply_rope, rope_angles
from k3_teach.parts.situ import Activation, GatedMLP
from k3_teach.scale.cost import active_parameters
from k3_teach.validate import check_ids

EPS = 1e-5


class Attention(nn.Module):
    """Causal multi-head attention with RoPE: x [B,T,d], angles [T,K/2] -> [B,T,d].

    (Vaswani et al. 2017, arXiv 1706.03762; Su et al. 2021, arXiv 2104.09864.) Queries, keys
    and values have a matrix each, the rows of a head together, so that Muon can part them.
    """

    def __init__(self, d: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))     # [B, H, T, K]
        q, k = apply_rope(q, angles), apply_rope(k, angles)
        o = attention(q, k, v, q.shape[-1] ** -0.5)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual: [B,T,d]."""

    def __init__(self, d: int, heads: int, inner: int):
        super().__init__()
        self.self_attn = Attention(d, heads)
        self.mlp = GatedMLP(d, inner, Activation("silu"))
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d, EPS), RMSNorm(d, EPS)

    def forward(self, h: Tensor, angles: Tensor) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), angles)
        return h + self.mlp(self.post_attention_layernorm(h))


class GPT(nn.Module):
    """`depth` blocks between an embedding and a head: ids [B,T] -> logits [B,T,vocab].

    It keeps no cache: it is here to be trained. Seed it with `torch.manual_seed`.
    InputError for a width that does not part into heads of even width.
    """

    def __init__(self, vocab: int, d: int, heads: int, depth: int, inner: int):
        super().__init__()
        if d % (2 * heads):
            raise InputError(f"d is {d}; it must be a multiple of 2 heads ({2 * heads}): "
                             "RoPE turns the channels of a head in pairs")
        self.head_dim = d // heads
        self.embed_tokens = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Block(d, heads, inner) for _ in range(depth))
        self.norm, self.lm_head = RMSNorm(d, EPS), nn.Linear(d, vocab, bias=False)
        init_parameters(self)

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.embed_tokens.num_embeddings)
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = rope_angles(positions, self.head_dim)                      # [T, K/2]
        h = self.embed_tokens(ids)                                          # [B, T, d]
        for layer in self.layers:
            h = layer(h, angles)
        return self.lm_head(self.norm(h))                                   # [B, T, vocab]


def active(model: nn.Module) -> int:
    """Parameters that one token multiplies with, if all but the embedding are."""
    return sum(p.numel() for p in model.parameters()) - model.embed_tokens.weight.numel()


def gpt_like(config: K3Config) -> GPT:
    """A GPT as wide and deep as `config`, with its heads, and as many active parameters.

    Counted as `active_parameters` counts: with the head, without the embedding. The
    feed-forward is as wide as what is left allows, to a multiple of 8. InputError if that
    is nothing.
    """
    c, d, L = config, config.hidden_size, config.num_hidden_layers
    left = active_parameters(c) - c.vocab_size * d - d - L * (4 * d * d + 2 * d)
    inner = 8 * round(left / (8 * 3 * d * L))
    if inner < 8:
        raise InputError(f"{active_parameters(c)} active parameters leave nothing for the "
                         f"feed-forwards of a GPT of {L} layers {d} wide")
    return GPT(c.vocab_size, d, c.num_attention_heads, L, inner)
