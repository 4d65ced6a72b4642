"""Four ways to share a cache of 16 numbers a token, fitted to teachers that cache 64.

    python book/experiments/07_share.py --output book/experiments/07_share.json

A teacher is one attention layer with 4 heads of 8 and random weights, on tokens of 32
features. What its keys and values read of a token makes four kinds of teacher:

    all    everything
    one    16 directions, the same for keys and values of all heads
    two    8 directions for all keys, 8 others for all values
    own    2 directions of its own for every head's keys, and 2 for its values

Students have 4 heads and cache 16 numbers: 4, 2 or 1 sets of keys and values, or a latent
(heads 8 wide; without the norm of the latent; 4 wide, so that there are fewer parameters
than with MQA; both). Each is trained for 300 steps of Adam at three step sizes, from 3
seeds; three of them again for 1500 steps at the smallest, and MLA at half of it, too,
to see what is still being learned. Stored is the share of the teacher's output, in mean
squares, that is missed on fresh tokens, [step sizes][seeds]. A toy: it proves nothing
about K3. One core needs nine minutes.
"""

import torch
from torch import nn

import k3_teach as k3
from k3_teach.notebook.experiment import command

D, H, HEAD, CACHED, BATCH, LENGTH, TESTED = 32, 4, 8, 16, 16, 12, 256
STEPS, RATES, SEEDS = 300, (0.02, 0.05, 0.1), (0, 1, 2)
TEACHERS = ("all", "one", "two", "own")
STUDENTS = ("MHA", "GQA", "MQA", "MLA", "MLA no norm", "MLA narrow", "MLA both")
LONG = 1500
LONG_RATES = {"MQA": (0.02,), "MLA": (0.01, 0.02), "MLA no norm": (0.02,)}


def student(kind: str) -> nn.Module:
    if kind in ("MHA", "GQA", "MQA"):
        G = {"MHA": 4, "GQA": 2, "MQA": 1}[kind]
        return k3.GroupedQueryAttention(D, H, G, CACHED // (2 * G))
    width = HEAD // 2 if kind in ("MLA narrow", "MLA both") else HEAD
    mla = k3.MLA(D, H, CACHED, width, 0, width, output_gate=False)
    if kind in ("MLA no norm", "MLA both"):
        mla.kv_a_layernorm = nn.Identity()
    return mla


def teacher(kind: str, seed: int) -> nn.Module:
    g = torch.Generator().manual_seed(seed)
    layer = k3.GroupedQueryAttention(D, H, H, HEAD).requires_grad_(False)
    basis = torch.linalg.qr(torch.randn(D, D, generator=g))[0]
    for w in layer.parameters():
        w.copy_(torch.randn(w.shape, generator=g) * w.shape[1] ** -0.5)
    layer.q_proj.weight.mul_(3)
    kv = layer.kv_proj.weight.view(2, H, HEAD, D)
    for i in range(2):
        for h in range(H):
            first, many = {"all": (0, D), "one": (0, 16), "two": (8 * i, 8),
                           "own": (8 * i + 2 * h, 2)}[kind]
            seen = basis[:, first:first + many]
            kv[i, h] = (D / many) ** 0.5 * kv[i, h] @ seen @ seen.T
    return layer


def fit(kind: str, what: str, seed: int, rate: float, steps: int = STEPS) -> float:
    """The share of the teacher's output that the trained student misses."""
    right, g = teacher(what, seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layer = student(kind)
    optimizer = torch.optim.Adam(layer.parameters(), rate)
    for step in range(steps):
        x = torch.randn(BATCH, LENGTH, D, generator=g)
        loss = (layer(x) - right(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.step()
    x = torch.randn(TESTED, LENGTH, D, generator=g)
    with torch.no_grad():
        y = right(x)
        return ((layer(x) - y).square().mean() / y.square().mean()).item()


def missed(kind: str, rates: tuple, steps: int) -> dict:
    """Of each teacher: [step sizes][seeds]."""
    return {what: [[round(fit(kind, what, seed, rate, steps), 3) for seed in SEEDS]
                   for rate in rates] for what in TEACHERS}


def run() -> dict:
    """What was run; parameters of each student; [step sizes][seeds] of each pair."""
    torch.set_default_dtype(torch.float64)
    count = lambda kind: sum(w.numel() for w in student(kind).parameters())
    return {"width": D, "heads": H, "cached": CACHED, "teacher_cached": 2 * H * HEAD,
            "steps": STEPS, "batch": BATCH, "length": LENGTH, "tested": TESTED,
            "rates": RATES, "seeds": SEEDS,
            "parameters": {kind: count(kind) for kind in STUDENTS},
            "missed": {kind: missed(kind, RATES, STEPS) for kind in STUDENTS},
            "long_steps": LONG, "long_rates": LONG_RATES,
            "long_missed": {kind: missed(kind, rates, LONG)
                            for kind, rates in LONG_RATES.items()}}


if __name__ == "__main__":
    command(run, __doc__)
