"""Figures of chapters 07 to 09: sharing heads, a state that is corrected, rotations."""

import math
from collections.abc import Iterator

import torch

from k3_teach.config import K3Config
from k3_teach.parts.attention import causal_mask
from k3_teach.parts.kda import chunk_kda, recurrent_kda
from k3_teach.parts.mla import expand, mla_absorbed, mla_expanded
from k3_teach.parts.rope import apply_rope, rope_angles
from k3_teach.scale import cost

from .figure import Figure, column


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def none(difference: torch.Tensor) -> str:
    """The largest entry: "0" if it is rounding."""
    gap = difference.abs().max()
    return "0" if gap < 1e-12 else f"{gap:.1e}"


# --- chapter 07: what attention keeps -------------------------------------------------------

def attention(c: K3Config) -> Iterator[Figure]:
    chapter, H = "07_attention_cache", c.num_attention_heads
    K, V, latent = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank + c.qk_rope_head_dim
    yield Figure(chapter, "numbers a token and layer, 96 heads with keys and values of 128",
                 "24,576", f"{H * (K + V):,}", "with a convention", "K3's keys are 192 wide",
                 page="96 × (128 + 128) = 24,576")
    yield Figure(chapter, "the same with K3's keys of 192", "30,720",
                 f"{H * (c.qk_head_dim + V):,}", page="96 × (192 + 128) = 30,720")
    yield Figure(chapter, "the same, 8 heads of keys and values", "2048", f"{8 * (K + V)}",
                 page="8 × (128 + 128) = 2048")
    yield Figure(chapter, "the same, over MLA", "3.6", f"{8 * (K + V) / latent:.1f}",
                 page="caches 3.6 times as much as MLA")
    yield Figure(chapter, "numbers of MLA", "576", f"{latent}", page="512 + 64 = 576")
    up = column(1, 0, 0, 1).view(2, 1, 2)   # two heads, each reads one coordinate of c
    keys, _ = expand(column(1, 2).view(1, 1, 2), torch.cat((up, up), 1), 1)
    yield Figure(chapter, "keys of two heads, made from c = (1, 2)", "1 and 2",
                 f"{keys[0, 0].item():g} and {keys[0, 1].item():g}", page="$K_1 = 1$ and $K_2 = 2$")
    q, cache, kv_b = draw(2, 3, 4, 6), draw(2, 7, 7, seed=1), draw(3, 7, 5, seed=2)
    forms = [form(q, cache, kv_b, 3, 0.4, causal_mask(4, 7)[None, None])
             for form in (mla_expanded, mla_absorbed)]
    yield Figure(chapter, "expanded less absorbed", "0", none(forms[0] - forms[1]),
                 page="expanded = absorbed")


# --- chapter 08: a state that is corrected --------------------------------------------------

def kda(c: K3Config) -> Iterator[Figure]:
    chapter, a = "08_kda_hybrid", c.linear_attn_config
    one, none_lost = column(1, 1).view(1, 2, 1, 1), torch.zeros(1, 2, 1, 1).double()
    values = column(1, 3).view(1, 2, 1, 1)
    o, _ = recurrent_kda(one, one, values, none_lost, one[..., 0])
    yield Figure(chapter, "read after writing 1, then 3 under one key: delta, addition",
                 "3 and 4", f"{o[0, -1].item():g} and {values.sum().item():g}",
                 page="1 + (3 - 1) = 3")
    q, k, v = draw(1, 40, 2, 8), draw(1, 40, 2, 8, seed=1) / 3, draw(1, 40, 2, 6, seed=2)
    g, beta = -5 * draw(1, 40, 2, 8, seed=3).sigmoid(), draw(1, 40, 2, seed=4).sigmoid()
    both = [form(q, k, v, g, beta)[0] for form in (recurrent_kda, chunk_kda)]
    yield Figure(chapter, "recurrence less chunks", "0", none(both[0] - both[1]),
                 page="compares `chunk_kda` with `recurrent_kda`")
    yield Figure(chapter, "the least a channel keeps in a step, e^-5", "0.0067",
                 f"{math.exp(a.gate_lower_bound):.4f}", page="e^{-5} = 0.0067")
    yield Figure(chapter, "the most that 16 tokens of such decay are divided by, e^80",
                 "5.5e34", f"{math.exp(-16 * a.gate_lower_bound):.1e}".replace("+", ""),
                 page="e^80 = 5.5e34")
    mla = len(c.mla_layers)
    yield Figure(chapter, "KDA and MLA layers", "69 and 24",
                 f"{c.num_hidden_layers - mla} and {mla}", page="69 KDA, 24 MLA")
    state = len(a.kda_layers) * a.num_heads * a.head_dim ** 2
    yield Figure(chapter, "numbers in all states", "108,527,616", f"{state:,}",
                 page="numbers in all states 108,527,616")
    yield Figure(chapter, "decays of a layer and token", "12,288",
                 f"{a.num_heads * a.head_dim:,}", page="12,288 factors")
    yield from crossing(c)


