"""Where the time goes: seconds and bytes of weights, by part of the model, pass by pass.

Parts are nested (a layer runs its experts, which read their weights), and time belongs to
the innermost one that is running.
"""

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from k3_teach.config import K3Config

READING, REST = "reading and decoding", "depth reads and norms"
PARTS = (       # what a tensor's or a module's name contains, and which part it is
    (".shared_experts", "shared experts"), (".experts", "routed experts"),
    (".routed_expert_", "latent projections"), (".gate.", "router"),
    (".mlp.", "dense feed-forward"), ("embed_tokens", "embedding"), ("lm_head", "output head"))


def part_of(name: str, c: K3Config) -> str:
    """The part that a tensor belongs to: "layers.3.self_attn.q_proj.weight" -> "MLA mixers"."""
    if ".self_attn." in name:
        layer = int(name.partition("layers.")[2].partition(".")[0])
        return "KDA mixers" if c.is_kda(layer) else "MLA mixers"
    return next((part for text, part in PARTS if text in name), REST)


@dataclass
class Pass:
    """One forward pass over `tokens` tokens, behind `cached` ones.

    seconds, nbytes: by part. layer_seconds, memory: by layer, from `first_layer` on.
    """

    tokens: int
    cached: int
    first_layer: int = 0        # above 0: the rest of a pass that was interrupted
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    nbytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    layer_seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)     # anonymous bytes after each layer

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())


class Clock:
    """Passes so far; `now` is the one that runs."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"
        self.passes: list[Pass] = []
        self.now = Pass(0, 0)                   # before the first pass
        self.running, self.since = [], 0.0

    @contextmanager
    def forward_pass(self, tokens: int, cached: int):
        """A new pass, which is kept if it ends, in whatever way."""
        self.now, self.running = Pass(tokens, cached), []
        try:
            with self.part(REST):
                yield
        finally:
            self.passes.append(self.now)

    @contextmanager
    def part(self, name: str):
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        self._charge()
        self.running.append(name)

    def leave(self) -> None:
        self._charge()
        self.running.pop()

    def _charge(self) -> None:
        """The time since the last change belongs to what has been running."""
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.running:
            self.now.seconds[self.running[-1]] += now - self.since
        self.since = now

    def layer(self, memory: int) -> None:
        """A layer has run, and the process then holds so much."""
        self._charge()
        self.now.layer_seconds.append(self.now.total_seconds - sum(self.now.layer_seconds))
        self.now.memory.append(memory)

    def watch(self, module: nn.Module, part: str) -> None:
        """Count the calls of `module` to `part`."""
        module.register_forward_pre_hook(lambda *_: self.enter(part))
        module.register_forward_hook(lambda *_: self.leave(), always_call=True)
