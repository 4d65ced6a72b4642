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
from k3_teach.parts.kda_chunk import ChunkKDA, tiling
from k3_teach.parts.precision import as_upcast, upcast

CHUNK = 32      # tokens that are handled by matrix products, not one after another
SEGMENT = 256   # tokens whose temporaries are held at once: 128 or more of every row


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
                  initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The equation (arXiv 2510.26692), one token at a time.

    q, k [B,T,H,K], v [B,T,H,V], g [B,T,H,K], beta [B,T,H], initial_state [B,H,K,V]
    -> o [B,T,H,V], S [B,H,K,V]. InputError for shapes that do not fit.
    """
    q, k, v, g, beta, S = prepare(q, k, v, g, beta, initial_state)
    tokens = zip(*(x.unbind(1) for x in (q, k, v, g.exp(), beta)))
    out = []
    with as_upcast(S):
        for q_t, k_t, v_t, decay_t, beta_t in tokens:
            S = S * decay_t[..., None]
            u = beta_t[..., None] * (v_t - torch.einsum("bhkv,bhk->bhv", S, k_t))
            S = S + k_t[..., None] * u[..., None, :]
            out.append(torch.einsum("bhkv,bhk->bhv", S, q_t))
    return torch.stack(out, 1), S


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
              initial_state: Tensor | None = None, chunk_size: int | None = None,
              gate_lower_bound: float | None = None) -> tuple[Tensor, Tensor]:
    """`recurrent_kda` in chunks (arXiv 2510.26692): matrix products within a chunk, one
    step of the recurrence from chunk to chunk (see kda_chunk.py). Shapes and errors as
    there. It can be differentiated once, and not by torch.func; the other one can.

    Any T and any finite g <= 0. `gate_lower_bound` is a promise that no g is below it,
    which allows larger tiles. Without it, g below -44 (in float64 -320) counts as that:
    a decay of e^-44 = 8e-20 leaves nothing that float32 could still add.
    `chunk_size` is a power of two; None: 32, or 16 without a bound.
    Other values at later tokens change no bit of what comes out at a token, as long as
    their products are finite in float32; with K3's bound, up to 1e22 in q and k.
    """
    q, k, v, g, beta, S = prepare(q, k, v, g, beta, initial_state)
    B, T, H, _ = q.shape
    C, bound = chunk_size, gate_lower_bound
    if C is None:
        C = CHUNK // 2 if bound is None else CHUNK
    if C < 1 or C & (C - 1):
        raise InputError(f"chunk_size is {C}; it must be a power of two")
    if bound is None:
        bound = -44.0 if q.dtype == torch.float32 else -320.0
    elif not -torch.inf < bound < 0:
        raise InputError(f"gate_lower_bound is {bound}; "
                         "it must be a negative number, or None")
    C = min(C, 1 << (T - 1).bit_length())       # a short text needs no long chunk
    segment, cut = max(C, 128, SEGMENT // B), tiling(C, bound, q)
    S, out = S.flatten(0, 1), []
    for q, k, v, g, beta in zip(*(x.split(segment, 1) for x in (q, k, v, g, beta))):
        g = g.clamp_min(bound) if gate_lower_bound is None else g
        part = (_to_chunks(x, C) for x in (q, k, v, g, beta[..., None]))
        o, S = ChunkKDA.apply(*part, S, cut)
        out.append(o.unflatten(1, (B, H)).permute(1, 0, 3, 2, 4).flatten(1, 2))
    o = torch.cat(out, 1) if len(out) > 1 else out[0]
    return o[:, :T], S.unflatten(0, (B, H))


def _to_chunks(x: Tensor, C: int) -> Tensor:
    """[B,T,H,D] -> [N, B*H, C, D], N chunks of C tokens, the last filled up with zeros:
    a token with k = beta = g = 0 leaves the state as it is."""
    if x.shape[1] % C:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def prepare(q, k, v, g, beta, initial_state):
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
