"""How to train: every choice of a run, with its default.

The values are for toys; those of K3 that are published are its optimiser, its weight decay
and the form of its schedule (report, sections 2.5 and 3.3).
"""

import math
from dataclasses import dataclass, field
from numbers import Integral, Real

from k3_teach.errors import InputError, shown


def option(default, what: str):
    """A field of a recipe; `what` is its line in the help of the command."""
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class Recipe:
    """How to train. InputError for values that describe no run."""

    steps: int
    rows: int = option(16, "pieces of text in a batch, over all processes")
    length: int = option(128, "tokens in a piece")
    lr: float = option(4e-3, "largest learning rate")
    optimiser: str = option("muon", "muon (AdamW for what is no matrix), or adamw")
    per_head: bool = option(True, "Muon on queries, keys and values head by head")
    weight_decay: float = option(0.1, "of matrices, embedding and head")
    warmup: float = option(0.01, "share of the steps in which the rate goes up")
    last_lr: float = option(0.1, "where the rate ends, as a share of the largest")
    clip: float = option(1.0, "longest gradient, over all parameters")
    qk_clip: float | None = option(100.0, "largest attention logit, or off")
    balance: str = option("quantile", "of the experts: quantile, sign or none")
    autocast: bool = option(False, "matrix products in bfloat16")
    seed: int = option(0, "of the batches (and, in the command, of the weights)")
    validate_every: int = option(0, "steps between two validations; 0: never")
    save_every: int = option(100, "steps between two checkpoints; 0: at the end only")

    def __post_init__(self):
        least = dict(steps=1, rows=1, length=2, validate_every=0, save_every=0, seed=0)
        for name, low in least.items():
            self._must(name, Integral, lambda x: x >= low, f"an integer of at least {low}")
        for name in ("lr", "clip", *["qk_clip"] * (self.qk_clip is not None)):
            self._must(name, Real, lambda x: 0 < x < math.inf, "above 0, and finite")
        for name in ("warmup", "last_lr", "weight_decay"):
            self._must(name, Real, lambda x: 0 <= x <= 1, "from 0 to 1")

        for name in ("per_head", "autocast"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {shown(getattr(self, name))}; it must be true or "
                                 "false")

    def _must(self, name: str, kind, good, allowed: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not good(value):
            raise InputError(f"{name} is {shown(value)}; it must be {allowed}")
