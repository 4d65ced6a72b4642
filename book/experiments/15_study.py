"""What do K3's mechanisms give in a small model? The same text, tokens and active parameters.

The base has 8 layers 64 wide, each with 16 experts of which a token uses 4: KDA three times,
MLA once, twice over; Attention Residuals over blocks of 4 layers, quantile balancing,
Per-Head Muon. Each variant changes one thing:

    GPT             a plain Transformer: RoPE, SwiGLU, no experts; all its parameters are active
    no AttnRes      the plain residual
    no MLA gate     MLA's latent is wider instead
    no balancing    the routers' biases stay 0
    sign balancing  each bias moves by a fixed step, against the load of its expert
    1:1, 7:1        one or seven KDA layers to each MLA layer
    all KDA         no MLA layer
    all MLA         no KDA layer; nothing tells positions but the causal mask
    all MLA, RoPE   the same, its shared part of the key rotated
    AdamW           instead of Muon

Active parameters (with the head, without the embedding) differ by less than 1 % ("sizes" in the
result). The text is Python's manual and docstrings, as this Python has them; a tenth of it is for
validation. The peaks of the learning rate of the base and of the GPT are each the best of one
list in runs of a quarter of the steps with a seed of their own ("sweep"); AdamW's is the best of
the same list in runs of all steps: in a quarter, four of the five rates had not got beyond how
often each token is. The other variants take the base's. A seed sets weights and batches, so
variants see the same batches. A toy: it proves nothing about K3.

    python book/experiments/15_study.py --output book/experiments/15_study.json

takes about 75 minutes on one core. It can be stopped (Ctrl-C) and started again: runs that are in
the file are kept. Chapter 15 reads the result, and repeats the first steps of a run with `short`.
"""

import argparse
import json
import os
import platform
import statistics
import time
from functools import cache
from pathlib import Path

import torch

import k3_teach as k3
from k3_teach.errors import TrainingError
from k3_teach.scale.cost import active_parameters, total_parameters
from k3_teach.train.gpt import active, gpt_like
from k3_teach.train.loop import Recipe, Trainer
from k3_teach.train.text import BPE, Data, corpus

CORPUS, VOCAB = "library", 512
WIDTH, HEADS, LAYERS, EXPERTS, CHOSEN, BLOCK = 64, 4, 8, 16, 4, 4
STEPS, ROWS, LENGTH, POINTS, WARMUP = 600, 8, 128, 10, 0.05
RATES, TRIED, SEEDS = (0.0025, 0.005, 0.01, 0.02, 0.04), (100,), (0, 1, 2)
BASE = "K3 3:1"
ALL = tuple(range(1, LAYERS + 1))
VARIANTS = {        # changes of the configuration and of the recipe
    BASE: ({}, {}),
    "GPT": (None, {}),
    "no AttnRes": ({"attn_res_block_size": None}, {}),
    "no MLA gate": ({"mla_use_output_gate": False, "kv_lora_rank": 57}, {}),
    "no balancing": ({}, {"balance": "none"}),
    "sign balancing": ({}, {"balance": "sign"}),
    "1:1": ({"full_attn_layers": (2, 4, 6, 8)}, {}),
    "7:1": ({"full_attn_layers": (8,)}, {}),
    "all KDA": ({"full_attn_layers": ()}, {}),
    "all MLA": ({"full_attn_layers": ALL}, {}),
    "all MLA, RoPE": ({"full_attn_layers": ALL, "mla_use_nope": False}, {}),
    "AdamW": ({}, {"optimiser": "adamw"}),
}
# Those with a learning rate of their own, and in which part of the steps it is looked for.
TUNED = {BASE: 4, "GPT": 4, "AdamW": 1}
SETTINGS = {"corpus": CORPUS, "vocabulary": VOCAB, "width": WIDTH, "heads": HEADS,
            "layers": LAYERS, "experts": EXPERTS, "chosen": CHOSEN, "block": BLOCK,
            "steps": STEPS, "rows": ROWS, "length": LENGTH, "points": POINTS,
            "warmup": WARMUP, "rates": RATES, "seeds_tried": TRIED, "tuned": TUNED,
            "precision": "float32",
            "recipe": {name: getattr(Recipe(STEPS), name) for name in (
                "weight_decay", "last_lr", "clip", "qk_clip", "per_head")}}


# --- one run --------------------------------------------------------------------------

def config(full_attn_layers=(4, 8), **changes) -> k3.K3Config:
    """The base with `changes`. KDA and MLA have about the same number of parameters."""
    sizes = dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_heads=HEADS,
        num_attention_heads=HEADS, kv_lora_rank=36, num_experts=EXPERTS,
        num_experts_per_token=CHOSEN, num_shared_experts=1, first_k_dense_replace=0,
        attn_res_block_size=BLOCK, full_attn_layers=tuple(full_attn_layers),
        kda_layers=tuple(i for i in ALL if i not in full_attn_layers))
    return k3.K3Config.toy(**sizes | changes)


def make_model(variant: str, seed: int):
    torch.manual_seed(seed)
    changes, _ = VARIANTS[variant]
    return gpt_like(config()) if changes is None else k3.K3Model(config(**changes))


def sizes(variant: str) -> dict[str, int]:
    """Parameters that a token uses, and all, the embedding among them."""
    changes, _ = VARIANTS[variant]
    if changes is None:
        gpt = make_model(variant, 0)
        return {"active": active(gpt), "total": sum(p.numel() for p in gpt.parameters())}
    c = config(**changes)
    return {"active": active_parameters(c), "total": total_parameters(c)}


