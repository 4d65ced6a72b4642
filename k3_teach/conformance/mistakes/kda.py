"""Mistakes in Kimi Delta Attention: its gate, its norms, its chunks."""

from k3_teach.conformance.mistakes.mistake import Edit, Mistake
from k3_teach.parts.kda import _to_chunks
from k3_teach.parts.kda_chunk import decays, unit_lower_inverse
from k3_teach.parts.kda_layer import KDA, bounded_gate, l2_normalize, short_conv

GATE = "return lower_bound * torch.sigmoid(upcast(A_log).exp()[:, None] * z)"
DECAY = "g, beta = self.log_decay(x), torch.sigmoid(upcast(self.b_proj(x)))"

GATES = [
    Mistake(2, "A_log per channel", (Edit(
        bounded_gate, GATE, """
        A = F.pad(upcast(A_log).exp(), (0, z.shape[-1] - len(A_log)), value=1)
        return lower_bound * torch.sigmoid(A * z)
        """),)),
    Mistake(3, "a clamped softplus for the bounded gate", (Edit(
        bounded_gate, GATE, """
        g = -upcast(A_log).exp()[:, None] * F.softplus(z)
        return g.clamp_min(lower_bound)
        """),)),
    Mistake(2, "dt_bias outside the product with e^A", (Edit(
        bounded_gate,
        """
        z = upcast(z) + upcast(dt_bias)
        return lower_bound * torch.sigmoid(upcast(A_log).exp()[:, None] * z)
        """, """
        z = upcast(A_log).exp()[:, None] * upcast(z)
        return lower_bound * torch.sigmoid(z + upcast(dt_bias))
        """),)),
    Mistake(4, "the softplus gate whatever the configuration says", (Edit(
        KDA.log_decay,
        "if self.gate_lower_bound is None:",
        "if True:"),)),
    Mistake(4, "the bounded gate whatever the configuration says", (Edit(
        KDA.log_decay,
        "return softplus_gate(z, self.A_log, dt_bias)",
        "return bounded_gate(z, self.A_log, dt_bias, -5.0)"),),
        "a model with a bound is right as it is"),
    Mistake(32, "f_b_proj applied twice where a single token is decoded", (Edit(
        KDA.log_decay,
        "z = self.heads(self.f_b_proj(self.f_a_proj(x)))", """
        z = self.f_b_proj(self.f_a_proj(x))
        if x.shape[1] == 1:
            z = self.f_b_proj(z[..., :self.head_dim])
        z = self.heads(z)
        """),),
        "one pass over the whole text decodes nothing"),
    Mistake(32, "an activation between f_a_proj and f_b_proj", (Edit(
        KDA.log_decay,
        "z = self.heads(self.f_b_proj(self.f_a_proj(x)))",
        "z = self.heads(self.f_b_proj(F.silu(self.f_a_proj(x))))"),)),
    Mistake(33, "A_log and dt_bias of the gate exchanged", (Edit(
        KDA.log_decay,
        "return bounded_gate(z, self.A_log, dt_bias, self.gate_lower_bound)", """
        A, b = dt_bias[:, 0], self.A_log[:, None]
        return bounded_gate(z, A, b, self.gate_lower_bound)
        """),)),
]

NORMS = [
    Mistake(6, "l2 norm with eps on the mean", (Edit(
        l2_normalize,
        "return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)", """
        K = x.shape[-1]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * K ** -0.5
        """),),
        "keys of ordinary length are far above either eps"),
    Mistake(6, "l2 norm without eps", (Edit(
        l2_normalize,
        "return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)",
        "return F.normalize(x, dim=-1)"),),
        "keys of ordinary length are far above eps"),
    Mistake(31, "the weights of the convolutions in bfloat16", (Edit(
        short_conv,
        "exact, w = upcast(padded), upcast(weight).flatten(1).unbind(1)",
        "exact, w = upcast(padded), upcast(weight.bfloat16()).flatten(1).unbind(1)"),)),
]

CHUNKS = [
    Mistake(7, "decays rounded to bfloat16", (Edit(
        KDA.forward, DECAY, """
        g, beta = self.log_decay(x), torch.sigmoid(upcast(self.b_proj(x)))
        g = g.exp().bfloat16().to(g.dtype).log()
        """),)),
    Mistake(8, "the triangular inverse by power doubling, in float32", (Edit(
        unit_lower_inverse,
        "return torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)", """
        A, eye, exact = A.float(), eye.float(), A.dtype
        X, power = eye - A, A @ A
        while power.any():
            X, power = X @ (eye + power), power @ power
        return X.to(exact)
        """),),
        "exact on paper: it fails where keys are alike and decays slow"),
    Mistake(9, "decays of a chunk below e^-16 taken for e^-16", (Edit(
        decays,
        "e = (cut.runs @ g).exp()",
        "e = (cut.runs @ g).clamp_min(-16).exp()"),)),
    Mistake(10, "one anchor for a chunk, in float32", (Edit(
        decays,
        "e = (cut.runs @ g).exp()",
        "e = (cut.runs @ g).float().exp().to(g.dtype)"),)),
    Mistake(11, "a gate of -inf to reset the state at the end of a text", (Edit(
        KDA.forward,
        "g = g.masked_fill(padding[..., None], 0)",
        "g = g.masked_fill(padding[..., None], -torch.inf)"),),
        "without padding there is nothing to see"),
    Mistake(12, "decays of a tile counted from its last token", (Edit(
        decays,
        "up = up.unflatten(-2, (t, -1)) * cut.lift", """
        up = up.unflatten(-2, (t, -1)) * cut.lift
        last = up[..., -1:, :]
        up = (up / last) * last
        """),),
        "it changes the last bits alone: the result depends on the future by rounding"),
    Mistake(20, "the end of the last chunk filled up with its last token", (Edit(
        _to_chunks,
        "x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))",
        "x = torch.cat((x, x[:, -1:].expand(-1, -x.shape[1] % C, -1, -1)), 1)"),),
        "the outputs are right, only the state that is handed on is not"),
]

MISTAKES = [*GATES, *NORMS, *CHUNKS]
