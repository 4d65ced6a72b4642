"""Figures of the chapters on the width and depth of the network, and of the whole."""

import math
from collections.abc import Iterator

import torch

from k3_teach.config import K3Config
from k3_teach.parts.attn_res import BlockStream
from k3_teach.parts.attn_res import attn_res as mix
from k3_teach.parts.norm import rms_normalize
from k3_teach.parts.situ import glu, situ_glu, softcap, swiglu
from k3_teach.scale import cost

from .figure import Figure, column

# --- chapters 00 and 01: what is counted ------------------------------------------------

def whole(c: K3Config) -> Iterator[Figure]:
    chapter, L = "00_map", c.num_hidden_layers
    mla = [layer + 1 for layer in c.mla_layers]
    kda, moe = L - len(mla), sum(map(c.is_moe, range(L)))
    yield Figure(chapter, "KDA and MLA layers", "69 + 24", f"{kda} + {len(mla)}",
                 page="93 - 24 = 69")
    yield Figure(chapter, "MLA layers, counted from 1", "4, 8, ..., 92 and 93",
                 f"{mla[0]}, {mla[1]}, ..., {mla[-2]} and {mla[-1]}",
                 "with a convention", "counted from 0 they are 3, 7, ..., 91 and 92",
                 page="4, 8, ..., 92 are MLA, and so is the last, 93")
    yield Figure(chapter, "MoE and dense feed-forwards", "92 + 1", f"{moe} + {L - moe}",
                 page="1 + 92 = 93")


def layer(c: K3Config) -> Iterator[Figure]:
    chapter, L, size = "01_layer", c.num_hidden_layers, c.attn_res_block_size
    full, last = divmod(L, size)
    yield Figure(chapter, "AttnRes blocks", "93 = 7 x 12 + 9",
                 f"{L} = {full} x {size} + {last}", page="93 = 7 × 12 + 9")
    yield Figure(chapter, "sub-layers", "186", f"{2 * L}", page="186 sub-layers")
    yield Figure(chapter, "depth reads with a choice", "185 + 1", f"{2 * L - 1} + 1",
                 "with a convention",
                 "the first sub-layer sees the embedding alone; the + 1 is before the head",
                 page="185 + 1 reads with a choice")
    experts = sum(map(c.is_moe, range(L))) * c.num_experts
    yield Figure(chapter, "routed experts in all layers", "82,432", f"{experts:,}",
                 page="82,432 routed experts")
    rows = {row.name: row for row in cost.components(c)}
    for name, quoted in (("KDA mixers", "443.7M"), ("MLA mixers", "232.2M"),
                         ("dense feed-forward", "726.7M")):
        one = name.removesuffix("s")
        yield Figure(chapter, f"parameters of one {one}", quoted,
                     f"{rows[name].each / 1e6:.1f}M", page=f"{one} {quoted[:-1]}")
    moe = sum(row.each for name, row in rows.items() if name.startswith("MoE"))
    yield Figure(chapter, "parameters of one MoE sub-layer", "29.78B",
                 f"{moe / 1e9:.2f}B", page="29.78 billion weights")


# --- chapter 02: few experts per token ---------------------------------------------------

def moe(c: K3Config) -> Iterator[Figure]:
    chapter, scores = "02_moe", column(0.9, 0.6)
    yield Figure(chapter, "scores 0.9 and 0.6 as weights", "0.6, 0.4",
                 ", ".join(f"{p:.1f}" for p in scores / scores.sum()),
                 "with a convention", "divided by the sum over the chosen; no bias",
                 page="[0.6 0.4]")
    shared = 3 * c.hidden_size * c.num_shared_experts * c.moe_intermediate_size
    yield Figure(chapter, "shared experts of a layer, parameters", "132,120,576",
                 f"{shared:,}", "with a convention", "two, stored as one of inner width "
                 f"{c.num_shared_experts * c.moe_intermediate_size}",
                 page="shared 132.1 132.1")
    yield Figure(chapter, "experts over chosen experts", "56",
                 f"{c.num_experts / c.num_experts_per_token:.0f}", page="896/16 = 56")
    for n, k, quoted in ((448, 8, "16.6"), (896, 16, "33.9")):
        yield Figure(chapter, f"sets of {k} out of {n}, as a power of ten", quoted,
                     f"{math.log10(math.comb(n, k)):.1f}", page=f"10^{quoted}")


