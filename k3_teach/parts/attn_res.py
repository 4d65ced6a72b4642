"""Attention Residuals: before each sub-layer, a token looks back over its own depth.

    k_i = u_i / rms(u_i)        a key for every depth source u_i
    a   = softmax_i(q . k_i)    one learned query q for each read
    h   = sum_i a_i u_i         the sources themselves are mixed, not their keys
                                (Kimi K3 report, section 2.2; arXiv 2603.15031)

Full: the embedding and every earlier sub-layer output are sources. Block: outputs are
summed into blocks of layers; the sources are the embedding, the finished blocks, and
the live sum of the unfinished one. All of it happens within one token, so nothing
is kept for decoding.

Shapes: n sources, d model width; "..." is whatever lies between, such as [B, T].
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError
from k3_teach.parts.norm import rms_normalize
from k3_teach.parts.precision import upcast


def attn_res(sources: Tensor, query: Tensor, eps: float = 1e-5
             ) -> tuple[Tensor, Tensor]:
    """One depth read (arXiv 2603.15031): the mixture h, and the weights a in float32.

    sources [n, ..., d], query [d] -> [..., d], [n, ...]. There is no 1/sqrt(d) and no
    temperature: the query is free to grow. The release stores it as two factors, the
    gain of the norm of the keys and a projection: (gain * k) . q = k . (gain * q).
    """
    u = upcast(sources)
    a = torch.softmax(rms_normalize(u, eps) @ upcast(query), 0)
    return torch.einsum("n...,n...d->...d", a, u).to(sources.dtype), a


def read_sealed(sealed: Tensor, queries: Tensor, eps: float = 1e-5
                ) -> tuple[Tensor, Tensor]:
    """Phase 1 of the two-phase form: all reads of a block from the finished sources.

    They are the same for its P queries, so they are fetched once (arXiv 2603.15031).
    sealed [n, ..., d], queries [P, d] -> mixtures [P, ..., d], and the logarithms of
    the softmax denominators [P, ...].
    """
    u = upcast(sealed)
    keys = rms_normalize(u, eps)
    scores = torch.einsum("n...d,pd->pn...", keys, upcast(queries))
    mixtures = torch.einsum("pn...,n...d->p...d", scores.softmax(1), u)
    return mixtures, scores.logsumexp(1)


def merge_live(mixture: Tensor, log_sum: Tensor, live: Tensor, query: Tensor,
               eps: float = 1e-5) -> Tensor:
    """Phase 2, for one read: let the live sum `live` join the softmax.

    Exact: what is left is a softmax over two things, a sigmoid (arXiv 2603.15031).
    mixture [..., d] and log_sum [...] of phase 1, live [..., d], query [d] -> [..., d].
    """
    u = upcast(live)
    share = torch.sigmoid(rms_normalize(u, eps) @ upcast(query) - log_sum)
    return torch.lerp(mixture, u, share[..., None]).to(live.dtype)


# --- the residual stream as an object -------------------------------------------------

class PlainStream:
    """The ordinary residual: one running sum, which is also what every read returns."""

    def __init__(self, x: Tensor):
        self.prefix = x
        self.num_sealed = 0

    def read(self, query: Tensor | None = None, trace: dict | None = None,
             name: str = "") -> Tensor:
        """The live sum [..., d]."""
        return self.prefix

    def add(self, y: Tensor) -> None:
        """Add a sub-layer's output y [..., d] to the live sum."""
        self.prefix = self.prefix + y

    def seal(self) -> None:
        """Nothing to do: a plain residual has no blocks."""


class BlockStream:
    """Block Attention Residuals over an embedding x [..., d] (arXiv 2603.15031).

    `prefix` is the live sum of the current block, `sealed` the finished sources. In
    K3 `seal` is called at layers 0, 12, ..., 84: first the read, then the seal, then
    the mixer. The first seal keeps the embedding, which from then on is a source like
    any other and no longer part of a sum. With a seal before every sub-layer this is
    Full Attention Residuals.
    """

    def __init__(self, x: Tensor, eps: float = 1e-5):
        self.prefix: Tensor | None = x
        self.sealed: list[Tensor] = []
        self.eps = eps

    @property
    def num_sealed(self) -> int:
        return len(self.sealed)

    def read(self, query: Tensor, trace: dict | None = None, name: str = "") -> Tensor:
        """Mix the sealed sources, oldest first, and the live sum last.

        query [d] -> [..., d]; the weights [..., n] go into the trace under `name`.
        """
        sources = self.sealed + ([] if self.prefix is None else [self.prefix])
        if len(sources) == 1:                       # layer 0: a softmax over one is 1
            mixture = sources[0]
            weights = torch.ones_like(upcast(mixture[..., 0]))[None]
        else:
            mixture, weights = attn_res(torch.stack(sources), query, self.eps)
        if trace is not None:
            trace[name] = weights.movedim(0, -1)    # [..., n]
        return mixture

    def add(self, y: Tensor) -> None:
        """Add y [..., d] to the live sum, or begin a new sum with it."""
        self.prefix = y if self.prefix is None else self.prefix + y

    def seal(self) -> None:
        """Keep the live sum as a source, write-once, and begin a new block.

        InputError if there is no live sum: two seals without an `add` between.
        """
        if self.prefix is None:
            raise InputError("seal() was called twice without an add() between: "
                             "there is no live sum to keep")
        self.sealed.append(self.prefix)
        self.prefix = None
