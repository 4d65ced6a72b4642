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
from k3_teach.parts.precision import as_upcast, upcast


def attn_res(sources: Tensor, query: Tensor, eps: float = 1e-5
             ) -> tuple[Tensor, Tensor]:
    """One depth read (arXiv 2603.15031): the mixture h, and the weights a in float32.

    sources [n, ..., d], query [d] -> [..., d], [n, ...]. There is no 1/sqrt(d) and no
    temperature: the query is free to grow. The release stores it as two factors, the
    gain of the norm of the keys and a projection: (gain * k) . q = k . (gain * q).
    """
    u = upcast(sources)
    with as_upcast(u):
        a = torch.softmax(rms_normalize(u, eps) @ upcast(query), 0)
        h = torch.einsum("n...,n...d->...d", a, u)
    return h.to(sources.dtype), a


def rms(u: Tensor, eps: float) -> Tensor:
    """sqrt(mean(u^2) + eps): u [..., d] in float32 or float64 -> [...].

    A score q . k is q . u / rms(u), so that no key need be made (arXiv 2603.15031);
    nor are squares, by `vecdot`.
    """
    return torch.sqrt(torch.linalg.vecdot(u, u) / u.shape[-1] + eps)


def read_sealed(sealed: Tensor, queries: Tensor, eps: float = 1e-5
                ) -> tuple[Tensor, Tensor]:
    """Phase 1 of the two-phase form: several reads of a block from its sealed sources.

    They are the same for its P queries, so they are fetched once (arXiv 2603.15031).
    sealed [n, ..., d], queries [P, d] -> mixtures [P, ..., d], and the logarithms of
    the softmax denominators [P, ...], both in float32 (or float64).
    """
    u = upcast(sealed)
    with as_upcast(u):
        scores = u @ upcast(queries).mT / rms(u, eps)[..., None]        # [n, ..., P]
        mixtures = torch.einsum("n...p,n...d->p...d", scores.softmax(0), u)
    return mixtures, scores.logsumexp(0).movedim(-1, 0)


def merge_live(mixture: Tensor, log_sum: Tensor, live: Tensor, query: Tensor,
               eps: float = 1e-5) -> Tensor:
    """Phase 2, for one read: let the live sum `live` join the softmax.

    Exact: what is left is a softmax over two things, a sigmoid (arXiv 2603.15031).
    mixture [..., d] and log_sum [...] of phase 1, live [..., d], query [d] -> [..., d]
    in float32 (or float64).
    """
    u = upcast(live)
    with as_upcast(u):
        score = u @ upcast(query) / rms(u, eps)                         # [...]
    return torch.lerp(mixture, u, torch.sigmoid(score - log_sum)[..., None])


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


class TwoPhaseStream(BlockStream):
    """The same reads, with the sealed sources fetched for several of them at once.

    queries [R, d]: those of all reads to come, in their order. They are parameters, so
    they are known before the first token. Each `read` still names its query, and it has
    to be the next of these.

    A mixture waits for its read, in float32, as large as the hidden state. AT_ONCE is
    the most that may wait: half of the 24 reads of a block in K3.
    """

    AT_ONCE = 12

    def __init__(self, x: Tensor, eps: float, queries: Tensor):
        super().__init__(x, eps)
        self.queries, self.num_read = queries, 0
        self.waiting: list[tuple[Tensor, Tensor]] = []      # phase 1 of the next reads

    def read(self, query: Tensor, trace: dict | None = None, name: str = "") -> Tensor:
        """As of a BlockStream. InputError for more reads than there are queries."""
        if self.num_read == len(self.queries):
            raise InputError(f"read {self.num_read + 1} of a stream that was made with "
                             f"{len(self.queries)} queries; it takes one for each read")
        if trace is not None:
            super().read(query, trace, name)        # only for the weights
        if self.sealed and not self.waiting:
            self.waiting = self.phase_1()
        self.num_read += 1
        if not self.sealed:                         # layer 0
            return self.prefix
        h, log_sum = self.waiting.pop(0)
        if self.prefix is not None:
            h = merge_live(h, log_sum, self.prefix, query, self.eps)
        return h.to(self.sealed[0].dtype)

    def phase_1(self) -> list[tuple[Tensor, Tensor]]:
        """`read_sealed` for the next reads: a mixture [..., d] and a logarithm each."""
        ahead = self.queries[self.num_read:self.num_read + self.AT_ONCE]    # [P, d]
        return list(zip(*read_sealed(torch.stack(self.sealed), ahead, self.eps)))

    def seal(self) -> None:
        """As of a BlockStream. What was read ahead does not know the new source."""
        super().seal()
        self.waiting = []
