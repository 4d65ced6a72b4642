"""What can a trained model find again? Small models on associative recall and on copying.

    mqar      pairs of a key and a value, then every key once more: which value was its own?
              Guessing is right in 1/VALUES of the cases.
    copying   a string of random symbols, then a mark: the string once more.
              Guessing is right in 1/ALPHABET of the cases.

Every model is a K3 of two layers without experts and with a plain residual, but for its mixers:

    KDA         decays, looks up, corrects: the delta rule
    decay, add  the same layer; it decays and adds without looking up
    add         the same, and nothing decays
    MLA         softmax over all records, no places (NoPE), as in K3
    conv, MLA   NoPE behind a convolution of 4 taps, such as KDA has
    KDA, MLA    one layer of each

Their heads are 16 wide, and 8 in `add, 8`. All get the same width, steps and batches of sizes
TRAINED and are tested on sizes TESTED, of which the largest are new to them. The first of SEEDS
is run at both RATES; the one with the best mean over all sizes, the lower if they are equal,
gets the other seeds, and is reported. Equal are width and feed-forwards, not the parameters of a
mixer (stored). 400 steps, or 200 of copying, are few: who is behind may not have learned it yet,
which is not the same as being unable to hold it. So two models get LONG steps of mqar, too.

    python book/experiments/16_recall.py --output book/experiments/16_recall.json

needs about 15 minutes on one core. Each run is kept in 16_recall.jsonl as it ends, so that a
second call goes on where the first was stopped.
"""

import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import k3_teach as k3
from k3_teach.notebook.experiment import command
from k3_teach.parts.kda_layer import ShortConv
from k3_teach.train.recall import copying, mqar, share_right

WIDTH, HEADS, INNER = 64, 2, 128
KEYS, VALUES, ALPHABET = 64, 16, 16
MODELS = {"KDA": ("kda", "kda", 16), "decay, add": ("decay", "decay", 16),
          "add": ("add", "add", 16), "MLA": ("mla", "mla", 16),
          "conv, MLA": ("conv", "conv", 16), "KDA, MLA": ("kda", "mla", 16),
          "add, 8": ("add", "add", 8)}          # two layers, and the width of a head
TASKS = {"mqar": list(MODELS), "copying": list(MODELS)[:6]}
TRAINED = {"mqar": [4, 8, 16, 32], "copying": list(range(4, 17))}
TESTED = (4, 8, 16, 32, 64)                     # pairs, or symbols of the string
RATES, SEEDS = (0.01, 0.02), (0, 1, 2)
STEPS, LONG, ROWS, TEST_ROWS = {"mqar": 400, "copying": 200}, 1200, 64, 256
SETTINGS = {
    "width": WIDTH, "heads": HEADS, "inner width": INNER, "keys": KEYS, "values": VALUES,
    "alphabet": ALPHABET, "models": MODELS, "trained": TRAINED, "tested": TESTED,
    "rates": RATES, "seeds": SEEDS, "steps": STEPS, "long": LONG, "rows": ROWS,
    "test rows": TEST_ROWS, "precision": "float32",
    "optimizer": "AdamW, betas 0.9 and 0.95, decay 0.01, clip 1; 50 steps up, then to a tenth"}
TINY = 2.0 ** -20


class DecayAdd(k3.KDA):
    """KDA without the look-up: S <- Diag(e^g) S + beta k v^T.

    By the delta rule itself: with values 2^20 times as large and strengths 2^20 times as small,
    what is looked up is a millionth of what is written, and the factors change no bit.
    """

    def forward(self, x, state=None, mask=None, trace=None):
        layers = ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d),
                  (self.v_proj, self.v_conv1d))
        q, k, v = (self.heads(conv(proj(x))[0]) for proj, conv in layers)
        q, k = k3.l2_normalize(q) * self.head_dim ** -0.5, k3.l2_normalize(k)
        beta = torch.sigmoid(self.b_proj(x))
        o, _ = k3.chunk_kda(q, k, v / TINY, self.log_decay(x), beta * TINY,
                            gate_lower_bound=self.gate_lower_bound)
        return self.o_proj(self.o_norm(o, self.output_gate(x)).flatten(2))


class Add(DecayAdd):
    """Linear attention with a write strength: S <- S + beta k v^T."""

    def log_decay(self, x):
        return torch.zeros_like(super().log_decay(x))


class ConvMLA(nn.Module):
    """Attention that sees the last four tokens at once."""

    def __init__(self, mla):
        super().__init__()
        self.mla, self.conv1d = mla, ShortConv(WIDTH, 4)

    def forward(self, x, state=None, mask=None, trace=None):
        return self.mla(x + self.conv1d(x)[0])


