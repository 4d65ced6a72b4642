"""KDA in chunks of 64 tokens, as papers and public ports write it.

It stands for the usual PyTorch fallback: the whole text at once, autograd for the
gradients. Inside a chunk (arXiv 2510.26692, section 3), with G the running sum of g,

    A_ij = beta_i sum_c k_ic k_jc e^{G_ic - G_jc}   j < i
    u    = (I + A)^-1 Diag(beta) (v - (k e^G) S)

The decays of pairs are made in one of two ways, and the triangle is inverted likewise:
by columns with substitution row by row, or by tiles of 16 tokens with
`solve_triangular`. Shapes as in `k3_teach.parts.kda`; T must be a multiple of 64.
"""

import torch
from torch import Tensor

CHUNK, TILE = 64, 16


def chunk_by_columns(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
                     ) -> tuple[Tensor, Tensor]:
    """A column of decays after another, then a row of the inverse after another."""
    return _chunks(q, k, v, g, beta, _scores_by_columns, _inverse_by_rows)


def chunk_by_tiles(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
                   ) -> tuple[Tensor, Tensor]:
    """Decays counted from the first token of a tile, so that matrix products stay finite."""
    return _chunks(q, k, v, g, beta, _scores_by_tiles, _inverse_by_solving)


def _chunks(q, k, v, g, beta, scores, inverse):
    (B, T, H, K), V = q.shape, v.shape[-1]
    q, k, v, g = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v, g))
    beta = beta.transpose(1, 2).unflatten(2, (-1, CHUNK, 1))        # [B, H, N, C, 1]
    G = g.cumsum(-2)
    A = (beta * scores(k, k, G)).tril(-1)                           # [B, H, N, C, C]
    attend = scores(q, k, G).tril()
    solve = inverse(A) * beta.mT
    last = G[..., -1:, :]                                           # [B, H, N, 1, K]
    parts = (solve @ v, solve @ (k * G.exp()), q * G.exp(), attend,
             k * (last - G).exp(), last.exp())
    S, out = q.new_zeros(B, H, K, V), []
    # Taken apart once: a slice of its own for each chunk has a gradient of the whole text.
    for wanted, known, query, weights, keys, decay in zip(*(x.unbind(2) for x in parts)):
        u = wanted - known @ S
        out.append(query @ S + weights @ u)
        S = S * decay.mT + keys.mT @ u
    return torch.stack(out, 2).flatten(2, 3).transpose(1, 2), S


def _scores_by_columns(rows: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """sum_c rows_ic k_jc e^{G_ic - G_jc}; the exponent is cut at 0, where j > i."""
    columns = []
    for j in range(CHUNK):
        decay = (G - G[..., j:j + 1, :]).clamp_max(0).exp()
        columns.append((rows * decay * k[..., j:j + 1, :]).sum(-1))
    return torch.stack(columns, -1)


def _scores_by_tiles(rows: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """The same, tile by tile: e^{G_i - G_a} e^{G_a - G_j}, with a the tile's first token."""
    parts = []
    for a in range(0, CHUNK, TILE):
        first, end = G[..., a:a + 1, :], a + TILE
        late = rows[..., a:end, :] * (G[..., a:end, :] - first).exp()
        early = k[..., :end, :] * (first - G[..., :end, :]).exp()
        parts.append(torch.nn.functional.pad(late @ early.mT, (0, CHUNK - end)))
    return torch.cat(parts, -2)


def _inverse_by_rows(A: Tensor) -> Tensor:
    """(I + A)^-1: row i is e_i minus A_i times the rows before it."""
    eye = torch.eye(CHUNK, dtype=A.dtype)
    rows = [eye[0].expand(A.shape[:-2] + (CHUNK,))]
    for i in range(1, CHUNK):
        rows.append(eye[i] - (A[..., i:i + 1, :i] @ torch.stack(rows, -2)).squeeze(-2))
    return torch.stack(rows, -2)


def _inverse_by_solving(A: Tensor) -> Tensor:
    eye = torch.eye(CHUNK, dtype=A.dtype).expand_as(A)
    return torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
