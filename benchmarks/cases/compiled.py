"""The whole model as it is, and through `torch.compile`.

What the compiler itself takes, about a minute and a half here, is not in the times.
"""

import shutil
from collections.abc import Callable, Iterator

import torch

from benchmarks.case import Case
from k3_teach.config import K3Config
from k3_teach.model import K3Model, next_token_loss

OURS, COMPILED = "as it is", "compiled"


def cases(quick: bool) -> Iterator[Case]:
    """Four layers, three of them KDA, three with experts."""
    config = K3Config.toy(num_hidden_layers=4, kda_layers=(1, 2, 3), full_attn_layers=(4,))
    torch.manual_seed(0)
    model = K3Model(config).eval()
    why = missing(quick)
    fast = model if why else torch.compile(model, fullgraph=True)
    ids = torch.randint(config.vocab_size, (1, 32) if quick else (4, 128))
    for what, one in (("Forward and backward", training), ("Prefill", prefill),
                      ("One token", token)):
        contenders = {OURS: one(model, ids)} | ({} if why else {COMPILED: one(fast, ids)})
        yield Case("torch.compile, toy of 4 layers", f"{what}, B {len(ids)}, T {ids.shape[1]}",
                   contenders, OURS, tolerance=1e-3, not_run={COMPILED: why} if why else {},
                   seconds=3)


def missing(quick: bool) -> str:
    """Why the compiler is not tried; empty if it is."""
    if quick:
        return "compiling takes longer than a quick run may"
    return "" if shutil.which("c++") or shutil.which("g++") else "no C++ compiler"


def training(model: Callable, ids: torch.Tensor) -> Callable:
    def call():
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        return loss.detach()

    return call


def prefill(model: Callable, ids: torch.Tensor) -> Callable:
    return lambda: _without_gradient(model, ids)


def token(model: Callable, ids: torch.Tensor) -> Callable:
    """The last token after all before it, again and again from the same state."""
    owner = getattr(model, "_orig_mod", model)
    cache = owner.new_cache(len(ids))
    owner(ids[:, :-1], cache=cache)
    before = cache.snapshot()

    def call():
        cache.rollback(before)
        return _without_gradient(model, ids[:, -1:], cache=cache)

    return call


@torch.no_grad()
def _without_gradient(model: Callable, ids: torch.Tensor, **options) -> torch.Tensor:
    return model(ids, **options)
