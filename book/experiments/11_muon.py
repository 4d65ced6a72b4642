"""AdamW, Muon, and Muon by heads on a small model of the package: which learns to copy?

A sequence is 12 random tokens of 16, twice; the loss counts the second time only, where
every token can be known. The model has one KDA and one MLA layer, dense feed-forwards, and
a plain residual. The rate rises over 1% of 200 steps, as K3's does, or over 10%. For each
of the two, five learning rates are tried for each optimiser on seeds 0 to 2; the best of
each is then run on the fresh seeds 3 to 7. A seed sets weights and data, so all optimisers
see the same.

    python book/experiments/11_muon.py --output book/experiments/11_muon.json

takes about ten minutes on one core. Chapter 11 reads the result, and runs `train` for a
few seconds.
"""

import math
import statistics

import torch

import k3_teach as k3
from k3_teach.notebook.experiment import command
from k3_teach.train.muon import Muon

STEPS, ROWS, LENGTH, TOKENS = 200, 16, 12, 16
RATES = (0.0015, 0.003, 0.006, 0.012, 0.024)
WARM_UPS = {"1%": 0.01, "10%": 0.1}         # parts of the steps
TRIED, FRESH = (0, 1, 2), (3, 4, 5, 6, 7)   # seeds
OPTIMISERS = ("AdamW", "Muon", "by heads", "Muon on all")
BY_HEAD = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_b_proj.weight")
KEYS_AND_VALUES = "kv_b_proj.weight"        # a head's K and V rows in turn: 2 H blocks
NOT_MUON = ("embed_tokens.weight", "lm_head.weight")


def make_model(seed):
    torch.manual_seed(seed)
    return k3.K3Model(k3.K3Config.toy(
        num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,), num_experts=0,
        vocab_size=TOKENS, intermediate_size=128, attn_res_block_size=None)).float()


def make_optimisers(model, name, rate):
    """A list of optimisers that together have every parameter once."""
    named = dict(model.named_parameters())
    skip = () if name == "Muon on all" else NOT_MUON
    muon = {n for n, p in named.items() if p.ndim == 2 and not n.endswith(skip)}
    if name == "AdamW":
        muon = set()
    by_heads = name == "by heads"
    heads = {n for n in muon if by_heads and n.endswith(BY_HEAD)}
    pairs = {n for n in muon if by_heads and n.endswith(KEYS_AND_VALUES)}
    some = lambda names: [named[n] for n in named if n in names]
    out = [torch.optim.AdamW(some(named.keys() - muon), lr=rate, betas=(0.9, 0.95),
                             weight_decay=0.1)]
    H = model.config.num_attention_heads
    for names, num_heads in ((muon - heads - pairs, None), (heads, H), (pairs, 2 * H)):
        if names:
            out.append(Muon(some(names), lr=rate, momentum=0.95, weight_decay=0.1,
                            num_heads=num_heads))
    return out


def copy_loss(model, generator):
    first = torch.randint(TOKENS, (ROWS, LENGTH), generator=generator)
    ids = torch.cat((first, first), 1)                            # [B, T]
    known = model(ids)[:, LENGTH - 1:-1]                          # predicts the second half
    return torch.nn.functional.cross_entropy(known.flatten(0, 1), first.flatten())


def train(name, rate, seed, warm_up=0.01, steps=STEPS):
    """Losses of the first `steps` of STEPS steps. The rate rises over a part `warm_up` of
    them, and falls on a cosine."""
    model = make_model(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    optimisers, losses = make_optimisers(model, name, rate), []
    for step in range(steps):
        warm = min(1.0, (step + 1) / (warm_up * STEPS))
        factor = warm * (1 + math.cos(math.pi * step / STEPS)) / 2
        loss = copy_loss(model, generator)
        loss.backward()
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def last(losses):
    """Mean of the last 20 steps; diverged runs count as the loss of guessing."""
    mean = statistics.fmean(losses[-20:])
    return mean if math.isfinite(mean) else math.log(TOKENS)


def study(name, warm_up):
    """One optimiser: losses for every rate, and those of the best on fresh seeds."""
    tried = {r: [last(train(name, r, seed, warm_up)) for seed in TRIED] for r in RATES}
    best = min(RATES, key=lambda r: statistics.fmean(tried[r]))
    curves = [train(name, best, seed, warm_up) for seed in FRESH]
    return {"tried": {str(r): [round(x, 4) for x in v] for r, v in tried.items()},
            "best": best, "fresh": [round(last(c), 4) for c in curves],
            "curves": [[round(x, 3) for x in c[9::10]] for c in curves]}


def run():
    torch.set_default_dtype(torch.float32)
    return {"steps": STEPS, "rows": ROWS, "length": LENGTH, "tokens": TOKENS,
            "rates": RATES, "seeds_tried": TRIED, "seeds_fresh": FRESH,
            "warm_up": {part: {name: study(name, value) for name in OPTIMISERS}
                        for part, value in WARM_UPS.items()}}


if __name__ == "__main__":
    command(run, __doc__)
