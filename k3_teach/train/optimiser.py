"""Which parameter is trained by what, and how fast.

    matrices of the layers        Muon; queries, keys and values head by head
    embedding and head            AdamW with weight decay
    gains, biases, convolutions,  AdamW without: decay would pull a gain of 1 towards 0,
    decays, depth queries         and a decay of the state is no weight
    biases of the routers         neither: the balancer sets them between steps

    (Muon for matrices, AdamW for the rest: Moonlight, arXiv 2502.16982. Per-Head Muon,
    weight decay 0.1, cosine with 1 % of warm-up: Kimi K3 report, sections 2.5 and 3.3.)

What K3 does with its small parameters is not published; the last two lines but one are
this project's choice.
"""

import math

import torch
from torch import nn

from k3_teach.errors import InputError
from k3_teach.parts.balancer import is_router
from k3_teach.parts.mla import MLA
from k3_teach.train.muon import Muon

BY_HEADS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")  # rows are heads


def blocks_of_heads(module: nn.Module, name: str) -> int | None:
    """Into how many blocks of rows Per-Head Muon parts the matrix `name` of a mixer.

    None: it is one matrix. `kv_b_proj` has a head's key and value in turn: where both
    are equally wide, they are parted, too.
    """
    heads = getattr(module, "num_heads", None)
    if heads is None or name not in BY_HEADS:
        return None
    apart = name == "kv_b_proj" and module.nope_dim == module.v_dim
    return 2 * heads if apart else heads


def parameter_groups(model: nn.Module, per_head: bool = True
                     ) -> tuple[list[dict], list[dict]]:
    """The groups for Muon and for AdamW: two lists of {"params": ...}.

    Any model of this package's parts whose head is called `lm_head`. A tied head is the
    embedding. Every parameter that is trained is in one group.
    """
    heads, rest = _by_blocks(model, per_head), {"matrix": [], "vector": []}
    muon: dict[int | None, list] = {}
    for name, p in model.named_parameters():
        kind = _kind(model, name, p)
        if kind == "muon":
            muon.setdefault(heads.get(p), []).append(p)
        elif kind != "router bias":
            rest[kind].append(p)
    by_muon = [{"params": ps, "num_heads": n} for n, ps in muon.items()]
    by_adamw = [{"params": rest["matrix"]}, {"params": rest["vector"], "weight_decay": 0.0}]
    return by_muon, [group for group in by_adamw if group["params"]]


def _by_blocks(model: nn.Module, per_head: bool) -> dict[nn.Parameter, int]:
    """Matrix -> its number of blocks, for those that are parted."""
    found = {}
    for module in model.modules():
        for name, child in module.named_children():
            if per_head and (n := blocks_of_heads(module, name)) is not None:
                found[child.weight] = n
    return found


def _kind(model: nn.Module, name: str, p: nn.Parameter) -> str:
    """"muon", "matrix", "vector" or "router bias"."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if is_router(owner) and p is owner.e_score_correction_bias:
        return "router bias"
    if isinstance(owner, nn.Embedding) or name.startswith("lm_head."):
        return "matrix"
    # A depth read's query is stored as a matrix [1, d], a convolution as [P, 1, W].
    if p.ndim < 2 or 1 in p.shape[-2:]:
        return "vector"
    return "muon"


def make_optimisers(model: nn.Module, kind: str = "muon", per_head: bool = True,
                    weight_decay: float = 0.1) -> dict[str, torch.optim.Optimizer]:
    """"muon": {"muon": Muon, "adamw": AdamW}; "adamw": {"adamw": AdamW for everything}.

    AdamW as language models use it: betas 0.9 and 0.95. Learning rates are set before
    every step. InputError for another name.
    """
    if kind not in ("muon", "adamw"):
        raise InputError(f"optimiser is {kind!r}; it must be 'muon' or 'adamw'")
    by_muon, by_adamw = parameter_groups(model, per_head)
    if kind == "adamw":
        matrices = [{"params": group["params"]} for group in by_muon]
        by_muon, by_adamw = [], matrices + by_adamw
    options = dict(betas=(0.9, 0.95), weight_decay=weight_decay)
    made = {"adamw": torch.optim.AdamW(by_adamw, **options)}
    return {"muon": Muon(by_muon, weight_decay=weight_decay)} | made if by_muon else made


def learning_rate(step: int, steps: int, peak: float, warmup: float = 0.01,
                  last: float = 0.1) -> float:
    """Up in a line, down in half a cosine: the rate of step 0, 1, ..., steps - 1.

    peak min(1, (step + 1) / w), and from w on  last peak + (1 - last) peak (1 + cos) / 2,
    where w = warmup * steps, at least 1 step. (Cosine, 1 % of warm-up: Kimi K3 report,
    section 3.3; where it ends, `last`, is not published.)
    """
    warm = max(1, round(warmup * steps))
    if step < warm:
        return peak * (step + 1) / warm
    turn = math.pi * (step - warm + 1) / max(1, steps - warm)
    return peak * (last + (1 - last) * (1 + math.cos(turn)) / 2)


def mla_layers(model: nn.Module) -> dict[str, MLA]:
    """The layers that QK-Clip watches, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MLA)}