# --- chapter 03: attention over depth -----------------------------------------------------

def attn_res(c: K3Config) -> Iterator[Figure]:
    chapter = "03_attn_res"
    u = torch.stack([column(1, -1), column(7, 1), column(10, 10)])
    h, a = mix(u, column(math.log(3) / 0.4, 0), eps=0.0)
    yield Figure(chapter, "weights of (1, -1), (7, 1), (10, 10) for q = (ln 3 / 0.4, 0)",
                 "0.2, 0.6, 0.2", ", ".join(f"{x:.1f}" for x in a),
                 page="weights [0.2 0.6 0.2]")
    yield Figure(chapter, "0.2 u0 + 0.6 u1 + 0.2 u2 of these", "6.4, 2.4",
                 ", ".join(f"{x:.1f}" for x in h), page="read [6.4 2.4]")
    stream = BlockStream(torch.zeros(1))
    for index in range(c.num_hidden_layers):
        if index % c.attn_res_block_size == 0:
            stream.seal()
        stream.add(torch.zeros(1))
    yield Figure(chapter, "sources of the last read", "9", f"{stream.num_sealed + 1}",
                 note="the embedding, seven blocks of 12, the live sum of 9",
                 page="The last read has 9 sources")
    reads = sum(row.total for row in cost.components(c) if "AttnRes" in row.name)
    yield Figure(chapter, "parameters of all depth reads", "2,680,832",
                 f"{reads + 2 * c.hidden_size:,}",
                 note="a query and a gain of width d for 186 reads and the last one")
    equal = (1.870 * 5.6 ** -0.058 / 1.891) ** (-1 / 0.057) / 5.6
    yield Figure(chapter, "compute for the same loss at 5.6 PFLOP/s-days", "1.25",
                 f"{equal:.2f}", "with a convention",
                 "from the fits 1.891 C^-0.057 and 1.870 C^-0.058 of arXiv 2603.15031",
                 page="1.254")
    stored = 8 * 131_072 * c.hidden_size * 2 / 1e9
    yield Figure(chapter, "8 blocks of 131,072 tokens in bfloat16, GB", "15",
                 f"{stored:.0f}", note=f"{stored:.2f} GB; one of 8 ranks holds an eighth",
                 page="15 GB")


# --- chapter 04: inside an expert ---------------------------------------------------------

def situ(c: K3Config) -> Iterator[Figure]:
    chapter, b = "04_situ", column(3.0)
    table = {-2.0: "0.358, -0.715, -0.658", 0.0: "1.500, 0.000, 0.000",
             2.0: "2.642, 5.285, 4.861", 8.0: "2.999, 23.992, 11.509"}
    for a, quoted in table.items():
        values = [float(f(column(a), b)) for f in (glu, swiglu, situ_glu)]
        yield Figure(chapter, f"GLU, SwiGLU and SiTU-GLU at a = {a:g}, b = 3", quoted,
                     ", ".join(f"{v:.3f}" for v in values), page=quoted.replace(",", ""))
    two = column(2.0)
    yield Figure(chapter, "sigmoid(2) and 2 sigmoid(2)", "0.881, 1.762",
                 f"{float(two.sigmoid()):.3f}, {float(two * two.sigmoid()):.3f}",
                 page="0.881 = 1.762")
    forty = column(40.0)
    yield Figure(chapter, "a = b = 40, SwiGLU and SiTU-GLU", "1600, 92.17",
                 f"{float(swiglu(forty, forty)):.0f}, {float(situ_glu(forty, forty)):.2f}",
                 page="92.17")
    v = column(4, 12).requires_grad_()
    slope, = torch.autograd.grad(softcap(v, 4.0).sum(), v)
    clip, = torch.autograd.grad(v.clamp(-3, 3).sum(), v)
    yield Figure(chapter, "slope of the softcap with bound 4, at 4 and at 12", "0.42, 0.01",
                 ", ".join(f"{x:.2f}" for x in slope), note="sech^2(v / 4)",
                 page="0.42 at the bound, 0.01 at three times the bound")
    yield Figure(chapter, "slope of a clip beyond its bound", "0", f"{clip.max():.0f}",
                 page="Past the bound its slope is exactly 0")
    a = torch.linspace(-400, 400, 800_001, dtype=torch.float64)
    gate = softcap(a, c.activation_situ_beta) * a.sigmoid()
    value = softcap(a, c.activation_situ_linear_beta)
    yield Figure(chapter, "bounds of gate, value and product", "4, 25, 100",
                 f"{gate.max():.0f}, {value.max():.0f}, {gate.max() * value.max():.0f}",
                 "with a convention",
                 "strict for real numbers; in floating point the bound itself is reached",
                 page="product z between -100 and 100")
    yield Figure(chapter, "lowest value of the gates, SiLU and SiTU", "-0.278, -0.270",
                 f"{(a * a.sigmoid()).min():.3f}, {gate.min():.3f}", page="SiTU to $-0.270$")


