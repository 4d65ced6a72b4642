"""Attention Residuals: before each sub-layer, a token looks back over its own depth and chooses what to read.

    k_i = u_i / rms(u_i)                a key for every depth source u_i              (Kimi K3 report, section 2.2;
    a   = softmax_i(q . k_i)            one learned query q for each read               arXiv 2603.15031)
    h   = sum_i a_i u_i                 the sources themselves are mixed, not their keys

Full: every earlier sub-layer output is a source. Block: outputs are summed into blocks of layers; the sources are the
embedding, the finished blocks, and the running sum of the unfinished one. All of it happens within one token, so nothing
is kept for decoding.
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError
from k3_teach.parts.norm import rms_normalize
from k3_teach.parts.precision import upcast


def attn_res(sources: Tensor, query: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """One depth read. sources [n, ..., d], query [d] -> mixture [..., d], weights [n, ...] in float32.

    No 1/sqrt(d) and no temperature: the query is free to grow. In the released parameters, query = norm weight * projection.
    """
    u = upcast(sources)
    a = torch.softmax(rms_normalize(u, eps) @ upcast(query), 0)
    return torch.einsum("n...,n...d->...d", a, u).to(sources.dtype), a


def read_sealed(sealed: Tensor, queries: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Phase 1 of the two-phase form: all P queries of a block against its n finished sources, which are read once.

    sealed [n, ..., d], queries [P, d] -> mixtures [P, ..., d], and the log of each softmax's denominator [P, ...].
    """
    u = upcast(sealed)
    scores = torch.einsum("n...d,pd->pn...", rms_normalize(u, eps), upcast(queries))
    return torch.einsum("pn...,n...d->p...d", scores.softmax(1), u), scores.logsumexp(1)


def merge_live(mixture: Tensor, log_sum: Tensor, live: Tensor, query: Tensor, eps: float = 1e-5) -> Tensor:
    """Phase 2, for one read: let the running sum `live` join the softmax. Exact: a softmax over two things is a sigmoid.

    mixture [..., d] and log_sum [...] of phase 1, live [..., d], query [d] -> [..., d].
    """
    u = upcast(live)
    share = torch.sigmoid(rms_normalize(u, eps) @ upcast(query) - log_sum)
    return torch.lerp(mixture, u, share[..., None]).to(live.dtype)


# --- the residual stream as an object ------------------------------------------------------------------------------

class PlainStream:
    """The ordinary residual: one running sum, which is also what every read returns."""

    def __init__(self, x: Tensor):
        self.prefix = x
        self.num_sealed = 0

    def read(self, query: Tensor | None = None, trace: dict | None = None, name: str = "") -> Tensor:
        """[..., d], the running sum."""
        return self.prefix

    def add(self, y: Tensor) -> None:
        """Add a sub-layer's output to the running sum."""
        self.prefix = self.prefix + y

    def seal(self) -> None:
        """Nothing to do: a plain residual has no blocks."""


class BlockStream:
    """Block Attention Residuals. `prefix` is the running sum of the current block, `sealed` the finished sources.

    In K3 `seal` is called at layers 0, 12, ..., 84: first the read, then the seal, then the mixer. The first seal keeps the
    embedding, which from then on is a source like any other and no longer part of a sum. With a seal before every sub-layer
    this is Full Attention Residuals.
    """

    def __init__(self, x: Tensor, eps: float = 1e-5):
        self.prefix: Tensor | None = x
        self.sealed: list[Tensor] = []
        self.eps = eps

    @property
    def num_sealed(self) -> int:
        return len(self.sealed)

    def read(self, query: Tensor, trace: dict | None = None, name: str = "") -> Tensor:
        """Mix the sealed sources, oldest first, and the live sum last. query [d] -> [..., d]."""
        sources = self.sealed + ([] if self.prefix is None else [self.prefix])
        if len(sources) == 1:                       # layer 0: a softmax over one source is 1
            mixture, weights = sources[0], torch.ones_like(upcast(sources[0][..., 0]))[None]
        else:
            mixture, weights = attn_res(torch.stack(sources), query, self.eps)
        if trace is not None:
            trace[name] = weights.movedim(0, -1)    # [..., n]
        return mixture

    def add(self, y: Tensor) -> None:
        """Add a sub-layer's output to the running sum, or begin a new sum with it."""
        self.prefix = y if self.prefix is None else self.prefix + y

    def seal(self) -> None:
        """Keep the running sum as a source, write-once, and begin a new block."""
        if self.prefix is None:
            raise InputError("seal() was called twice without an add() between: there is no running sum to keep")
        self.sealed.append(self.prefix)
        self.prefix = None
