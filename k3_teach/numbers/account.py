"""Figures of chapters 10, 11, 13, 15, 16 and 17: bills, the optimiser, a million tokens."""

import math
from collections.abc import Iterator

import torch

from k3_teach.config import K3Config
from k3_teach.mxfp4 import BLOCK
from k3_teach.scale import cost, flops
from k3_teach.scale.roofline import CHIPS, attentions, chips_needed, intensity
from k3_teach.speculative import expected_tokens
from k3_teach.toy import FOLDER
from k3_teach.train.muon import newton_schulz

from .figure import Figure
from .sequence import draw

M = 10 ** 6     # what the sources mean by 1M tokens; 2^20 is said where it is meant


# --- chapter 10: cache, compute, time -------------------------------------------------------

def bills(c: K3Config) -> Iterator[Figure]:
    chapter = "10_cost"
    kinds = {a.name: a for a in attentions(c)}
    for name, quoted in (("MHA", "24,576"), ("MLA expanded", "30,720"), ("MFA-like", "49,152"),
                         ("K = V", "98,304")):
        yield Figure(chapter, f"prefill: multiply-adds a pair of tokens, {name}", quoted,
                     f"{kinds[name].prefill_macs:,}")
    for name, quoted, page in (
            ("GQA8", "2048", "8 \\cdot (128 + 128) = 2048"),
            ("MLA absorbed", "576", "MLA absorbed 576"),
            ("MFA-like", "512", "MFA-like 512 49,152"), ("K = V", "512", "K = V 512 98,304")):
        yield Figure(chapter, f"cached numbers a token and layer, {name}", quoted,
                     f"{kinds[name].cached}", page=page)
    mla = kinds["MLA absorbed"]
    yield Figure(chapter, "decode: multiply-adds a cached token, MLA", "104,448",
                 f"{mla.decode_macs:,}", page="96 \\cdot (576 + 512) = 104,448")
    for name, quoted, page in (("MHA", "4.25", "4.25 times the 24,576"),
                               ("MLA expanded", "3.40", "3.40 times its own")):
        yield Figure(chapter, f"that, over {name} in prefill", quoted,
                     f"{mla.decode_macs / kinds[name].prefill_macs:.2f}", "with a convention",
                     f"heads of {kinds[name].key} + {kinds[name].value}; core only, no time", page)
    yield Figure(chapter, "cached numbers, GQA of 8 groups over MLA", "3.56",
                 f"{kinds['GQA8'].cached / mla.cached:.2f}", page="GQA8 / MLA 3.56")
    for tokens, quoted, page in ((1, "181", "181 FLOP per byte, below"),
                                 (2, "363", "with two at 363")):
        yield Figure(chapter, f"FLOP a cached byte, MLA absorbed, query tokens: {tokens}", quoted,
                     f"{intensity(mla, tokens):.0f}", "with a convention", "2 bytes a number", page)
    ridges = {chip.name: chip.ridge for chip in CHIPS}
    for name, quoted, page in (("H100 SXM", "295", "ridge of an H100 of 295"),
                               ("H20", "37", "H20, whose ridge is 37")):
        yield Figure(chapter, f"FLOP a byte at the ridge, {name}", quoted, f"{ridges[name]:.0f}",
                     "with a convention", "dense bfloat16, data sheets", page)
    yield Figure(chapter, "tokens a verification, 7 drafts kept with 0.8 each", "4.16",
                 f"{expected_tokens(0.8, 7):.2f}", "with a convention",
                 "every draft is kept with the same chance, independently",
                 page="4.16 tokens with seven drafts")
    K, drafts = c.linear_attn_config.head_dim, 7
    yield Figure(chapter, "numbers a head, 7 snapshots and 7 inputs", "114,688 and 2,695",
                 f"{drafts * K * K:,} and {drafts * (3 * K + 1):,}", "with a convention",
                 "the inputs are k, v, g and beta", page="2,695 against 114,688")
    parts = cost.cache_bytes(c, 2 ** 20, state_bytes_per_number=2)
    for name, what, quoted, page in (
            ("MLA latents", "MLA's rows", "29.0", "29.0 GB of rows"),
            ("KDA states", "KDA's states in bfloat16", "0.22", "0.22 GB in bfloat16")):
        digits = 1 if quoted == "29.0" else 2
        yield Figure(chapter, f"GB of {what} at 2^20 tokens", quoted,
                     f"{parts[name] / 1e9:.{digits}f}", "with a convention",
                     "GB is 10^9 bytes", page)


# --- chapter 11: the optimiser --------------------------------------------------------------

