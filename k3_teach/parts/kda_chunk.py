"""One stretch of KDA in chunks, and its gradient by hand: the inside of `chunk_kda`.

In a chunk of C tokens G_i is the sum of g up to and including token i, S the state
before the chunk, u_i what token i writes under k_i (arXiv 2510.26692):

    L_ij = k_i . e^{G_i - G_j} k_j  for j < i      Q+_i = e^{G_i} q_i
    P_ij = q_i . e^{G_i - G_j} k_j  for j <= i     K+_i = e^{G_i} k_i
    X    = (I + beta L)^-1                         K-_j = e^{G_C - G_j} k_j

    u  = X beta (v - K+ S)          a triangular system, solved for all chunks at once
    o  = Q+ S + P u
    S' = e^{G_C} S + K-^T u

P, L, X, Q+, K+ and K- need no state: matrix products make them for all chunks at once.
Only two small products go from chunk to chunk.

e^{G_i} e^{-G_j} as one product would overflow: at g = -5, e^{-G_j} is beyond float32 at
the 18th token. So a chunk is cut into tiles. With f_I the first token of tile I, and
token i in tile I, j in tile J,

    e^{G_i - G_j} = e^{G_i - G_{f_I}}  e^{G_{f_I} - G_{f_J}}  e^{G_{f_J} - G_j}
                          up_i               bridge_IJ              down_j

up and bridge are at most 1, down at least 1, and a tile is as long as this allows. up
carries a factor `lift` and down 1 / lift, a power of two, which changes no bit: it puts
both ranges around 1 and leaves half of all exponents to values and gradients.

Shapes: N chunks, n = B H rows, C tokens, t tiles of C/t tokens, K width of a key, V of
a value. Tensors are [N, n, C, ...], tiled ones [N, n, t, C/t, ...].
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from k3_teach.errors import InputError
from k3_teach.parts.precision import as_upcast


class Tiling(NamedTuple):
    """How chunks are cut: tokens of a tile, the factor `lift`, and which runs of tokens
    `decays` sums over, [.., C] of ones and zeros."""

    tile: int
    lift: float
    runs: Tensor


def tiling(C: int, bound: float, like: Tensor) -> Tiling:
    """The longest tiles over which gates of `bound` or more stay in range, up to C.

    C a power of two, bound < 0, like: for dtype and device. 16 tokens and a lift of
    2^54 for K3 in float32: its numbers end at e^88, and 15 gates of -5 sum to -75.
    """
    room, tile = 80.0 if like.dtype == torch.float32 else 640.0, C
    while tile > 1 and -bound * (tile - 1) > room:
        tile //= 2
    firsts, last = range(0, C, tile), C - 1
    spans = [(i - i % tile, i) for i in range(C)]                         # up
    spans += [(-1, f) for f in firsts] + [(f, last) for f in firsts]      # enter, leave
    spans += [(-1, last)] + [(j, i) for i in firsts for j in firsts]    # whole, bridge
    after, to = torch.tensor(spans, device=like.device)[..., None].unbind(1)
    token = torch.arange(C, device=like.device)
    runs = (after < token) & (token <= to)
    lift = 2.0 ** round(-bound * (tile - 1) / 2 / math.log(2))
    return Tiling(tile, lift, runs.to(like.dtype))


class Decays(NamedTuple):
    """e^{sums of g} of a chunk; see the text above.

    up, down [N,n,t,C/t,K]; from the start of the chunk to the first token of each tile
    and from there to the end, with the lifts taken out again: enter, leave [N,n,t,1,K];
    over the whole chunk: whole [N,n,K,1]; between the first tokens of tiles, to I from
    J: bridge [N,n,t,t,1,K], 0 where J is later.
    """

    up: Tensor
    down: Tensor
    enter: Tensor
    leave: Tensor
    whole: Tensor
    bridge: Tensor


def decays(g: Tensor, cut: Tiling) -> Decays:
    """All decays within chunks: g [N,n,C,K] (arXiv 2510.26692).

    Each is the exponential of a sum of g over a run of tokens, all sums in one product.
    A decay across tiles is no difference of running sums, which would lose a slow decay
    behind a fast one. Within a tile it is one, right to 2e-5 in float32.
    """
    C, t = g.shape[-2], g.shape[-2] // cut.tile
    e = (cut.runs @ g).exp()
    up, enter, leave, whole, bridge = e.split([C, t, t, 1, t * t], -2)
    up = up.unflatten(-2, (t, -1)) * cut.lift
    earlier = torch.ones(t, t, dtype=g.dtype, device=g.device).tril()[..., None, None]
    return Decays(up, up.reciprocal(), enter.unsqueeze(-2) / cut.lift,
                  leave.unsqueeze(-2) * cut.lift, whole.mT,
                  bridge.unflatten(-2, (t, t, 1)) * earlier)


def scores(rows: Tensor, columns: Tensor, diagonal: int) -> Tensor:
    """rows [N,n,t,C/t,K], columns [N,n,t,C,K], one set for each tile of rows -> their
    products [N,n,C,C], up to this diagonal (-1: none of a token with itself)."""
    return (rows @ columns.mT).flatten(2, 3).tril_(diagonal)


def scaled(q: Tensor, k: Tensor, d: Decays) -> tuple[Tensor, ...]:
    """q and k with their decays: as rows, k as a column [N,n,t,C/t,K]; counted from the
    start of the chunk (Q+, K+), k to its end (K-) [N,n,C,K]."""
    q_tiles, k_tiles = q.view_as(d.up), k.view_as(d.up)
    q_row, k_row, k_column = q_tiles * d.up, k_tiles * d.up, k_tiles * d.down
    q_in, k_in = (q_row * d.enter).view_as(q), (k_row * d.enter).view_as(k)
    return q_row, k_row, k_column, q_in, k_in, (k_column * d.leave).view_as(k)


def spread(k_column: Tensor, d: Decays) -> Tensor:
    """The keys as each tile of rows sees them: [N,n,t,C/t,K] -> [N,n,t,C,K]."""
    return (k_column.unsqueeze(2) * d.bridge).flatten(3, 4)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [..., C, C], by substitution.

    The series I - A + A^2 - ... ends after C terms and is exact on paper, but useless:
    with similar keys its terms grow to 1e16 before they cancel.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    return torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)


def chunk_forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor,
                  cut: Tiling) -> tuple[Tensor, Tensor, tuple]:
    """The chunks of a stretch, and what the gradient needs (arXiv 2510.26692).

    q, k, g [N,n,C,K], v [N,n,C,V], beta [N,n,C,1], S [n,K,V]
    -> o [N,n,C,V], the last S, the tensors for `chunk_backward`.
    """
    d = decays(g, cut)
    q_row, k_row, k_column, q_in, k_in, k_out = scaled(q, k, d)
    columns = spread(k_column, d)                          # [N, n, t, C, K]
    P, L = scores(q_row, columns, 0), scores(k_row, columns, -1)
    X = unit_lower_inverse(beta * L)
    Xb = X * beta.mT
    wanted, known = Xb @ v, Xb @ k_in                      # u = wanted - known S
    states, u = S.new_empty(len(q) + 1, *S.shape), torch.empty_like(v)
    states[0] = S
    for n, (S, S_next) in enumerate(zip(states, states[1:])):
        torch.baddbmm(wanted[n], known[n], S, alpha=-1, out=u[n])
        torch.mul(S, d.whole[n], out=S_next).baddbmm_(k_out[n].mT, u[n])
    o = add_product(q_in @ states[:-1], P, u)
    return o, states[-1].clone(), (q, k, v, beta, P, L, X, states[:-1], u, *d)


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b in one go, for any leading axes."""
    flat = lambda y: y.flatten(0, -3)
    return torch.baddbmm(flat(x), flat(a), flat(b)).view_as(x)


