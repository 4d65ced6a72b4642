"""Attention over compressed entries: one for `ratio` tokens, and a window of raw ones.

    e_i = sum_{j in group i} softmax_j(s_j) c_j      group i: tokens i r .. i r + r - 1
    X_t = { c_j : t - w < j <= t } and { e_i : i in A_t }
    o_t = sum_{x in X_t} softmax_x(scale q_t . x) x  the key is the value

Compressed Sparse Attention (CSA) takes for A_t the top k of the entries by the score
I_ti = sum_h b_th relu(q'_th . k'_i) of a small indexer; Heavily Compressed Attention
(HCA) compresses more and takes all (DeepSeek-V4, arXiv 2606.19348). There r is 4 or
128, the window w is 128, and c_j has 512 numbers, for all heads.

Token t may see entry i if the whole group lies before it, (i+1) r <= t: its own group
is never among them, even where t ends it. A group that lies whole in the window would
be seen twice, so its entry is left out, unless `recent=True`. Both rules are chosen
here; the released code was not compared. The window holds t itself and should be no
shorter than a group: of its unfinished group a token sees only what the window holds.

Reduced to the idea. Left out are RoPE on 64 of the 512 numbers, norms, the learned
sink, low-bit storage of entries and index keys, and all projections: q, kv, scores and
index keys come ready. Overlapping groups are there, but weigh the group before by the
same kv and scores, not by ones of its own. All scores are computed and then masked;
what a kernel saves by reading the chosen entries alone is not shown.

Shapes: B batch, T new tokens, S tokens so far (the last T of them new), H heads, D
width of kv, n = S // ratio entries, I heads of the indexer, K their width.
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError
from k3_teach.parts.attention import attention
from k3_teach.parts.precision import upcast


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}; it must be a positive integer")


def compress(kv: Tensor, ratio: int, scores: Tensor | None = None,
             overlap: bool = False) -> Tensor:
    """One entry for every `ratio` tokens: kv [B,T,D] -> [B,T//ratio,D].

    The mean of the group, weighted by the softmax of scores [B,T], or [B,T,D] for a
    softmax of each channel; None: the plain mean. overlap: over this group and the one
    before, 2 ratio tokens. An unfinished group has no entry yet.
    """
    _check_positive(ratio=ratio)
    scores = torch.zeros_like(kv[..., 0]) if scores is None else scores
    if kv.ndim != 3 or scores.shape not in (kv.shape, kv.shape[:2]):
        got = f"kv is {list(kv.shape)}, scores {list(scores.shape)}"
        raise InputError(f"{got}; they must be [B, T, D] and [B, T] or [B, T, D]")
    s = scores if scores.ndim == 3 else scores[..., None]
    c, s = finished_groups(kv, ratio), finished_groups(s, ratio)   # [B, n, ratio, .]
    if overlap:
        c = torch.cat((group_before(c, 0), c), 2)               # [B, n, 2 ratio, D]
        s = torch.cat((group_before(s, -torch.inf), s), 2)
    return (upcast(s).softmax(2) * c).sum(2).to(kv.dtype)       # [B, n, D]


def finished_groups(x: Tensor, ratio: int) -> Tensor:
    """The finished groups of tokens: [B,T,D] -> [B,T//ratio,ratio,D]."""
    whole = x.shape[1] // ratio * ratio
    return x[:, :whole].unflatten(1, (-1, ratio))


def group_before(x: Tensor, fill: float) -> Tensor:
    """The group before each group [B,n,ratio,D], and `fill` before the first."""
    return torch.cat((torch.full_like(x[:, :1], fill), x[:, :-1]), 1)


# --- what a token may see -------------------------------------------------------------

def window_mask(T: int, S: int, window: int, device=None) -> Tensor:
    """True at [t, j] for the last `window` tokens, t itself among them: [T,S].

    The T tokens are the last of S.
    """
    _check_positive(window=window)
    ones = torch.ones(T, S, dtype=torch.bool, device=device)
    return ones.tril(S - T) & ~ones.tril(S - T - window)


def entry_mask(T: int, S: int, ratio: int, window: int = 1, recent: bool = False,
               device=None) -> Tensor:
    """True at [t, i] if group i ends before token t: [T,S//ratio].

    And if it begins before t's window, unless `recent`. The T tokens are the last of S.
    """
    _check_positive(ratio=ratio, window=window)
    t = torch.arange(S - T, S, device=device)[:, None]
    first = torch.arange(S // ratio, device=device) * ratio
    past = first + ratio <= t
    return past if recent else past & (first <= t - window)


def index_scores(index_q: Tensor, index_k: Tensor, weights: Tensor | None = None
                 ) -> Tensor:
    """I_ti = sum_h b_th relu(q'_th . k'_i), how useful entry i is to token t.

    index_q [B,I,T,K], index_k [B,n,K], weights b [B,I,T] or None (all 1) -> [B,T,n].
    """
    match = upcast(index_q @ index_k[:, None].mT).relu()         # [B, I, T, n]
    return (match if weights is None else match * weights[..., None]).sum(1)


def choose(scores: Tensor, allowed: Tensor, top_k: int) -> Tensor:
    """True at the top_k allowed entries of each token; of equal ones, the earliest.

    scores [B,T,n], allowed [T,n] -> [B,T,n].
    """
    if not isinstance(top_k, int) or top_k < 0:
        raise InputError(f"top_k is {top_k!r}; it must be an integer of at least 0")
    ranked = scores.masked_fill(~allowed, -torch.inf)
    best = ranked.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best, True) & allowed


# --- the two attentions ---------------------------------------------------------------

def _attend(q, kv, entries, raw, chosen, scale) -> Tensor:
    """Softmax over window and entries at once. raw [T,S], chosen [T,n] or [B,T,n]."""
    x = torch.cat((kv, entries), 1)[:, None]                    # [B, 1, S + n, D]
    x = x.expand(-1, q.shape[1], -1, -1)
    chosen = chosen.expand(kv.shape[0], -1, -1)
    raw = raw.expand(kv.shape[0], -1, -1)
    return attention(q, x, x, scale, torch.cat((raw, chosen), 2)[:, None])


def _check_tokens(q: Tensor, kv: Tensor) -> tuple[int, int]:
    ends = q.ndim == 4 and kv.ndim == 3 and q.shape[0] == kv.shape[0]
    if not ends or q.shape[-1] != kv.shape[-1] or q.shape[2] > kv.shape[1]:
        raise InputError(f"q is {list(q.shape)} and kv {list(kv.shape)}; they must be "
                         "[B, H, T, D] and [B, S, D] with T at most S")
    return q.shape[2], kv.shape[1]


def csa(q: Tensor, kv: Tensor, ratio: int, top_k: int, window: int, scale: float,
        index_q: Tensor | None = None, index_k: Tensor | None = None,
        index_weights: Tensor | None = None, scores: Tensor | None = None,
        overlap: bool = False, recent: bool = False) -> Tensor:
    """The window and the top_k entries of the indexer: q [B,H,T,D], kv [B,S,D] ->
    [B,H,T,D] (arXiv 2606.19348).

    index_q [B,I,T,K] and index_k [B,S//ratio,K], one key for an entry, made with
    `compress`; None: q and the entries themselves. index_weights [B,I,T]; scores and
    overlap as in `compress`. One choice serves all heads.
    """
    T, S = _check_tokens(q, kv)
    entries = compress(kv, ratio, scores, overlap)
    index_q, index_k = (q if index_q is None else index_q,
                        entries if index_k is None else index_k)
    if index_k.shape[:2] != entries.shape[:2] or index_q.shape[2] != T:
        got = f"index_q is {list(index_q.shape)}, index_k {list(index_k.shape)}"
        raise InputError(f"{got}; they must be [B, I, {T}, K] and [B, {S // ratio}, K]")
    allowed = entry_mask(T, S, ratio, window, recent, q.device)
    chosen = choose(index_scores(index_q, index_k, index_weights), allowed, top_k)
    return _attend(q, kv, entries, window_mask(T, S, window, q.device), chosen, scale)


def hca(q: Tensor, kv: Tensor, ratio: int, window: int, scale: float,
        scores: Tensor | None = None, recent: bool = False) -> Tensor:
    """The window and all entries: q [B,H,T,D], kv [B,S,D] -> [B,H,T,D].

    As `csa` with top_k = S, no indexer, no overlap and a larger ratio (arXiv
    2606.19348).
    """
    T, S = _check_tokens(q, kv)
    entries = compress(kv, ratio, scores)
    allowed = entry_mask(T, S, ratio, window, recent, q.device)
    return _attend(q, kv, entries, window_mask(T, S, window, q.device), allowed, scale)


def attend_loop(q: Tensor, kv: Tensor, entries: Tensor, chosen: Tensor, window: int,
                scale: float) -> Tensor:
    """The definition, token by token, reading nothing but what it may see.

    q [B,H,T,D], kv [B,S,D], entries [B,n,D], chosen [B,T,n] -> [B,H,T,D].
    """
    o, past = torch.empty_like(q), kv.shape[1] - q.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            end = past + t + 1
            raw = kv[b, max(0, end - window):end]
            seen = torch.cat((raw, entries[b, chosen[b, t]]))   # [seen, D]
            o[b, :, t] = (scale * q[b, :, t] @ seen.T).softmax(-1) @ seen
    return o


def cached_numbers(T: int, D: int, ratio: int, window: int, overlap: bool = False,
                   index_width: int = 0) -> int:
    """Numbers that decoding keeps of T tokens, in a layer: entries and raw tokens.

    T // ratio entries of D numbers and `index_width` of the index key; and as raw kv
    the longer of the window and what the next entry waits for: the unfinished group,
    with overlap the one before it, too.
    """
    _check_positive(D=D, ratio=ratio, window=window)
    waiting = T % ratio + (ratio if overlap else 0)
    raw = min(T, max(window, waiting))
    return T // ratio * (D + index_width) + raw * D
