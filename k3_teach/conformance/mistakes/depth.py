"""Mistakes in Attention Residuals and in the order of the layers."""

from k3_teach.config import K3Config
from k3_teach.conformance.mistakes.mistake import Edit, Mistake
from k3_teach.model import DecoderLayer, K3Model, depth_query
from k3_teach.parts.attn_res import BlockStream, TwoPhaseStream, merge_live, read_sealed, rms

MISTAKES = [
    Mistake(22, "the last snapshot doubles as scratch memory", (Edit(
        BlockStream.add,
        "self.prefix = y if self.prefix is None else self.prefix + y", """
        if self.prefix is None and self.sealed:
            y = self.sealed[-1].copy_(y)
        self.prefix = y if self.prefix is None else self.prefix + y
        """),)),
    Mistake(23, "half-way the sum is passed on, but not the snapshots", (Edit(
        K3Model._run,
        "layer(stream, state, mask, seen)", """
        if i == len(self.layers) // 2:
            stream.sealed, stream.waiting = [], []
        layer(stream, state, mask, seen)
        """),)),
    Mistake(24, "normalised sources are mixed", (
        Edit(read_sealed,
             'mixtures = torch.einsum("n...p,n...d->p...d", scores.softmax(0), u)', """
             u = rms_normalize(u, eps)
             mixtures = torch.einsum("n...p,n...d->p...d", scores.softmax(0), u)
             """),
        Edit(merge_live,
             "return torch.lerp(mixture, u, torch.sigmoid(score - log_sum)[..., None])", """
             u = rms_normalize(u, eps)
             return torch.lerp(mixture, u, torch.sigmoid(score - log_sum)[..., None])
             """))),
    Mistake(24, "the block size counted in sub-layers", (Edit(
        DecoderLayer.__init__,
        "self.starts_block = layer % c.attn_res_block_size == 0",
        "self.starts_block = layer % (c.attn_res_block_size // 2) == 0"),)),
    Mistake(24, "the read added to a plain residual", (Edit(
        TwoPhaseStream.read,
        "return h.to(self.sealed[0].dtype)", """
        h = h if self.prefix is None else h + self.prefix
        return h.to(self.sealed[0].dtype)
        """),)),
    Mistake(24, "scores divided by sqrt(d)", (Edit(
        rms,
        "return torch.sqrt(torch.linalg.vecdot(u, u) / u.shape[-1] + eps)",
        "return torch.sqrt(torch.linalg.vecdot(u, u) + eps * u.shape[-1])"),)),
    Mistake(24, "the query without the gain of its norm", (Edit(
        K3Model.new_stream,
        "queries = torch.stack(gains) * torch.cat(rows)",
        "queries = torch.cat(rows)"),
        Edit(depth_query,
             "return norm.weight * proj.weight[0]",
             "return proj.weight[0]"))),
    Mistake(37, "layer numbers read as counted from 0", (Edit(
        K3Config.is_kda,
        "return layer + 1 in self.linear_attn_config.kda_layers",
        "return layer in self.linear_attn_config.kda_layers"),)),
]
