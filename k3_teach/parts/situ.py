"""Inside an expert: two branches, one of which gates the other.

    a = W_gate x,   b = W_up x,   y = W_down z       x, y [d];  a, b, z [m]

    GLU       z = sigmoid(a) * b                     (Dauphin et al., arXiv 1612.08083)
    SwiGLU    z = a sigmoid(a) * b                   (Shazeer, arXiv 2002.05202)
    SiTU-GLU  z = softcap(a, 4) sigmoid(a) * softcap(b, 25)
              softcap(v, beta) = beta tanh(v / beta) (Kimi K3 report, section 2.3.2)

Near zero SiTU-GLU is SwiGLU; far out |z| stays below 4 * 25 = 100.
The sigmoid sees the gate before it is capped.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.errors import InputError
from k3_teach.parts.precision import upcast


def softcap(x: Tensor, beta: float | None) -> Tensor:
    """`beta tanh(x / beta)`: the identity near zero, never beyond +-beta.

    beta None: no cap. Any shape. (Kimi K3 report, section 2.3.2.)
    """
    return x if beta is None else beta * torch.tanh(x / beta)


def glu(gate: Tensor, up: Tensor) -> Tensor:
    """Gated linear unit (arXiv 1612.08083). gate, up [..., m] -> [..., m]."""
    return torch.sigmoid(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """GLU with the gate itself as a factor (arXiv 2002.05202), as in Kimi Linear.

    gate, up [..., m] -> [..., m].
    """
    return F.silu(gate) * up


def situ_glu(gate: Tensor, up: Tensor, beta: float = 4.0,
             linear_beta: float | None = 25.0) -> Tensor:
    """SiTU-GLU (Kimi K3 report, section 2.3.2), in float32 with one cast at the end.

    `beta` caps the linear factor of the gate, `linear_beta` the up branch (None: not),
    so that |z| <= beta linear_beta. gate, up [..., m] -> [..., m].
    """
    a, b = upcast(gate), upcast(up)
    z = softcap(a, beta) * torch.sigmoid(a) * softcap(b, linear_beta)
    return z.to(gate.dtype)


class _SituGLU(torch.autograd.Function):
    """SiTU-GLU and its derivative, written out:

        z = beta linear_beta t s u       t = tanh(a / beta),  s = sigmoid(a),
                                         u = tanh(b / linear_beta)
        dz/da = linear_beta s u (1 - t^2 + beta t (1 - s))
        dz/db = beta s t (1 - u^2)

    Only t, s and u are kept, and what is in between is overwritten.
    """

    @staticmethod
    def forward(ctx, a, b, beta, linear_beta):
        t, s, u = (a / beta).tanh_(), a.sigmoid(), (b / linear_beta).tanh_()
        ctx.save_for_backward(t, s, u)
        ctx.caps = beta, linear_beta
        return (t * s).mul_(u).mul_(beta * linear_beta)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():     # autograd would take t, s, u for constants
            raise InputError("situ_glu_lean has no second derivative; situ_glu has")
        (t, s, u), (beta, linear_beta) = ctx.saved_tensors, ctx.caps
        grad = grad * s
        slope = (1 - s).mul_(t).mul_(beta).add_(1).addcmul_(t, t, value=-1)
        grad_a = slope.mul_(u).mul_(linear_beta).mul_(grad)
        grad_b = grad.mul_(t).mul_(beta).mul_(1 - u * u)
        return grad_a, grad_b, None, None


def situ_glu_lean(gate: Tensor, up: Tensor, beta: float = 4.0,
                  linear_beta: float | None = 25.0) -> Tensor:
    """The same as `situ_glu` with half the memory in training.

    (Kimi K3 report, section 2.3.2.) Shapes as there. It has no second derivative
    and does not work in torch.func; the other one does.
    """
    if linear_beta is None:
        return situ_glu(gate, up, beta, None)
    z = _SituGLU.apply(upcast(gate), upcast(up), beta, linear_beta)
    return z.to(gate.dtype)


class Activation(nn.Module):
    """The two-branch activation that a configuration names: "situ" or "silu" (SwiGLU).

    gate, up [..., m] -> [..., m]. beta None means 1, linear_beta None no cap, as in the
    released configuration class. InputError for another name.
    """

    def __init__(self, hidden_act: str = "situ", beta: float | None = 4.0,
                 linear_beta: float | None = 25.0):
        super().__init__()
        if hidden_act not in ("situ", "silu"):
            allowed = "'situ' or 'silu'"
            raise InputError(f"hidden_act is {hidden_act!r}; it must be {allowed}")
        self.hidden_act, self.beta = hidden_act, beta or 1.0
        self.linear_beta = linear_beta

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.hidden_act == "silu":
            return swiglu(gate, up)
        return situ_glu_lean(gate, up, self.beta, self.linear_beta)

    def extra_repr(self) -> str:
        caps = f", beta={self.beta}, linear_beta={self.linear_beta}"
        return self.hidden_act + (caps if self.hidden_act == "situ" else "")


class GatedMLP(nn.Module):
    """`W_down act(W_gate x, W_up x)`: the dense feed-forward, and the shared experts.

    Shared experts are one such network, as wide as all of them together: the same sum.
    x [..., d] -> [..., d]. It is called like an MoE and puts nothing into the trace.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, act: Activation):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = act

    def forward(self, x: Tensor, trace: dict | None = None) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
