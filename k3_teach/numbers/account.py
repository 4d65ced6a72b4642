"""Figures of chapters 10, 11 and 13: the three bills, the optimiser, a million tokens."""

from collections.abc import Iterator

import torch

from k3_teach import mxfp4
from k3_teach.config import K3Config
from k3_teach.scale import cost

from .figure import Figure
from .sequence import draw, none

M = 10 ** 6     # what the sources mean by 1M tokens; 2^20 is said where it is meant


# --- chapter 13: the account of a million tokens --------------------------------------------

def gated_mla(c: K3Config) -> Iterator[Figure]:
    chapter, H, L = "13_gated_mla", c.num_attention_heads, c.kv_lora_rank
    repeats, last = divmod(c.num_hidden_layers, 4)
    yield Figure(chapter, "layers in repeats of three KDA and one MLA", "23 x 4 = 92",
                 f"{repeats} x 4 = {c.num_hidden_layers - last}", page="23 × 4 = 92")
    yield Figure(chapter, "width of all queries, 96 x 192", "18,432", f"{H * c.qk_head_dim:,}")
    yield Figure(chapter, "width of the unfolded keys and values, 96 x 256", "24,576",
                 f"{H * (c.qk_nope_head_dim + c.v_head_dim):,}")
    yield Figure(chapter, "width of all outputs, 96 x 128", "12,288", f"{H * c.v_head_dim:,}")
    yield Figure(chapter, "parameters of one layer", "232,196,096", f"{cost.mla_parameters(c):,}")
    yield from million(c, len(c.mla_layers), L + c.qk_rope_head_dim)
    yield from states(c)
    yield Figure(chapter, "layers whose cache grows, less than 93 by", "75%",
                 f"{1 - len(c.mla_layers) / c.num_hidden_layers:.1%}", "corrected",
                 "75% is the share of an exact 3:1; K3 has one MLA layer more", page="74.2%")
    yield Figure(chapter, "Kimi Linear's gain at larger batches, 11.48 ms / 1.84 ms", "6.3",
                 f"{11.48 / 1.84:.2f}", "corrected", "its own two times give 6.24; its report "
                 "calls 6.3 theoretical", page="6.24")


def million(c: K3Config, layers: int, row: int) -> Iterator[Figure]:
    chapter, decimal = "13_gated_mla", "1M is 10^6 tokens, GB is 10^9 bytes, 2 bytes a number"
    bytes_of = lambda numbers, tokens=M: 2 * numbers * tokens
    mha = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
    expanded = c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
    yield Figure(chapter, "numbers a token, 24 layers of MLA", "13,824", f"{layers * row:,}")
    for tokens, quoted, note in ((M, "27.6 GB", decimal),
                                 (2 ** 20, "29.0 GB", "1M is 2^20 tokens, GB is 10^9 bytes")):
        latents = cost.cache_bytes(c, tokens)["MLA latents"]
        yield Figure(chapter, f"their bytes at {tokens:,} tokens", quoted,
                     f"{latents / 1e9:.1f} GB", "with a convention", note)
    yield Figure(chapter, "numbers a token, 61 layers of MLA", "35,136", f"{61 * row:,}")
    yield Figure(chapter, "their bytes at 1M tokens", "70 GB",
                 f"{bytes_of(61 * row) / 1e9:.0f} GB", "with a convention", decimal)
    yield Figure(chapter, "numbers a token, 24 layers of 96 heads of 128 and 128", "589,824",
                 f"{layers * mha:,}", "with a convention", "quoted as 590K")
    yield Figure(chapter, "their bytes at 1M tokens, keys of 128", "1.18 TB",
                 f"{bytes_of(layers * mha) / 1e12:.2f} TB", "with a convention", decimal)
    yield Figure(chapter, "the same with K3's keys of 192", "1.47 TB",
                 f"{bytes_of(layers * expanded) / 1e12:.2f} TB", "with a convention", decimal)
    for name, numbers, quoted in (("128", mha, "43"), ("192", expanded, "53")):
        yield Figure(chapter, f"heads with keys of {name}, over MLA", quoted,
                     f"{numbers / row:.0f}", "rounded", f"{numbers / row:.2f}",
                     page=f"{numbers / row:.1f}")


def states(c: K3Config) -> Iterator[Figure]:
    chapter = "13_gated_mla"
    for size, name, quoted, tokens in ((2, "bfloat16", "232", "8,403"),
                                       (4, "float32", "449", "16,253")):
        parts = cost.cache_bytes(c, 1, state_bytes_per_number=size)
        fixed, a_token = parts["total"] - parts["MLA latents"], parts["MLA latents"]
        note = f"{name} states, 3 inputs a convolution in bfloat16, MB is 10^6 bytes"
        yield Figure(chapter, f"MB of KDA's states and inputs, states in {name}", quoted,
                     f"{fixed / 1e6:.0f}", "with a convention", note, page=f"{quoted} MB")
        yield Figure(chapter, f"tokens of MLA's cache that take as much, {name}", tokens,
                     f"{fixed / a_token:,.0f}", "with a convention", note)
