"""Which kinds of layers can tell order, and at which lengths? Small models, trained.

Two tasks over sequences of random symbols:

    first   two marks, A and B, stand somewhere among fillers; which came first?
            One answer, at the last token. Guessing is right in 1/2 of the cases.
    back    at every token: which symbol stood BACK tokens earlier?
            Guessing is right in 1/SYMBOLS of the cases.

Every model is a stack of blocks of one width (mixer, then feed-forward, each with a
norm before it), trained at LENGTH tokens and tested there and at 2, 4 and 8 times as
many, in float32. All get the same steps and batches, four learning rates, and five seeds
at each; reported is the rate with the best mean at the length of training, the lowest if
several are equal. RoPE has a base of 100 or, in the models named "10k", of 10,000. Equal
are width and feed-forwards; a KDA layer has more parameters than an attention layer
(stored too).

    python book/experiments/09_order.py --output book/experiments/09_order.json

takes about twelve minutes on one core. A toy: it proves nothing about K3.
"""

import torch
import torch.nn.functional as F
from torch import nn

import k3_teach as k3
from k3_teach.notebook.experiment import command

WIDTH, HEADS, HEAD, INNER = 32, 2, 16, 48
SYMBOLS, BACK, LENGTH = 8, 5, 16
TIMES, RATES, SEEDS, STEPS = (1, 2, 4, 8), (0.0015, 0.003, 0.01, 0.02), 5, 300
BATCH, ROWS = 32, 256            # sequences in a step, in a test
MODELS = {"NoPE": ["nope"], "NoPE, NoPE": ["nope", "nope"],
          "RoPE": ["rope"], "RoPE, RoPE": ["rope", "rope"],
          "KDA, NoPE": ["kda", "nope"], "KDA, RoPE": ["kda", "rope"],
          "RoPE 10k": ["rope 10k"], "RoPE, RoPE 10k": ["rope 10k", "rope 10k"],
          "KDA, RoPE 10k": ["kda", "rope 10k"]}
BASES = {"nope": None, "rope": 100.0, "rope 10k": 10_000.0}
TASKS = ("first", "back")


def mixer(kind: str) -> nn.Module:
    """One mixer: attention without or with rotation, or KDA."""
    if kind == "kda":
        return k3.KDA(WIDTH, HEADS, HEAD)
    return k3.GroupedQueryAttention(WIDTH, HEADS, HEADS, HEAD, BASES[kind])


class Small(nn.Module):
    """ids [B,T] -> logits [B,T,SYMBOLS + 3]: blocks of the kinds that are named."""

    def __init__(self, kinds: list[str]):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS + 3, WIDTH)
        norm = lambda: k3.RMSNorm(WIDTH, 1e-5)
        self.blocks = nn.ModuleList(
            nn.ModuleList([norm(), mixer(kind), norm(),
                           k3.GatedMLP(WIDTH, INNER, k3.Activation("silu"))])
            for kind in kinds)
        self.norm, self.head = norm(), nn.Linear(WIDTH, SYMBOLS + 3, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, mix, norm2, ffn in self.blocks:
            x = x + mix(norm(x))
            x = x + ffn(norm2(x))
        return self.head(self.norm(x))


def batch(task: str, g: torch.Generator, rows: int, T: int):
    """ids [rows, T] and targets [rows, T], -100 where nothing is asked."""
    ids = torch.randint(SYMBOLS, (rows, T), generator=g)
    y = torch.full((rows, T), -100)
    if task == "back":
        y[:, BACK:] = ids[:, :-BACK]
        return ids, y
    places = torch.rand(rows, T - 1, generator=g).topk(2, dim=1).indices
    for mark in (0, 1):                                 # the marks, A and B
        ids.scatter_(1, places[:, [mark]], SYMBOLS + mark)
    ids[:, -1] = SYMBOLS + 2                            # the question
    y[:, -1] = (places[:, 0] > places[:, 1]).long()     # 0: A came first
    return ids, y


def right(net, task: str, T: int, seed: int, rows: int = ROWS) -> float:
    """Share of right answers at T tokens."""
    ids, y = batch(task, torch.Generator().manual_seed(10_000 + seed), rows, T)
    with torch.no_grad():
        logits = net(ids)[..., :2] if task == "first" else net(ids)
    asked = y != -100
    return (logits.argmax(-1)[asked] == y[asked]).double().mean().item()


def train(kinds: list[str], task: str, rate: float, seed: int, steps: int = STEPS,
          rows: int = BATCH):
    """A trained Small; the learning rate rises for 30 steps, then falls to 0."""
    torch.manual_seed(seed)
    net, g = Small(kinds), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), rate)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min((step + 1) / 30, (steps - step) / steps)
        ids, y = batch(task, g, rows, LENGTH)
        logits = net(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
    return net


def study(task: str, kinds: list[str]) -> dict:
    """All rates and seeds of one model and task: [rates][seeds][lengths]."""
    found = [[[right(net, task, LENGTH * n, seed) for n in TIMES]
              for seed in range(SEEDS) for net in [train(kinds, task, rate, seed)]]
             for rate in RATES]
    mean = lambda runs: sum(run[0] for run in runs) / len(runs)
    best = max(range(len(RATES)), key=lambda i: mean(found[i]))
    return {"best": best, "right": [[[round(x, 4) for x in run] for run in runs]
                                    for runs in found]}


def run() -> dict:
    """What was run, and for each task and model all rates, seeds and lengths."""
    count = lambda kinds: sum(w.numel() for w in Small(kinds).parameters())
    return {"lengths": [LENGTH * n for n in TIMES], "rates": list(RATES), "back": BACK,
            "symbols": SYMBOLS, "steps": STEPS, "batch": BATCH, "bases": BASES,
            "precision": str(torch.get_default_dtype()).removeprefix("torch."),
            "seeds": list(range(SEEDS)), "width": WIDTH, "heads": HEADS,
            "head width": HEAD, "inner width": INNER, "rows in a test": ROWS,
            "parameters": {name: count(kinds) for name, kinds in MODELS.items()},
            "tasks": {task: {name: study(task, kinds)
                             for name, kinds in MODELS.items()} for task in TASKS}}


if __name__ == "__main__":
    command(run, __doc__)