def optimiser(c: K3Config) -> Iterator[Figure]:
    chapter = "11_design"
    U, V = (torch.linalg.qr(draw(64, 64, seed=seed)).Q for seed in (0, 1))
    values = torch.logspace(0, -3, 64, dtype=torch.float64)
    after = torch.linalg.svdvals(newton_schulz(U * values @ V))
    yield Figure(chapter, "64 singular values from 1 to 0.001 after five steps: the least",
                 "0.21", f"{after.min():.2f}", "with a convention", "Muon's coefficients; K3's "
                 "are not published", page="the smallest of the values is 0.21")
    H, K, d = c.num_attention_heads, c.v_head_dim, c.hidden_size
    yield Figure(chapter, "rms of a per-head update over a whole one, 12,288 x 7168", "1.31",
                 f"{(H * min(K, d) / min(H * K, d)) ** 0.5:.2f}", "with a convention",
                 "all singular values 1, and no factor after it",
                 page="RMS of the per-head update is 1.31 times larger")
    yield Figure(chapter, "bits a weight in MXFP4", "4.25", f"{4 + 8 / BLOCK:g}",
                 page="4 + 8/32 = 4.25")
    expert = 3 * c.expert_width * c.moe_intermediate_size
    yield Figure(chapter, "bytes of a routed expert in MXFP4", "17,547,264",
                 f"{expert // 2 + expert // BLOCK:,}")


# --- chapter 13: the account of a million tokens --------------------------------------------

def gated_mla(c: K3Config) -> Iterator[Figure]:
    chapter, H, L = "13_gated_mla", c.num_attention_heads, c.kv_lora_rank
    repeats, last = divmod(c.num_hidden_layers, 4)
    yield Figure(chapter, "layers in repeats of three KDA and one MLA", "23 x 4 = 92",
                 f"{repeats} x 4 = {c.num_hidden_layers - last}", page="23 × 4 = 92")
    yield Figure(chapter, "width of all queries, 96 x 192", "18,432", f"{H * c.qk_head_dim:,}")
    yield Figure(chapter, "width of the unfolded keys and values, 96 x 256", "24,576",
                 f"{H * (c.qk_nope_head_dim + c.v_head_dim):,}", page="512 → 96 × 256 = 24,576")
    yield Figure(chapter, "width of all outputs, 96 x 128", "12,288", f"{H * c.v_head_dim:,}")
    yield Figure(chapter, "parameters of one layer", "232,196,096", f"{cost.mla_parameters(c):,}")
    yield from million(c, len(c.mla_layers), L + c.qk_rope_head_dim)
    yield from states(c)
    yield Figure(chapter, "layers whose cache grows, less than 93 by", "75%",
                 f"{1 - len(c.mla_layers) / c.num_hidden_layers:.1%}", "corrected",
                 "75% is the share of an exact 3:1; K3 has one MLA layer more",
                 page="74.2% of the rows away")
    yield Figure(chapter, "growing layers, all MLA over K3", "3.875",
                 f"{c.num_hidden_layers / len(c.mla_layers):g}", page="93/24 = 3.875")
    for what, better, worse, quoted, page in (
            ("training, 0:1 to 3:1", 9.23, 9.45, "0.0236", "0.0236 in training"),
            ("validation, 1:1 to 3:1", 5.65, 5.66, "0.0018", "0.0018 nats")):
        yield Figure(chapter, f"Kimi Linear's perplexities as a loss in nats, {what}", quoted,
                     f"{math.log(worse / better):.4f}", "with a convention",
                     f"ln({worse} / {better}) of the reported figures", page)
    yield Figure(chapter, "Kimi Linear's gain at larger batches, 11.48 ms / 1.84 ms", "6.3",
                 f"{11.48 / 1.84:.2f}", "corrected", "its own two times give 6.24; its report "
                 "calls 6.3 theoretical", page="give 6.24;")


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
                 f"{bytes_of(61 * row) / 1e9:.0f} GB", "with a convention", decimal,
                 page="35,136 numbers, 70 GB")
    yield Figure(chapter, "numbers a token, 24 layers of 96 heads of 128 and 128", "590K",
                 f"{layers * mha / 1e3:.0f}K", "rounded", f"{layers * mha:,}",
                 page="590K numbers a token")
    yield Figure(chapter, "their bytes at 1M tokens, keys of 128", "1.18 TB",
                 f"{bytes_of(layers * mha) / 1e12:.2f} TB", "with a convention", decimal)
    yield Figure(chapter, "the same with K3's keys of 192", "1.47 TB",
                 f"{bytes_of(layers * expanded) / 1e12:.2f} TB", "with a convention", decimal)
    for name, numbers, quoted, page in (("128", mha, "43", "43 times smaller (42.7)"),
                                        ("192", expanded, "53", "53 times (53.3)")):
        yield Figure(chapter, f"heads with keys of {name}, over MLA", quoted,
                     f"{numbers / row:.0f}", "rounded", f"{numbers / row:.2f}", page)


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


# --- chapter 15: training a small one -----------------------------------------------------