def build(name: str, seed: int) -> k3.K3Model:
    """ids [B,T] -> logits [B,T,vocab]: one of MODELS; the vocabulary serves both tasks."""
    *kinds, head = MODELS[name]
    softmax = [i for i, kind in enumerate(kinds, 1) if kind in ("mla", "conv")]
    config = k3.K3Config.toy(
        vocab_size=KEYS + VALUES, hidden_size=WIDTH, intermediate_size=INNER,
        num_hidden_layers=2, num_experts=0, attn_res_block_size=None,
        initializer_range=WIDTH ** -0.5,
        num_attention_heads=HEADS, kv_lora_rank=WIDTH // 2, q_lora_rank=None,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
        linear_attn_config=k3.LinearAttnConfig(
            tuple({1, 2} - set(softmax)), tuple(softmax), HEADS, head,
            gate_lower_bound=-5.0, use_full_rank_gate=True))
    torch.manual_seed(seed)
    net = k3.K3Model(config)
    for kind, layer in zip(kinds, net.layers):
        if kind in ("decay", "add"):
            layer.self_attn = (Add if kind == "add" else DecayAdd)(WIDTH, HEADS, head)
        if kind == "conv":
            layer.self_attn = ConvMLA(layer.self_attn)
    k3.init_parameters(net, std=config.initializer_range)
    return net


def batch(task: str, size: int, rows: int, g: torch.Generator):
    """ids and targets [rows, T] with `size` pairs, all asked for, or of a string so long."""
    if task == "mqar":
        return mqar(rows, size, size, KEYS, VALUES, g)
    return copying(rows, size, ALPHABET, g)


@torch.no_grad()
def right(net, task: str, seed: int) -> list[float]:
    """The share of right answers at each of the sizes TESTED, on new texts."""
    found = []
    for size in TESTED:
        ids, y = batch(task, size, TEST_ROWS, torch.Generator().manual_seed(10_000 + seed))
        found.append(round(share_right(net(ids), y), 4))
    return found


def train(name: str, task: str, rate: float, seed: int, steps: int) -> k3.K3Model:
    """A trained model; the learning rate rises for 50 steps, then falls to a tenth."""
    net, g = build(name, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
    sizes = TRAINED[task]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        size = sizes[torch.randint(len(sizes), (), generator=g).item()]
        ids, y = batch(task, size, ROWS, g)
        loss = F.cross_entropy(net(ids).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net


def parameters(name: str) -> int:
    """Those that a gradient reaches: `add` has no use for its decay."""
    net = build(name, 0)
    net(torch.arange(8)[None]).sum().backward()
    return sum(w.numel() for w in net.parameters() if w.grad is not None and w.grad.any())


def short() -> dict:
    """{model: right at TESTED}: softmax and a state on copying, a few seconds of training each.

    The rate and the second seed of the stored runs: these are two of them.
    """
    run = {"task": "copying", "rate": 0.02, "seed": 1}
    return {name: right(train(name, **run, steps=STEPS["copying"]), run["task"], run["seed"])
            for name in ("conv, MLA", "KDA")}


class Kept:
    """Results of runs, each a line of a file as soon as it is there; other settings start anew."""

    def __init__(self, path: Path):
        first = json.dumps(SETTINGS)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.path, same = path, lines[:1] == [first]
        self.rows = [json.loads(line) for line in lines[1:]] if same else []
        if not same:
            path.write_text(first + "\n", encoding="utf-8")

    def right(self, **run) -> list[float]:
        """What that run gave, from the file or made now."""
        for row in self.rows:
            if run.items() <= row.items():
                return row["right"]
        row = run | {"right": right(train(**run), run["task"], run["seed"])}
        print(row, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row["right"]


def run() -> dict:
    """Of each task and model: what every rate gave, the rate chosen, and what the seeds gave.

    `long`: two of them on mqar, three times as many steps, the first seed.
    """
    path = Path(__file__).with_suffix(".jsonl")
    kept, results = Kept(path), {}
    for task, names in TASKS.items():
        results[task] = {}
        for name in names:
            a_run = partial(kept.right, name=name, task=task, steps=STEPS[task])
            tried = [a_run(rate=rate, seed=SEEDS[0]) for rate in RATES]
            best = max(range(len(RATES)), key=lambda i: sum(tried[i]))
            rows = [a_run(rate=RATES[best], seed=seed) for seed in SEEDS]
            results[task][name] = {"tried": tried, "best": best, "right": rows}
    long = {name: [kept.right(name=name, task="mqar", steps=LONG, rate=rate, seed=SEEDS[0])
                   for rate in RATES] for name in ("KDA", "add")}
    sizes = {name: parameters(name) for name in MODELS}
    path.unlink()
    return {"settings": SETTINGS, "parameters": sizes, "results": results,
            "long": long}


if __name__ == "__main__":
    command(run, __doc__)
