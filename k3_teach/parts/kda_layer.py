"""The Kimi Delta Attention layer: what stands around the recurrence of `kda.py`.

    q, k, v = SiLU(conv4(W x))                  three short causal convolutions
    q = q / |q| / sqrt(K),   k = k / |k|        per head
    g = -5 sigmoid(e^A (z + b))                 log decay, in (-5, 0); A per head, and
        z = W_fb W_fa x                           z, b per head and key channel
    beta = sigmoid(W_b x)                       write strength per head
    o = delta rule(q, k, v, g, beta)
    y = W_o (RMSNorm(o) * sigmoid(W_g x))       norm per head, then the output gate
                                                (Kimi K3 report, section 2.1)

A and b are learned: `A_log` and `dt_bias` in the released file.

Shapes: B batch, T tokens, d model width, H heads, K width of a key, V of a value (in K3
V = K), P = H K channels, W width of a convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.parts.kda import chunk_kda
from k3_teach.parts.kda_fla import fla_kda, fla_refuses
from k3_teach.parts.kda_step import step_kda
from k3_teach.parts.norm import rms_normalize
from k3_teach.parts.precision import KeepFloat32, float32_parameter, upcast


def short_conv(x: Tensor, weight: Tensor, taps: Tensor | None = None
               ) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution of width W, then SiLU (Kimi K3 report, section 2.1).

        y_t = SiLU(sum_j w[:, j] x_{t-W+1+j})        the last tap is the current token

    x [B,T,P], weight [P,1,W], taps [B,W-1,P] (the inputs before x; None: zeros)
    -> y [B,T,P], the next taps [B,W-1,P]. In float32, with one cast at the end.
    """
    T, W = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, W - 1, 0)) if taps is None else torch.cat((taps, x), 1)
    exact, w = upcast(padded), upcast(weight).flatten(1).unbind(1)      # W times [P]
    y = exact[:, :T] * w[0]
    for j in range(1, W):       # in place: new memory would cost more than the products
        y.addcmul_(exact[:, j:j + T], w[j])
    # The taps are copied: a view would keep the whole text in memory.
    return F.silu(y).to(x.dtype), padded[:, T:].clone()


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last axis; eps is on the sum, not the mean.

    x [..., K] -> [..., K] in float32 (Kimi K3 report, section 2.1; eps: released code).
    """
    x = upcast(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def bounded_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor,
                 lower_bound: float) -> Tensor:
    """K3's log decay `lower_bound sigmoid(e^A (z + b))`, between lower_bound and 0.

    z [B,T,H,K], A_log [H] (one per head), dt_bias [H,K] -> g [B,T,H,K] in float32
    (Kimi K3 report, eq. 5).
    """
    z = upcast(z) + upcast(dt_bias)
    return lower_bound * torch.sigmoid(upcast(A_log).exp()[:, None] * z)


def softplus_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Kimi Linear's log decay `-e^A softplus(z + b)` (arXiv 2510.26692).

    It has no lower bound, and a model trained with one gate cannot use the other.
    Shapes as in `bounded_gate`.
    """
    return -upcast(A_log).exp()[:, None] * F.softplus(upcast(z) + upcast(dt_bias))


class ShortConv(KeepFloat32, nn.Module):
    """The weights [P,1,W] of one short convolution, in float32. See `short_conv`."""

    float32_names = ("weight",)

    def __init__(self, channels: int, width: int):
        super().__init__()
        bound = width ** -0.5
        weight = torch.empty(channels, 1, width).uniform_(-bound, bound)
        self.weight = float32_parameter(weight)

    def forward(self, x: Tensor, taps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return short_conv(x, self.weight, taps)


class GatedHeadNorm(KeepFloat32, nn.Module):
    """`RMSNorm(o) sigmoid(gate)` per head, all of it in float32.

    o and gate [B,T,H,V] -> [B,T,H,V]. One weight [V] serves all heads.
    """

    float32_names = ("weight",)

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = float32_parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, o: Tensor, gate: Tensor) -> Tensor:
        normed = rms_normalize(o, self.eps) * upcast(self.weight)
        return normed * torch.sigmoid(upcast(gate))