def training(c: K3Config) -> Iterator[Figure]:
    chapter, toy = "15_train", K3Config.from_json(FOLDER)
    active, small = cost.active_parameters(c), cost.active_parameters(toy)
    yield Figure(chapter, "FLOP for a trillion tokens", "6.3e+23", f"{6 * active * 1e12:.1e}",
                 "with a convention", "6 a token and active parameter; attention is not counted",
                 page=r"6.3 \cdot 10^{23}")
    larger = cost.total_parameters(c) / cost.total_parameters(toy)
    yield Figure(chapter, "how much larger K3 is than the shipped toy", "800,000",
                 f"{round(larger, -5):,.0f}", "rounded", f"{larger:,.0f}",
                 page="some 800,000 times larger")
    yield Figure(chapter, "how much dearer a token of K3 is", "60,000",
                 f"{round(active / small, -4):,.0f}", "rounded", f"{active / small:,.0f}",
                 page="some 60,000 times dearer")


# --- chapter 16: writing text -------------------------------------------------------------

def writing(c: K3Config) -> Iterator[Figure]:
    chapter, bound = "16_generate", -c.linear_attn_config.gate_lower_bound
    yield Figure(chapter, "1 over K3's strongest decay", "148", f"{math.exp(bound):.0f}",
                 page="a factor of 148")
    most = math.log(torch.finfo(torch.float32).max)
    yield Figure(chapter, "such decays whose inverse leaves float32", "18",
                 f"{math.ceil(most / bound)}", page="eighteen of them")
    point, after = (cost.cache_bytes(c, n)["total"] for n in (0, 1))
    yield Figure(chapter, "tokens whose rows weigh as much as a stored point", "16,253",
                 f"{point // (after - point):,}", "with a convention",
                 "states in float32, rows and inputs of the convolutions in bfloat16")
    every = tuple(range(1, c.num_hidden_layers + 1))
    full = c.replace(kda_layers=(), full_attn_layers=every)
    share = cost.cache_bytes(c, 2 ** 20)["total"] / cost.cache_bytes(full, 2 ** 20)["total"]
    yield Figure(chapter, "cache at 2^20 tokens over that of 93 layers of MLA", "a quarter",
                 "a quarter" if round(4 * share) == 1 else f"{share:.2f}", "rounded",
                 f"{share:.3f}", page="about a quarter")


# --- chapter 17: at full size ---------------------------------------------------------------

def full_size(c: K3Config) -> Iterator[Figure]:
    chapter, file = "17_full_scale", cost.checkpoint_bytes(c)
    yield Figure(chapter, "bytes of the released files", "1,560,860,324,864",
                 f"{file['total']:,}")
    yield Figure(chapter, "parameters of the text model, and active ones", "2.78 T and 104.2 B",
                 f"{cost.total_parameters(c) / 1e12:.2f} T and "
                 f"{cost.active_parameters(c) / 1e9:.1f} B")
    experts = file["mxfp4"] + file["scales"]
    yield Figure(chapter, "TB of all routed experts", "1.4465", f"{experts / 1e12:.4f}",
                 page="are 1.4465 TB")
    one = flops.decode_bytes(c, 1, 0)
    weights = one["routed experts"] + one["other weights"]
    for what, number, quoted, page in (
            ("routed experts", one["routed experts"], "25.8", "25.8 GB, are read"),
            ("all weights", weights, "137", "137 GB a token")):
        yield Figure(chapter, f"GB that one token reads, released format, {what}", quoted,
                     f"{number / 1e9:.3g}", page=page)
    yield Figure(chapter, "GB that one token reads in bfloat16", "208",
                 f"{2 * cost.active_parameters(c) / 1e9:.0f}", page="one token reads 208 GB")
    row = cost.cache_bytes(c, 1)["MLA latents"]
    yield Figure(chapter, "tokens whose rows cost as much as reading and writing the states",
                 "32,507", f"{one['KDA states'] / row:,.0f}", "with a convention",
                 "states in float32, rows in bfloat16", "the rows of 32,507 tokens")
    work = 2 * sum(flops.multiply_adds(c, 1, True).values())
    yield Figure(chapter, "FLOP a byte of a batch without end, short contexts", "233",
                 f"{work / (one['KDA states'] + row):.0f}", "with a convention",
                 "states in float32", "at most 233 FLOP per byte")
    chips = {chip.name: chip for chip in CHIPS}
    even = file["total"] * chips["H100 SXM"].ridge / (2 * cost.active_parameters(c))
    yield Figure(chapter, "tokens of a prompt at the ridge of an H100", "2,212", f"{even:,.0f}",
                 "with a convention", "the matrices only; all weights are read once",
                 "A prompt of 2,212 tokens")
    yield Figure(chapter, "accelerators of 80 GB for the weights", "22",
                 f"{chips_needed(chips['H100 SXM'], file['total'])}", "with a convention",
                 "nine tenths of the memory are used", "22 of 80 GB are enough")
    yield Figure(chapter, "TB of training with Muon", "33.4",
                 f"{cost.training_bytes(c)['total'] / 1e12:.1f}", "with a convention",
                 "2 + 2 + 4 + 4 bytes a parameter, no activations",
                 "of 33.4 TB is in training")