def chunk_backward(dO: Tensor, E: Tensor, saved: tuple) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta and S from dO [N,n,C,V], that of o, and E [n,K,V],
    that of the last S (derived from the equations above). From the last chunk to the
    first,

        dU = P^T dO + K- E     Y = X^T dU     E <- e^{G_C} E + Q+^T dO - K+^T beta Y

    and then for all chunks at once: dv = beta Y; dP = dO u^T and dL = -beta Y u^T pass
    through the decayed scores to q and k. A decay stands as e^{G_i} beside a row and as
    e^{-G_j} beside a column, so its gradient is q dq + k dk_row - k dk_column, however
    the tiles are cut, and g collects it from all tokens since. Left out are pairs of a
    token with itself: they have no decay, and would cancel only up to rounding. For the
    same reason K- is collected from the tokens before.
    """
    (q, k, v, beta, P, L, X, states, u), d = saved[:9], Decays(*saved[9:])
    q_row, k_row, k_column, q_in, k_in, k_out = scaled(q, k, d)
    columns = spread(k_column, d)
    tiles = lambda x: x.unflatten(2, d.up.shape[2:4])

    dU, kb, Y = P.mT @ dO, (k_in * beta).mT, torch.empty_like(v)
    E = torch.cat((q_in.mT @ dO, E[None]))      # E[n]: of the state before chunk n
    for n in reversed(range(len(v))):
        torch.bmm(X[n].mT, dU[n].baddbmm_(k_out[n], E[n + 1]), out=Y[n])
        E[n].addcmul_(E[n + 1], d.whole[n]).baddbmm_(kb[n], Y[n], alpha=-1)
    dS, E = E[0], E[1:]

    dP, Yu, YS = dO @ u.mT, (Y @ u.mT).tril_(-1), Y @ states.mT
    dbeta = (Y * v).sum(-1) - (YS * k_in).sum(-1) - (Yu * L).sum(-1)
    own = dP.diagonal(0, -2, -1)[..., None]     # what q_i . k_i gets
    dP, dL = tiles(dP.tril(-1)), tiles(Yu * -beta)
    dq = torch.addcmul(dP @ columns, tiles(dO @ states.mT), d.enter) * d.up
    dk_row = torch.addcmul(dL @ columns, tiles(YS * -beta), d.enter) * d.up
    dcolumns = add_product(dP.mT @ q_row, dL.mT, k_row).unflatten(3, d.up.shape[2:4])
    dk_column = (dcolumns * d.bridge).sum(2) * d.down
    dk_out = u @ E.mT
    dq, dk_row, dk_column = (x.flatten(2, 3) for x in (dq, dk_row, dk_column))

    since = torch.ones_like(L[0, 0]).triu()
    dg = since @ torch.addcmul(q * dq, k, dk_row - dk_column)
    dg = add_product(dg, since.mT.tril(-1).expand_as(L), k_out * dk_out)
    dg += ((states * E).sum(-1, keepdim=True) * d.whole).mT
    dk = dk_row.add_(dk_column).addcmul_(own, q)
    dk += (tiles(dk_out) * (d.leave * d.down)).flatten(2, 3)
    return dq.addcmul_(own, k), dk, Y * beta, dg, dbeta[..., None], dS


class ChunkKDA(torch.autograd.Function):
    """`chunk_forward`, with `chunk_backward` for its gradient. Differentiable once, and
    not by torch.func: buffers are written in place.

    Autograd through `recurrent_kda` gives the same gradients; the tests compare them.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, cut):
        with as_upcast(q):
            o, S, saved = chunk_forward(q, k, v, g, beta, S, cut)
        ctx.save_for_backward(*saved)
        return o, S

    @staticmethod
    def backward(ctx, dO, dS):
        if torch.is_grad_enabled():     # with create_graph=True
            raise InputError("chunk_kda has no second derivative; recurrent_kda has")
        with as_upcast(dO):
            return *chunk_backward(dO, dS, ctx.saved_tensors), None