def crossing(c: K3Config) -> Iterator[Figure]:
    a, latent = c.linear_attn_config, c.kv_lora_rank + c.qk_rope_head_dim
    for b, quoted, verdict, note, page in (
            (2, "2731", "agrees", "2730.67", "that is 2731 tokens"),
            (4, "5461", "rounded", "5461.33: the first whole token is 5462",
             "in round figures 5461")):
        tokens = a.num_heads * a.head_dim ** 2 * b / (2 * latent)
        yield Figure("08_kda_hybrid", "tokens from which the hybrid's cache is smaller, states "
                     f"of {b} bytes a number", quoted, f"{tokens:.0f}", verdict, note, page)
    parts = cost.cache_bytes(c, 1, state_bytes_per_number=2)
    fixed = parts["total"] - parts["MLA latents"]
    yield Figure("08_kda_hybrid", "the same with the convolutions' inputs, 2 bytes", "2923",
                 f"{fixed / (2 * latent * len(a.kda_layers)):.0f}", page="is 2923 and 5654")


# --- chapter 09: where order comes from -----------------------------------------------------

def order(c: K3Config) -> Iterator[Figure]:
    chapter, sixth = "09_rope_nope", math.radians(30)
    turned = apply_rope(column(1, 0).expand(3, 2), sixth * torch.arange(3)[:, None])
    scores = (turned @ turned.mT)[2].flip(0)
    yield Figure(chapter, "equal vectors, 30 degrees a token: scores at distance 0, 1, 2",
                 "1, 0.866, 0.5", ", ".join(f"{s:.3g}" for s in scores.tolist()),
                 "with a convention", "before the division by the root of the width",
                 page="\\cos 30° = 0.866")
    q, k, angles = draw(9, 8), draw(9, 8, seed=1), rope_angles(torch.arange(9), 8)
    turn = lambda x, a: apply_rope(x, a.expand(9, -1))
    there = (turn(q, angles[5]) * turn(k, angles[3])).sum(-1)
    apart = (q * turn(k, angles[3] - angles[5])).sum(-1)
    yield Figure(chapter, "score of turned vectors less score at their distance", "0",
                 none(there - apart), page="R(m)^\\top R(n) = R(n - m)")
    after = lambda *xs: 0 if not xs else after(*xs[:-1]) / 2 + xs[-1]
    yield Figure(chapter, "AB and BA", "5 and 4", f"{after(2, 4):g} and {after(4, 2):g}",
                 "with a convention", "h <- h/2 + x from h = 0, with A = 2 and B = 4: the "
                 "source prints no recursion", page="h/2 + x, A = 2, B = 4 AB: 0 2 5")
    u = draw(6) / draw(6).norm()
    mirror = torch.eye(6) - 2 * torch.outer(u, u)
    yield Figure(chapter, "H^T H less I, for a reflection H = I - 2 u u^T", "0",
                 none(mirror.mT @ mirror - torch.eye(6)), page="H = I - 2 u u^\\top")
    yield Figure(chapter, "scale of K3's scores, 1/sqrt(192)", "0.0722",
                 f"{c.qk_head_dim ** -0.5:.4f}", page="1/\\sqrt{192}$ is 0.0722")
    needle = [math.exp(8) / (math.exp(8) + (n - 1) * math.exp(0.5)) for n in (64, 512, 4096, 32768)]
    yield Figure(chapter, "weight of a needle of logit 8 among normal draws, 64 to 32,768 tokens",
                 "0.97, 0.78, 0.31, 0.05", ", ".join(f"{a:.2f}" for a in needle),
                 "with a convention", "the mean of e^x over normal draws is e^(1/2)",
                 page="0.97, 0.78, 0.31 and 0.05")
    at = rope_angles(torch.arange(200), 64).cos().mean(-1)
    yield Figure(chapter, "steps, of 199, at which the score of equal vectors rises", "82",
                 f"{int((at.diff() > 0).sum())}", "with a convention",
                 "width 64, base 10,000, the same length in every plane", page="82 of 199")