@cache
def data() -> Data:
    text = corpus(CORPUS)
    return Data(text, BPE.train(text, VOCAB))


def trainer(variant: str, seed: int, rate: float, steps: int) -> Trainer:
    _, changes = VARIANTS[variant]
    recipe = Recipe(steps, rows=ROWS, length=LENGTH, lr=rate, warmup=WARMUP, seed=seed, **changes)
    return Trainer(make_model(variant, seed), data(), recipe)


def means(values: list[float], number: int) -> list[float]:
    """Of `number` equal parts, in their order."""
    n = len(values) // number
    return [round(statistics.fmean(values[i * n:(i + 1) * n]), 4) for i in range(number)]


def train(variant: str, seed: int, rate: float, steps: int) -> dict:
    """One run. `validation` is in nats a byte; curves are means of POINTS equal parts of the
    steps, of the loss in training (nats a token) and of MaxVio (mean over layers)."""
    start, run = time.process_time(), trainer(variant, seed, rate, steps)
    rows = list(run.run())
    per_token = run.validation_loss()
    out = {"validation": round(per_token / data().bytes_per_token, 5),
           "validation_per_token": round(per_token, 4), "rate": rate,
           "losses": [round(row["loss"], 4) for row in rows[:20]],
           "curve": means([row["loss"] for row in rows], POINTS)}
    if run.balancer.routers:
        out["max_vio"] = means([row["max_vio"] for row in rows], POINTS)
    return out | {"seconds": round(time.process_time() - start, 1)}


def tried(variant: str, rate: float) -> float | None:
    """Validation loss of a run of the sweep; None if it broke off."""
    try:
        return train(variant, TRIED[0], rate, STEPS // TUNED[variant])["validation"]
    except TrainingError:
        return None


def best(stored: dict, variant: str) -> float:
    """The learning rate for a variant: its own best one if it is TUNED, else the base's."""
    found = stored["sweep"][variant if variant in TUNED else BASE]
    return float(min((rate for rate in found if found[rate]), key=found.get))


# --- all of them ----------------------------------------------------------------------

def empty() -> dict:
    """The result before the first run."""
    text = {"python": platform.python_version(), "tokens": len(data().train),
            "validation tokens": len(data().validation),
            "bytes per token": round(data().bytes_per_token, 4)}
    return json.loads(json.dumps({
        "settings": SETTINGS, "text": text, "sizes": {name: sizes(name) for name in VARIANTS},
        "sweep": {name: {} for name in TUNED}, "runs": {name: {} for name in VARIANTS}}))


def load(path: Path | None) -> dict:
    """What is stored at `path`, to be continued. SystemExit for what other settings gave."""
    fresh = empty()
    if path is None or not path.exists():
        return fresh
    stored = json.loads(path.read_text(encoding="utf-8"))
    for part in ("settings", "text", "sizes"):
        if stored.get(part) != fresh[part]:
            raise SystemExit(f"{path} was begun with other {part}; give another --output, or "
                             "remove the file")
    return stored


def save(stored: dict, path: Path | None) -> None:
    """Whole or not at all: written beside, then renamed."""
    if path is not None:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(stored, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(beside, path)


def run(path: Path | None = None, only=tuple(VARIANTS), seeds=SEEDS) -> dict:
    """The sweep, then every variant for one seed, for the next, and so on; what `path` holds
    is not run again, and what is new is kept there at once."""
    stored = load(path)

    def keep(where: dict, key, found) -> None:
        where[str(key)] = found
        save(stored, path)

    for variant in dict.fromkeys(name if name in TUNED else BASE for name in only):
        for rate in RATES:
            if str(rate) not in stored["sweep"][variant]:
                keep(stored["sweep"][variant], rate, tried(variant, rate))
                print("sweep", variant, rate, stored["sweep"][variant][str(rate)], flush=True)
    for seed in seeds:
        for variant in only:
            if str(seed) not in stored["runs"][variant]:
                found = train(variant, seed, best(stored, variant), STEPS)
                keep(stored["runs"][variant], seed, found)
                print(variant, seed, found["validation"], found["seconds"], "s", flush=True)
    return stored


# --- for the chapter ------------------------------------------------------------------

def summary(stored: dict) -> dict[str, dict]:
    """By variant: mean and standard deviation over seeds of the loss in nats a byte, and of its
    difference from the base, seed by seed."""
    loss = {name: {seed: found["validation"] for seed, found in runs.items()}
            for name, runs in stored["runs"].items() if runs}
    out = {}
    for name, found in loss.items():
        apart = [found[seed] - loss[BASE][seed] for seed in found if seed in loss[BASE]]
        out[name] = {key: function(values) if len(values) >= least else None
                     for key, values, function, least in (
                         ("mean", list(found.values()), statistics.fmean, 1),
                         ("spread", list(found.values()), statistics.stdev, 2),
                         ("difference", apart, statistics.fmean, 1),
                         ("spread of difference", apart, statistics.stdev, 2))}
    return out


def short(stored: dict, variant: str = BASE, seed: int = 0, steps: int = 20) -> list[float]:
    """The first losses of a stored run once more, in a few seconds (float32 as default dtype)."""
    again = trainer(variant, seed, best(stored, variant), STEPS)
    return [row["loss"] for row in again.run(steps)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS),
                        metavar="VARIANT", help="these variants")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="these seeds")
    given = parser.parse_args(arguments)
    if not given.output.parent.is_dir():
        parser.error(f"{given.output.parent} is not a folder")
    torch.set_num_threads(1)
    try:
        run(given.output, given.only, given.seeds)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; the same command goes on from {given.output}") from None


if __name__ == "__main__":
    main()
