"""A plain GPT, as active for each token as a given K3: what do K3's mechanisms cost in time?

Pre-norm, multi-head attention by torch's fused kernel, a GELU feed-forward, learned
positions, no biases. All of it is large matrix products, which a machine does best.

Shapes: B batch, T new tokens, d model width, H heads, K = d / H width of a key and value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.config import K3Config
from k3_teach.errors import InputError
from k3_teach.scale.cost import active_parameters


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, d: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, inner, bias=False), nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor, kept: Tensor | None = None, past: int = 0) -> Tensor:
        """x [B,T,d] -> [B,T,d]. kept [2,B,H,room,K]: keys and values, of which `past` are
        there; those of x are put behind them."""
        T = x.shape[1]
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))            # [B, H, T, K]
        if kept is not None:
            kept[0, :, :, past:past + T], kept[1, :, :, past:past + T] = k, v
            k, v = kept[..., :past + T, :]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """`depth` blocks between an embedding and a head of its own."""

    def __init__(self, vocab: int, d: int, heads: int, depth: int, inner: int, context: int):
        super().__init__()
        self.heads = heads
        self.embed, self.position = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads, inner) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(d, bias=False), nn.Linear(d, vocab, bias=False)
        for p in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(p, 0, 0.02)

    def forward(self, ids: Tensor, cache: Tensor | None = None, past: int = 0) -> Tensor:
        """ids [B,T] -> logits [B,T,vocab]. cache: see `new_cache`; it holds `past` tokens.

        InputError for several tokens behind others: the kernel's causal mask starts at 0.
        """
        T = ids.shape[1]
        if past and T > 1:
            raise InputError(f"ids has {T} tokens; behind {past} cached ones it must be 1")
        x = self.embed(ids) + self.position.weight[past:past + T]   # [B, T, d]
        kept = [None] * len(self.blocks) if cache is None else cache
        for block, room in zip(self.blocks, kept):
            x = block(x, room, past)
        return self.head(self.norm(x))

    def new_cache(self, batch: int, room: int) -> Tensor:
        """Keys and values of all blocks, for `room` tokens: [depth,2,B,H,room,K]."""
        d = self.embed.embedding_dim
        return torch.zeros(len(self.blocks), 2, batch, self.heads, room, d // self.heads)


def active(model: GPT) -> int:
    """Parameters that one token multiplies with: all but the two embeddings."""
    embeddings = {id(model.embed.weight), id(model.position.weight)}
    return sum(p.numel() for p in model.parameters() if id(p) not in embeddings)


def gpt_like(c: K3Config, context: int) -> GPT:
    """A GPT of the same width, depth, heads and vocabulary, and as many active parameters.

    Counted as in `active_parameters`: the head is active, embeddings are not. Norms and
    attention take their share of each block; the feed-forward is as wide as the rest
    allows, to a multiple of 8. InputError where nothing is left for it.
    """
    d, depth = c.hidden_size, c.num_hidden_layers
    per_block = (active_parameters(c) - c.vocab_size * d - d) / depth
    inner = 8 * round((per_block - 4 * d * d - 2 * d) / (2 * d) / 8)
    if inner < 8:
        raise InputError(f"the K3 has {per_block:.0f} active parameters a layer; a GPT of "
                         f"width {d} needs more than {4 * d * d} for attention alone")
    return GPT(c.vocab_size, d, c.num_attention_heads, depth, inner, context)
