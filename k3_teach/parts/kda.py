"""The gated delta rule of KDA: one recurrence, computed token by token or in chunks.

    S <- Diag(e^g) S                 forget: each key channel decays by its own factor
    S <- S + beta k (v - S^T k)^T    correct what S holds under the key k
    o  = S^T q                       read
                                     (Kimi K3 report, eq. 1 and 2; arXiv 2510.26692)

Per head, S [K,V] is a memory of fixed size: S^T k is what it holds under the key k.

Shapes: q, k [B,T,H,K], already normalised, q already scaled; v [B,T,H,V];
g [B,T,H,K] <= 0, the log decay; beta [B,T,H] in (0, 1), the strength of the correction;
initial_state [B,H,K,V], or None for zeros.
Both functions return o [B,T,H,V] and the last S [B,H,K,V], in float32 (or float64).
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError
from k3_teach.parts.precision import upcast

CHUNK = 32      # tokens that are handled by matrix products, not one after another
SEGMENT = 512   # tokens (of all rows together) whose temporaries are held at once


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
                  initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The equation (arXiv 2510.26692), one token at a time.

    q, k [B,T,H,K], v [B,T,H,V], g [B,T,H,K], beta [B,T,H], initial_state [B,H,K,V]
    -> o [B,T,H,V], S [B,H,K,V]. InputError for shapes that do not fit.
    """
    q, k, v, g, beta, S = _prepare(q, k, v, g, beta, initial_state)
    tokens = zip(*(x.unbind(1) for x in (q, k, v, g.exp(), beta)))
    out = []
    for q_t, k_t, v_t, decay_t, beta_t in tokens:
        S = S * decay_t[..., None]
        u = beta_t[..., None] * (v_t - torch.einsum("bhkv,bhk->bhv", S, k_t))
        S = S + k_t[..., None] * u[..., None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", S, q_t))
    return torch.stack(out, 1), S


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
              initial_state: Tensor | None = None, chunk_size: int = CHUNK,
              gate_lower_bound: float | None = None) -> tuple[Tensor, Tensor]:
    """`recurrent_kda` in chunks (arXiv 2510.26692): matrix products within a chunk, one
    step of the recurrence from chunk to chunk. Shapes and errors as there.

    Any T and any finite g <= 0. `gate_lower_bound` is a promise that no g is below it,
    which allows larger tiles (see `decayed_scores`). `chunk_size` is a power of two.
    Other (finite) values at later tokens change no bit of what comes out at a token.
    """
    q, k, v, g, beta, S = _prepare(q, k, v, g, beta, initial_state)
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise InputError(f"chunk_size is {chunk_size}; it must be a power of two")
    T = q.shape[1]
    chunk_size = min(chunk_size, 1 << (T - 1).bit_length())
    leaf = leaf_size(gate_lower_bound, q.dtype, chunk_size)
    segment = max(chunk_size, 128, SEGMENT // len(q))
    out = []
    for part in zip(*(x.split(segment, 1) for x in (q, k, v, g, beta))):
        o, S = _segment(*part, S, chunk_size, leaf)
        out.append(o)
    return torch.cat(out, 1), S


def _segment(q, k, v, g, beta, S, C: int, leaf: int):
    """One segment, as N chunks of C tokens. In a chunk, G_i is the sum of g up to and
    including token i, S the state before the chunk, u_i what token i writes under k_i:

        u_i + beta_i sum_{j<i} (k_i e^{G_i - G_j} . k_j) u_j
            = beta_i (v_i - S^T (k_i e^{G_i}))                       a triangular system
        o_i = S^T (q_i e^{G_i}) + sum_{j<=i} (q_i e^{G_i - G_j} . k_j) u_j
        S'  = Diag(e^{G_C}) S + sum_j (k_j e^{G_C - G_j}) u_j^T
    """
    (B, T, H, K), V = q.shape, v.shape[-1]
    q, k, v, g, beta = (_to_chunks(x, C) for x in (q, k, v, g, beta[..., None]))
    scores = decayed_scores(torch.stack((q, k), -3), k, g, leaf)    # [N, B*H, 2, C, C]
    attend, overlap = scores.unbind(-3)                             # [N, B*H, C, C]
    A = beta * overlap.tril(-1)
    solve = _unit_lower_inverse(A) * beta.mT        # (I + A)^-1 Diag(beta)
    since_start = (_sums(C, True, q) @ g).exp()     # e^{G_i}
    to_end = (_sums(C, False, q) @ g).exp()         # e^{G_C - G_i}
    wanted = solve @ v                              # u = wanted - known S
    known = solve @ (k * since_start)
    keys = (k * to_end).mT                                          # [N, B*H, K, C]
    carry = since_start[..., -1, :, None]                           # [N, B*H, K, 1]

    S, states, corrections = S.flatten(0, 1), [], []
    for wanted_n, known_n, keys_n, carry_n in zip(wanted, known, keys, carry):
        u = torch.baddbmm(wanted_n, known_n, S, alpha=-1)
        states.append(S)
        corrections.append(u)
        S = torch.baddbmm(S * carry_n, keys_n, u)
    o = (q * since_start) @ torch.stack(states) + attend @ torch.stack(corrections)
    o = o.view(-1, B, H, C, V).permute(1, 0, 3, 2, 4).reshape(B, -1, H, V)[:, :T]
    return o, S.view(B, H, K, V)


def decayed_scores(rows: Tensor, k: Tensor, g: Tensor, leaf: int) -> Tensor:
    """sum_c rows[i,c] k[j,c] e^{G[i,c] - G[j,c]} for j <= i, and 0 above the diagonal.

    rows [..., R, C, K] (R matrices of rows: q and k), k and g [..., C, K]
    -> [..., R, C, C]. G is the running sum of g over the C tokens. These are the scores
    within a chunk (arXiv 2510.26692).

    e^{G_i} e^{-G_j} as one matrix product would overflow: at g = -5, e^{-G_j} is beyond
    float32 at the 18th token. So the triangle is put together from squares. A square
    has its rows in the later half of a tile and its columns in the earlier half; both
    decays are counted to the border between them, both are at most 1, and nothing can
    overflow. Only the tiles of `leaf` tokens on the diagonal use e^{G_i} e^{-G_j},
    counted from their first token.
    """
    C = k.shape[-2]
    tile = lambda x, *sizes: x.unflatten(-2, (-1, *sizes))
    from_first = _sums(leaf, True, k)
    from_first[:, 0] = 0
    G = from_first @ tile(g, leaf)                          # [..., C/leaf, leaf, K]
    late = tile(rows, leaf) * G.exp().unsqueeze(-4)
    early = tile(k, leaf) * (-G).exp()
    s = late @ early.unsqueeze(-4).mT
    s = s.tril()                                         # [..., R, C/leaf, leaf, leaf]
    size = leaf
    while size < C:
        g_early, g_late = tile(g, 2, size).unbind(-3)       # [..., C/(2 size), size, K]
        to_border = (_sums(size, False, k) @ g_early).exp()
        early = tile(k, 2, size)[..., 0, :, :] * to_border
        from_border = (_sums(size, True, k) @ g_late).exp()
        late = tile(rows, 2, size)[..., 1, :, :] * from_border.unsqueeze(-4)
        square = late @ early.unsqueeze(-4).mT              # [..., size, size]
        first, second = s.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat((first, torch.zeros_like(square)), -1)
        s = torch.cat((upper, torch.cat((square, second), -1)), -2)
        size *= 2
    return s.squeeze(-3)


def leaf_size(gate_lower_bound: float | None, dtype: torch.dtype,
              chunk_size: int) -> int:
    """The most tokens, up to `chunk_size`, over which e^{-sum of g} cannot overflow.

    8 for K3 in float32: the range ends at e^88, and half of it is left to large values
    and gradients. 1 if g has no bound. InputError for a bound that is not negative.
    """
    if gate_lower_bound is None:
        return 1
    if not -torch.inf < gate_lower_bound < 0:
        raise InputError(f"gate_lower_bound is {gate_lower_bound}; "
                         "it must be a negative number, or None")
    room = 44.0 if dtype == torch.float32 else 350.0
    leaf = chunk_size
    while leaf > 1 and -gate_lower_bound * leaf > room:
        leaf //= 2
    return leaf


def _sums(size: int, from_start: bool, like: Tensor) -> Tensor:
    """M [size, size], so that M @ g sums g up to and including each row, or over the
    rows after it. Sums of terms of one sign are accurate to the last bits; differences
    of running sums would lose a slow decay behind a fast one."""
    ones = torch.ones(size, size, dtype=like.dtype, device=like.device)
    return ones.tril() if from_start else ones.triu(1)


def _unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [..., C, C], by substitution.

    The series I - A + A^2 - ... ends after C terms and is exact on paper, but useless:
    with similar keys its terms grow to 1e16 before they cancel.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    return torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)


def _to_chunks(x: Tensor, C: int) -> Tensor:
    """[B,T,H,D] -> [N, B*H, C, D], N chunks of C tokens, the last filled up with zeros:
    a token with k = beta = g = 0 leaves the state as it is."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _prepare(q, k, v, g, beta, initial_state):
    """Check the shapes and bring everything to float32 (or float64)."""
    if q.ndim != 4 or q.numel() == 0:
        allowed = "[B, T, H, K] with at least one token and no size of 0"
        raise InputError(f"q has the shape {list(q.shape)}; it must be {allowed}")
    B, T, H, K = q.shape
    V = v.shape[-1]
    expected = {"k": (k, (B, T, H, K)), "g": (g, (B, T, H, K)),
                "v": (v, (B, T, H, V)), "beta": (beta, (B, T, H))}
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (B, H, K, V))
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise InputError(f"{name} has the shape {list(x.shape)}; "
                             f"with q {[B, T, H, K]} it must be {list(shape)}")
    q, k, v, g, beta = (upcast(x) for x in (q, k, v, g, beta))
    if initial_state is None:
        return q, k, v, g, beta, q.new_zeros(B, H, K, V)
    return q, k, v, g, beta, initial_state.to(q.dtype)