# --- chapter 05: experts at half width ----------------------------------------------------

def latent_moe(c: K3Config) -> Iterator[Figure]:
    chapter, d, l, m = ("05_latent_moe", c.hidden_size, c.expert_width,
                        c.moe_intermediate_size)
    yield Figure(chapter, "model width, latent width, inner width", "7168, 3584, 3072",
                 f"{d}, {l}, {m}",
                 page="not work on a token's 7168 features")
    k, full, half = c.num_experts_per_token, 3 * d * m, 3 * l * m
    yield Figure(chapter, "an expert at full width, 3dm", "66,060,288", f"{full:,}")
    yield Figure(chapter, "an expert at half width, 3(d/2)m", "33,030,144", f"{half:,}")
    for what, few, many, quoted in (("touched", 8 * full, k * half, "528,482,304"),
                                    ("held", 448 * full, 896 * half, "29,595,009,024")):
        assert few == many
        yield Figure(chapter, f"routed matrices {what}: 448 choose 8 at full width, "
                     "896 choose 16 at half", quoted, f"{many:,}")
    added, shared = 2 * d * l, c.num_shared_experts * full
    yield Figure(chapter, "the two projections", "51.4M", f"{added / 1e6:.1f}M",
                 page="two projections 51,380,224")
    yield Figure(chapter, "the two projections, of the routed matrices", "9.72%",
                 f"{added / (k * half):.2%}", "with a convention",
                 "of the 16 chosen experts alone; the shared experts are left out",
                 page="projections / routed 9.72%")
    yield Figure(chapter, "the two projections, with the shared experts counted", "7.78%",
                 f"{added / (k * half + shared):.2%}",
                 page="projections / routed + shared 7.78%")
    u = column(0.3, -1.7)
    gap = (rms_normalize(u, 0.0) - rms_normalize(3 * u, 0.0)).abs().max()
    yield Figure(chapter, "RMSNorm(u) against RMSNorm(3u), largest difference", "0",
                 f"{gap:.0f}" if gap > 1e-15 else "0", "with a convention",
                 "without eps; with 1e-5 the two differ by about 1e-6",
                 page="$u$ and $3u$ land on the same point")


# --- chapter 14: the whole ----------------------------------------------------------------

def totals(c: K3Config) -> Iterator[Figure]:
    chapter = "14_assemble"
    yield Figure(chapter, "parameters", "2,779,484,476,000", f"{cost.total_parameters(c):,}")
    yield Figure(chapter, "parameters that a token uses", "104,189,612,640",
                 f"{cost.active_parameters(c):,}", "with a convention",
                 "the head is counted, the embedding lookup is not")
    yield Figure(chapter, "bytes of the released file", "1,560,860,324,864",
                 f"{cost.checkpoint_bytes(c)['total']:,}")