class KDA(KeepFloat32, nn.Module):
    """The layer (Kimi K3 report, section 2.1): x [B,T,d] -> [B,T,d].

    `state` (a KDAState) keeps a K x V matrix per head and W-1 inputs per convolution,
    however long the text. `mask` [B,S] over the S tokens so far is False at padding,
    which neither writes to the state nor lets it decay.
    Into the trace go g [B,T,H,K], beta [B,T,H], state [B,H,K,V].

    `gate_lower_bound` None: the softplus gate. `full_rank_gate` False: the output gate
    passes through `head_dim` channels.
    """

    float32_names = ("A_log", "dt_bias")

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int,
                 conv_size: int = 4, gate_lower_bound: float | None = -5.0,
                 full_rank_gate: bool = True, norm_eps: float = 1e-5):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.gate_lower_bound = gate_lower_bound
        d, rank, width = hidden_size, head_dim, num_heads * head_dim
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        conv = lambda: ShortConv(width, conv_size)
        self.q_proj, self.k_proj, self.v_proj = (linear(d, width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = conv(), conv(), conv()
        self.f_a_proj, self.f_b_proj = linear(d, rank), linear(rank, width)
        self.A_log = float32_parameter(torch.zeros(num_heads))
        self.dt_bias = float32_parameter(torch.zeros(width))
        self.b_proj = linear(d, num_heads)
        if full_rank_gate:
            self.g_proj = linear(d, width)
        else:
            self.g_a_proj, self.g_b_proj = linear(d, rank), linear(rank, width)
        self.o_norm = GatedHeadNorm(head_dim, norm_eps)
        self.o_proj = linear(width, d)

    def heads(self, x: Tensor) -> Tensor:
        """[..., H K] -> [..., H, K]."""
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def log_decay(self, x: Tensor) -> Tensor:
        """x [B,T,d] -> g [B,T,H,K]. There is no activation between the projections."""
        z = self.heads(self.f_b_proj(self.f_a_proj(x)))
        dt_bias = self.heads(self.dt_bias)
        if self.gate_lower_bound is None:
            return softplus_gate(z, self.A_log, dt_bias)
        return bounded_gate(z, self.A_log, dt_bias, self.gate_lower_bound)

    def output_gate(self, x: Tensor) -> Tensor:
        """x [B,T,d] -> logits of the gate [B,T,H,V]."""
        if hasattr(self, "g_proj"):
            return self.heads(self.g_proj(x))
        return self.heads(self.g_b_proj(self.g_a_proj(x)))

    def forward(self, x: Tensor, state=None, mask: Tensor | None = None,
                trace: dict | None = None) -> Tensor:
        T = x.shape[1]
        padding = None if mask is None else ~mask[:, -T:, None]         # [B, T, 1]
        if padding is not None:
            x = x.masked_fill(padding, 0)       # whatever is there, even NaN
        taps = (None,) * 3 if state is None or state.taps is None else state.taps
        q, q_taps = self.q_conv1d(self.q_proj(x), taps[0])              # [B, T, H K]
        k, k_taps = self.k_conv1d(self.k_proj(x), taps[1])
        v, v_taps = self.v_conv1d(self.v_proj(x), taps[2])
        q = l2_normalize(self.heads(q)) * self.head_dim ** -0.5         # [B, T, H, K]
        k = l2_normalize(self.heads(k))
        v = self.heads(v)
        g, beta = self.log_decay(x), torch.sigmoid(upcast(self.b_proj(x)))
        if padding is not None:                 # neither forgets nor writes
            g = g.masked_fill(padding[..., None], 0)
            beta = beta.masked_fill(padding, 0)
        S = None if state is None else state.S
        bound = self.gate_lower_bound
        if fla_refuses(v) is None:       # CUDA, 16 bits, and it is installed
            o, S = fla_kda(q, k, v, g, beta, S, bound)                  # [B, T, H, V]
        elif T == 1:                     # decoding: one step needs no chunk
            o, S = step_kda(q, k, v, g, beta, S)
        else:
            o, S = chunk_kda(q, k, v, g, beta, S, gate_lower_bound=bound)
        if state is not None:
            state.S, state.taps = S, (q_taps, k_taps, v_taps)
        if trace is not None:
            trace.update(g=g, beta=beta, state=S)
        y = self.o_norm(o, self.output_gate(x)).to(x.dtype)
        return self.o_proj(y.flatten(2))
