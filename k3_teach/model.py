"""The model: embed, 93 layers around one residual stream, a last depth read, the head.

    ids -> embed
        -> L x [ read -> norm -> mixer        -> add
                 read -> norm -> feed-forward -> add ]
        -> read -> norm -> head -> logits

Parameter names are the released ones (without the leading `model.`); only the experts
of a layer are stacked.

Shapes: B batch, T tokens, d model width, vocab the number of token ids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.cache import Cache, KDAState, LatentCache
from k3_teach.config import K3Config
from k3_teach.errors import InputError
from k3_teach.init import init_parameters
from k3_teach.parts.attn_res import PlainStream, TwoPhaseStream
from k3_teach.parts.kda_layer import KDA
from k3_teach.parts.latent_moe import LatentMoE
from k3_teach.parts.mla import MLA
from k3_teach.parts.moe import Experts, MoE, Router
from k3_teach.parts.norm import RMSNorm
from k3_teach.parts.precision import upcast
from k3_teach.parts.situ import Activation, GatedMLP
from k3_teach.validate import check_cache, check_ids, check_mask, check_place


def make_mixer(c: K3Config, layer: int) -> nn.Module:
    """KDA or MLA, as the configuration says for `layer` (counted from 0)."""
    if c.is_kda(layer):
        a = c.linear_attn_config
        return KDA(c.hidden_size, a.num_heads, a.head_dim, a.short_conv_kernel_size,
                   a.gate_lower_bound, a.use_full_rank_gate, c.rms_norm_eps)
    rope_base = None if c.mla_use_nope else c.rope_theta
    return MLA(c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim,
               c.qk_rope_head_dim, c.v_head_dim, c.q_lora_rank, c.mla_use_output_gate,
               rope_base)


def make_activation(c: K3Config) -> Activation:
    """SiTU or SiLU, for the dense feed-forward and for all experts."""
    beta, linear_beta = c.activation_situ_beta, c.activation_situ_linear_beta
    return Activation(c.hidden_act, beta, linear_beta)


def make_moe(c: K3Config) -> nn.Module:
    """Router, experts and shared branch; with or without a latent."""
    d, act = c.hidden_size, make_activation(c)
    gate = Router(d, c.num_experts, c.num_experts_per_token,
                  c.moe_router_activation_func, c.moe_renormalize,
                  c.routed_scaling_factor, c.num_expert_group, c.topk_group)
    experts = Experts(c.num_experts, c.expert_width, c.moe_intermediate_size, act,
                      c.initializer_range)
    shared_width = c.num_shared_experts * c.moe_intermediate_size
    shared = GatedMLP(d, shared_width, act) if c.num_shared_experts else None
    if c.routed_expert_hidden_size is None:
        return MoE(gate, experts, shared)
    norm_eps = c.rms_norm_eps if c.latent_moe_use_norm else None
    return LatentMoE(d, c.expert_width, gate, experts, shared, norm_eps)


def on_real_tokens(ffn: nn.Module, x: Tensor, real: Tensor | None, trace: dict | None
                   ) -> Tensor:
    """`ffn` on the tokens of x [B,T,d] where real [B,T] holds, and 0 at padding.

    A feed-forward treats each token by itself, so padding need not pass through it, and
    is not counted by its router. real None: no padding.
    """
    if real is None:
        return ffn(x, trace)
    out = ffn(x[real], trace)
    y = out.new_zeros(x.shape)      # in the dtype that autocast has given it
    y[real] = out
    return y


READS = "self_attention", "mlp"             # the depth reads of a layer, in their order


class DecoderLayer(nn.Module):
    """Two sub-layers, each: read the stream, normalise, compute, add.

    At the start of a block, the sum so far is sealed after the first read.
    """

    def __init__(self, c: K3Config, layer: int):
        super().__init__()
        d, eps = c.hidden_size, c.rms_norm_eps
        self.self_attn = make_mixer(c, layer)
        if c.is_moe(layer):
            self.block_sparse_moe = make_moe(c)
        else:
            self.mlp = GatedMLP(d, c.intermediate_size, make_activation(c))
        self.input_layernorm = RMSNorm(d, eps)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.depth_reads, self.starts_block = c.attn_res_block_size is not None, False
        if self.depth_reads:
            self.starts_block = layer % c.attn_res_block_size == 0
            for name in ("self_attention", "mlp"):
                self.add_module(f"{name}_res_norm", RMSNorm(d, eps))
                self.add_module(f"{name}_res_proj", nn.Linear(d, 1, bias=False))

    @property
    def ffn(self) -> nn.Module:
        return self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp

    def query(self, name: str) -> Tensor | None:
        """The learned query [d] of the read `name`, "self_attention" or "mlp".

        None where the residual is plain.
        """
        if not self.depth_reads:
            return None
        return depth_query(*self.query_factors(name))

    def query_factors(self, name: str) -> tuple[RMSNorm, nn.Linear]:
        """Where the release stores the factors of that query."""
        return getattr(self, f"{name}_res_norm"), getattr(self, f"{name}_res_proj")

    def forward(self, stream, state=None, mask: Tensor | None = None,
                trace: dict | None = None) -> None:
        """Read from `stream` and add to it.

        stream: a BlockStream or PlainStream over [B,T,d]; state: what the mixer keeps;
        mask [B, tokens so far], False at padding; trace: filled by every part.
        """
        attn_in = stream.read(self.query("self_attention"), trace, "attn_read")
        # Read first, then seal: this read still sees the sum that will be sealed.
        if self.starts_block:
            stream.seal()
        attn_out = self.self_attn(self.input_layernorm(attn_in), state, mask, trace)
        stream.add(attn_out)     # to the live sum, not to what was read
        mlp_in = stream.read(self.query("mlp"), trace, "mlp_read")
        real = None if mask is None else mask[:, -mlp_in.shape[1]:]   # the new tokens
        normed = self.post_attention_layernorm(mlp_in)
        mlp_out = on_real_tokens(self.ffn, normed, real, trace)
        stream.add(mlp_out)
        if trace is not None:
            trace.update(attn_in=attn_in, attn_out=attn_out, mlp_in=mlp_in,
                         mlp_out=mlp_out, prefix=stream.prefix,
                         nblocks=torch.tensor(stream.num_sealed))


def depth_query(norm: RMSNorm, proj: nn.Linear) -> Tensor:
    """The query [d] of a depth read: the gain of its key norm times its projection."""
    return norm.weight * proj.weight[0]


class K3Model(nn.Module):
    """A K3 text model of any configuration. See `forward`.

    `device="meta"` makes the shapes without memory. In a lower precision `dtype` the
    parameters that the release stores in float32 stay float32. `init` names the variant
    of `k3_teach.init`; seed it with `torch.manual_seed`. InputError for a dtype that is
    not floating-point, a device that is none, and another name of a variant.
    """

    def __init__(self, config: K3Config, device=None, dtype: torch.dtype | None = None,
                 init: str = "report"):
        super().__init__()
        check_place(config, dtype, device)
        self.config = c = config
        d, eps = c.hidden_size, c.rms_norm_eps
        with torch.device(device or "cpu"):
            # As in the release, the embedding of the padding token gets no gradient.
            self.embed_tokens = nn.Embedding(c.vocab_size, d, c.pad_token_id)
            layers = (DecoderLayer(c, i) for i in range(c.num_hidden_layers))
            self.layers = nn.ModuleList(layers)
            self.norm = RMSNorm(d, eps)
            if c.attn_res_block_size is not None:
                self.output_attn_res_norm = RMSNorm(d, eps)
                self.output_attn_res_proj = nn.Linear(d, 1, bias=False)
            self.lm_head = nn.Linear(d, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        init_parameters(self, init, c.initializer_range, c.pad_token_id)
        # The cast comes last: a seed gives the same model, rounded, in every dtype.
        if dtype is not None:
            self.to(dtype)

    def new_cache(self, batch_size: int = 1) -> Cache:
        """An empty cache for `forward`. InputError for a batch_size below 1."""
        if not isinstance(batch_size, int) or batch_size < 1:
            allowed = "a positive integer"
            raise InputError(f"batch_size is {batch_size!r}; it must be {allowed}")
        kda = [self.config.is_kda(i) for i in range(len(self.layers))]
        return Cache([KDAState() if k else LatentCache() for k in kda], batch_size)

    def last_query(self) -> Tensor | None:
        """The query [d] of the read after the last layer; None for a plain residual."""
        if self.config.attn_res_block_size is None:
            return None
        return depth_query(self.output_attn_res_norm, self.output_attn_res_proj)

    def new_stream(self, x: Tensor) -> PlainStream | TwoPhaseStream:
        """The residual stream over the embeddings x [B,T,d], for all layers in turn.

        It reads the query of every layer now, before the first layer runs.
        """
        if self.config.attn_res_block_size is None:
            return PlainStream(x)
        reads = [layer.query_factors(name) for layer in self.layers for name in READS]
        reads.append((self.output_attn_res_norm, self.output_attn_res_proj))
        gains, rows = zip(*((norm.weight, proj.weight) for norm, proj in reads))
        queries = torch.stack(gains) * torch.cat(rows)          # [2 L + 1, d]
        return TwoPhaseStream(x, self.config.rms_norm_eps, queries)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None,
                cache: Cache | None = None, return_trace: bool = False):
        """ids [B,T] -> logits [B,T,vocab] in the dtype of the model.

        attention_mask [B, cached + T]: false or 0 at padding, which must stand on the
            left; without a cache it may also stand on the right. What the logits are at
            padding has no meaning.
        cache: from `new_cache`; updated. One call serves for prefill, for prefill in
            pieces, and for decoding. No gradient is kept.
        return_trace: return (logits, trace), with trace["L3.attn_in"] and so on for
            every layer: attn_in, attn_out, mlp_in, mlp_out, prefix (the live sum as
            the layer ends) [B,T,d]; nblocks, the number of sources sealed by then;
            attn_read, mlp_read [B,T,n], the weights of the depth reads; of KDA g, beta,
            state; of MLA attn_weights [B,H,T,S]; of the experts topk_idx, topk_w,
            scores, latent, one row per real token. At the end: pre_norm, post_norm
            [B,T,d], output_read [B,T,n].

        InputError for ids, a mask or a cache that do not fit the model or each other;
        torch.compile does not look at the values of ids, nor may a cache leave
        inference mode there.
        """
        mask = self._check(ids, attention_mask, cache)
        if cache is None:
            states = [None] * len(self.layers)
            logits, trace = self._run(ids, mask, states, return_trace)
        else:
            # No gradient: a cache would keep the graph of all earlier calls.
            with torch.no_grad(), cache.all_or_nothing():
                logits, trace = self._run(ids, mask, cache.states, return_trace)
            cache.advance(ids.shape[1], mask)
        return (logits, trace) if return_trace else logits

    def _run(self, ids, mask, states, return_trace):
        trace = {} if return_trace else None
        x = self.embed_tokens(ids)                              # [B, T, d]
        if mask is not None:    # padding is 0 in every layer, whatever its embedding
            x = x.masked_fill(~mask[:, -ids.shape[1]:, None], 0)
        stream = self.new_stream(x)
        for i, (layer, state) in enumerate(zip(self.layers, states)):
            seen = {} if return_trace else None
            layer(stream, state, mask, seen)
            if return_trace:
                trace.update({f"L{i}.{name}": value for name, value in seen.items()})
        h = stream.read(self.last_query(), trace, "output_read")
        y = self.norm(h)
        if return_trace:
            trace.update(pre_norm=h, post_norm=y)
        return self.lm_head(y), trace                           # [B, T, vocab]

    def _check(self, ids, mask, cache) -> Tensor | None:
        """Refuse what cannot be meant. The mask [B, cached + T] over all tokens so far,
        or None if there is no padding."""
        check_ids(ids, self.config.vocab_size)
        rows, past, before = len(ids), 0, None
        if cache is not None:
            check_cache(cache, [self.config.is_kda(i) for i in range(len(self.layers))])
            if cache.batch_size != rows:
                held = cache.batch_size
                raise InputError(f"the cache holds {held} rows; ids has {rows}")
            past, before = len(cache), cache.mask
        if mask is not None:
            return check_mask(mask, ids, past, before, cache is not None)
        if before is None:
            return None
        return torch.cat((before, torch.ones_like(ids, dtype=torch.bool)), 1)


def next_token_loss(logits: Tensor, ids: Tensor, attention_mask: Tensor | None = None
                    ) -> Tensor:
    """Mean cross entropy of each token from the ones before it, in nats.

    logits [B,T,vocab], ids [B,T], attention_mask [B,T] or None -> a number. A token
    counts if it and the one before it are real. InputError for shapes that do not fit,
    for fewer than two tokens, and if no token counts.
    """
    if ids.ndim != 2 or ids.shape[1] < 2 or logits.shape[:-1] != ids.shape:
        raise InputError(f"ids has the shape {list(ids.shape)} and logits "
                         f"{list(logits.shape)}; they must be [B, T] and [B, T, "
                         "vocab], and a next-token loss needs at least two tokens")
    targets = ids[:, 1:]
    if attention_mask is not None:
        mask = check_mask(attention_mask, ids, 0, None, False)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        counts = real[:, 1:] & real[:, :-1]
        if not counts.any():
            raise InputError("attention_mask leaves no two real tokens in a row")
        targets = targets.masked_fill(~counts, -100)     # what cross_entropy leaves out
    return F.cross_entropy(upcast(logits[:, :-1]).flatten(0, 1), targets.flatten())
