"""Muon: an optimiser that gives every direction of a matrix the same step.

    M <- mu M + G                         momentum; G is the gradient
    O = polar(G + mu M)                   Nesterov; or polar(M)
    W <- (1 - eta lambda) W - eta 0.2 sqrt(max(m, n)) O

With the singular value decomposition M = U S V^T, polar(M) = U V^T: the same
directions, all of length 1. It is approximated without a decomposition:
X <- a X + (b A + c A^2) X, A = X X^T, takes every singular value s to
a s + b s^3 + c s^5 and leaves U and V alone. Muon's coefficients are steep at 0, so
that small values grow 3.4-fold a step, and do not settle at 1: what has once come
above 0.68 stays between 0.68 and 1.21.

An m x n matrix with singular values 1 has entries of size 1/sqrt(max(m, n)) (RMS), so
the factor makes the RMS of an update about 0.2, as it is with Adam: a learning rate
found for one fits the other.

    (Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon; 0.2 sqrt(max(m, n))
    and decoupled weight decay lambda: Moonlight, arXiv 2502.16982; per head: Kimi K3
    report, section 2.5; QK-Clip, at the end: Kimi K2 report, arXiv 2507.20534.)

K3's coefficients and number of steps are not published; the defaults are Muon's.

Shapes: a weight or gradient is [..., m, n], rows are outputs; H heads of h rows each.
"""

import math

import torch
from torch import Tensor

from k3_teach.errors import InputError
from k3_teach.parts.attention import causal_mask
from k3_teach.parts.mla import MLA, expand
from k3_teach.parts.precision import upcast

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c (Jordan et al. 2024)


# --- the direction --------------------------------------------------------------------

def check_matrix(G: Tensor) -> None:
    if G.ndim < 2 or not G.numel() or not G.is_floating_point():
        got = f"G is {G.dtype} {list(G.shape)}"
        raise InputError(f"{got}; it must be floats [..., m, n], not empty")


def normalize(G: Tensor) -> Tensor:
    """G over its Frobenius norm, so that no singular value exceeds 1: [..., m, n].

    First over its largest entry: squares of tiny or huge gradients leave float32.
    Zero stays zero.
    """
    tiny = torch.finfo(G.dtype).tiny
    G = G / G.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    return G / torch.linalg.matrix_norm(G, keepdim=True).clamp_min(1)


def newton_schulz(G: Tensor, steps: int = 5,
                  coefficients: tuple[float, float, float] = COEFFICIENTS) -> Tensor:
    """About U V^T, by `steps` of the iteration above: [..., m, n] -> [..., m, n].

    Every matrix of a stack on its own, in the dtype of G. A is taken on the narrow
    side, min(m, n) wide: the same result for less. (Jordan et al. 2024.)
    """
    check_matrix(G)
    if steps < 0:
        raise InputError(f"steps is {steps}; it must be at least 0")
    (a, b, c), tall = coefficients, G.shape[-2] > G.shape[-1]
    X = normalize(G.mT if tall else G)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


def orthogonalize_exact(G: Tensor) -> Tensor:
    """U V^T from the decomposition, the reference: [..., m, n] -> [..., m, n].

    Directions that G lacks (singular values at rounding error) stay 0, as they do in
    the iteration; a zero G gives 0.
    """
    check_matrix(G)
    U, s, Vh = torch.linalg.svd(G, full_matrices=False)
    floor = s[..., :1] * torch.finfo(G.dtype).eps * max(G.shape[-2:])
    return (U * (s > floor).to(G.dtype)[..., None, :]) @ Vh


def per_head(G: Tensor, num_heads: int, fn=newton_schulz) -> Tensor:
    """fn of every head's rows on their own: [..., H h, n] -> [..., H h, n].

    fn takes a stack [..., H, h, n]. Whole matrices let a head with large gradients
    decide for the others (Kimi K3 report, section 2.5; for Q, K and V, whose heads are
    rows). The rows of `kv_b_proj` are K and V of a head in turn: where both are equally
    wide, 2 H blocks part them, too.
    """
    check_matrix(G)
    check_heads(G, num_heads)
    return fn(G.unflatten(-2, (num_heads, -1))).flatten(-3, -2)


def check_heads(G: Tensor, num_heads: int) -> None:
    if num_heads < 1 or G.shape[-2] % num_heads:
        rows = G.shape[-2]
        raise InputError(f"num_heads is {num_heads}; it must divide the {rows} rows")


def muon_direction(momentum: Tensor, num_heads: int | None = None, steps: int = 5,
                   rms: float = 0.2) -> Tensor:
    """What a step goes along: rms sqrt(max(m, n)) O, [..., m, n] -> [..., m, n].

    (Moonlight, arXiv 2502.16982.) num_heads: every head on its own. m and n are those
    of the block, [h, n], so that the RMS of the update is the same either way.
    """
    def direction(M: Tensor) -> Tensor:
        O = newton_schulz(M, steps)
        return rms * math.sqrt(max(O.shape[-2:])) * O

    if num_heads is None:
        return direction(momentum)
    return per_head(momentum, num_heads, direction)


