"""One step of the gated delta rule, for decoding: one product reads the state.

With D = Diag(e^g), the equation of `kda.py` lets the state S decay, reads D S under k,
corrects it, and reads the result S' under q. The second read can be had from S, too,

    S'^T q = (D S + k u^T)^T q = (D S)^T q + (k . q) u,

and (D S)^T q = S^T (e^g q), so one product with S serves for both:

    known, read = S^T (e^g k), S^T (e^g q)
    u  = beta (v - known)           what the token writes under its key
    o  = read + (q . k) u
    S' = D S + k u^T                                   (Kimi K3 report, eq. 1 and 2)

A step has little to multiply and a whole state to move: 6 MB in a layer of K3. Its
three operations pass over the state five times, where a copy passes twice.
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError
from k3_teach.parts.kda import prepare
from k3_teach.parts.precision import as_upcast


def step_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
             initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`recurrent_kda` for a single token (Kimi K3 report, eq. 1 and 2).

    q, k [B,1,H,K], v [B,1,H,V], g [B,1,H,K], beta [B,1,H], initial_state [B,H,K,V]
    -> o [B,1,H,V] and a new S [B,H,K,V]; the old one stays as it is. Errors as there,
    and for more than one token.
    """
    q, k, v, g, beta, S = prepare(q, k, v, g, beta, initial_state)
    if q.shape[1] != 1:
        raise InputError(f"q holds {q.shape[1]} tokens; a step takes one")
    q, k, v, decay, beta = (x[:, 0] for x in (q, k, v, g.exp(), beta[..., None]))
    rows = torch.stack((k, q), -2) * decay[..., None, :]                # [B, H, 2, K]
    with as_upcast(S):
        known, read = (rows @ S).unbind(-2)                             # [B, H, V]
    u = beta * (v - known)
    o = read + (q * k).sum(-1, keepdim=True) * u
    # The second term is added in place: a third tensor would be one more way to memory.
    S = (S * decay[..., None]).addcmul_(k[..., None], u[..., None, :])
    return o[:, None], S