# --- the optimiser --------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Muon for matrices [m, n], and for stacks of them [E, m, n] such as experts.

        Muon([{"params": queries, "num_heads": 96}, {"params": others}], lr=1e-3)

    Vectors have no directions to level, and an embedding is a list of them: both stay
    with AdamW. Weight decay is decoupled, lr weight_decay W (arXiv 2502.16982).
    A group may set lr, momentum, nesterov, weight_decay, steps, rms, and num_heads
    (None: the whole matrix). The state of a parameter is its `momentum_buffer`.
    InputError for a parameter that is no matrix, for heads that do not divide its rows,
    and for values out of range.
    """

    def __init__(self, params, lr: float = 1e-3, momentum: float = 0.95,
                 nesterov: bool = True, weight_decay: float = 0.1, steps: int = 5,
                 num_heads: int | None = None, rms: float = 0.2):
        super().__init__(params, dict(
            lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
            steps=steps, num_heads=num_heads, rms=rms))

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure=None):
        """One step for every parameter with a gradient. -> the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)
        return loss

    def update(self, p: Tensor, group: dict) -> None:
        """The equations at the top of the file, in place."""
        state, mu, lr = self.state[p], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        M = state["momentum_buffer"].mul_(mu).add_(p.grad)
        ahead = p.grad + mu * M if group["nesterov"] else M
        p.mul_(1 - lr * group["weight_decay"])
        direction = muon_direction(
            ahead, group["num_heads"], group["steps"], group["rms"])
        p.add_(direction, alpha=-lr)


def check_group(group: dict) -> None:
    allowed = {"lr": group["lr"] >= 0, "momentum": 0 <= group["momentum"] < 1,
               "weight_decay": group["weight_decay"] >= 0, "steps": group["steps"] >= 0}
    for name, good in allowed.items():
        if not good:
            need = "in [0, 1)" if name == "momentum" else "at least 0"
            raise InputError(f"{name} is {group[name]}; it must be {need}")
    for p in group["params"]:
        if p.ndim not in (2, 3):
            raise InputError(f"a parameter is {list(p.shape)}; Muon takes matrices "
                             "[m, n] or stacks [E, m, n], the rest goes to AdamW")
        if group["num_heads"] is not None:
            check_heads(p, group["num_heads"])


# --- QK-Clip --------------------------------------------------------------------------

@torch.no_grad()
def largest_logits(mla: MLA, x: Tensor) -> Tensor:
    """The largest logit of each head, over batch and causal pairs: x [B,T,d] -> [H].

    S_max = max scale q_t . k_j, j <= t (Kimi K2 report, arXiv 2507.20534).
    """
    q, latent = mla.queries(x), mla.latents(x)
    if mla.rope_base is not None:
        q, latent = mla.rotate(q, latent, 0, None)
    k, _ = expand(latent, mla.kv_b_proj.weight.unflatten(0, (mla.num_heads, -1)),
                  mla.v_dim)
    logits, T = upcast(q @ k.mT) * mla.scale, x.shape[1]                # [B, H, T, T]
    mask = causal_mask(T, T, device=x.device)
    return logits.masked_fill(~mask, -torch.inf).amax((0, 2, 3))


def qk_clip(max_logits: Tensor, tau: float = 100.0) -> Tensor:
    """gamma = min(1, tau / S_max) of every head: [H] -> [H].

    Exactly 1 for a head that stays below tau (Kimi K2 report, arXiv 2507.20534).
    """
    if not tau > 0:
        raise InputError(f"tau is {tau}; it must be above 0")
    if not bool(max_logits.isfinite().all()):
        raise InputError("max_logits holds NaN or infinity; it must be finite")
    return tau / max_logits.clamp_min(tau)


@torch.no_grad()
def apply_qk_clip_(mla: MLA, gamma: Tensor) -> None:
    """Shrink weights, so that the logits of head h shrink by gamma_h: gamma [H].

    A logit is q_own . k_own + q_shared . k_shared. A head's own parts of query and key
    take sqrt(gamma) each; k_shared belongs to all heads and stays, so that q_shared
    takes gamma alone (Kimi K2 report, arXiv 2507.20534). In place, after a step; the
    forward pass knows nothing of it. (K3 keeps the mechanism, report section 3.3, and
    does not say what it does with its shared part, which is not rotated.)
    """
    H, N = mla.num_heads, mla.nope_dim
    if gamma.shape != (H,) or not bool(((gamma > 0) & (gamma <= 1)).all()):
        got = f"gamma is {gamma.tolist()}"
        raise InputError(f"{got}; it must be {H} numbers above 0 and at most 1")
    last = mla.q_proj if hasattr(mla, "q_proj") else mla.q_b_proj
    q = last.weight.unflatten(0, (H, -1))                               # [H, N+R, in]
    kv = mla.kv_b_proj.weight.unflatten(0, (H, -1))                     # [H, N+V, L]
    gamma = gamma.double()[:, None, None]
    root = gamma.sqrt().to(q)
    q[:, :N] *= root
    q[:, N:] *= gamma.to(q)
    kv[:, :N] *= root
