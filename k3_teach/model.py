"""The model: embed, 93 layers around one residual stream, a last depth read, the head.

    ids -> embed -> L x [ read -> norm -> mixer -> add   read -> norm -> feed-forward -> add ] -> read -> norm -> head -> logits

Parameter names are the released ones (without the leading `model.`); only the experts of a layer are stacked.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3_teach.cache import Cache, KDAState, LatentCache
from k3_teach.config import K3Config
from k3_teach.errors import InputError
from k3_teach.init import init_parameters
from k3_teach.parts.attn_res import BlockStream, PlainStream
from k3_teach.parts.kda_layer import KDA
from k3_teach.parts.latent_moe import LatentMoE
from k3_teach.parts.mla import MLA
from k3_teach.parts.moe import Experts, MoE, Router
from k3_teach.parts.norm import RMSNorm
from k3_teach.parts.precision import upcast
from k3_teach.parts.situ import Activation, GatedMLP


def make_mixer(c: K3Config, layer: int) -> nn.Module:
    """KDA or MLA, as the configuration says for `layer` (counted from 0)."""
    if c.is_kda(layer):
        a = c.linear_attn_config
        return KDA(c.hidden_size, a.num_heads, a.head_dim, a.short_conv_kernel_size, a.gate_lower_bound,
                   a.use_full_rank_gate, c.rms_norm_eps)
    return MLA(c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
               c.q_lora_rank, c.mla_use_output_gate, None if c.mla_use_nope else c.rope_theta)


def make_moe(c: K3Config) -> nn.Module:
    """Router, experts and shared branch; with or without a latent."""
    act = Activation(c.hidden_act, c.activation_situ_beta, c.activation_situ_linear_beta)
    gate = Router(c.hidden_size, c.num_experts, c.num_experts_per_token, c.moe_router_activation_func, c.moe_renormalize,
                  c.routed_scaling_factor, c.num_expert_group, c.topk_group)
    experts = Experts(c.num_experts, c.expert_width, c.moe_intermediate_size, act, c.initializer_range)
    shared = GatedMLP(c.hidden_size, c.num_shared_experts * c.moe_intermediate_size, act) if c.num_shared_experts else None
    if c.routed_expert_hidden_size is None:
        return MoE(gate, experts, shared)
    return LatentMoE(c.hidden_size, c.expert_width, gate, experts, shared, c.rms_norm_eps if c.latent_moe_use_norm else None)


def on_real_tokens(ffn: nn.Module, x: Tensor, real: Tensor | None, trace: dict | None) -> Tensor:
    """A feed-forward treats each token by itself, so padding need not pass through it, nor be counted by its router."""
    if real is None:
        return ffn(x, trace)
    y = torch.zeros_like(x)
    y[real] = ffn(x[real], trace)
    return y


class DecoderLayer(nn.Module):
    """Two sub-layers, each: read the stream, normalise, compute, add. At the start of a block the sum so far is sealed."""

    def __init__(self, c: K3Config, layer: int):
        super().__init__()
        self.self_attn = make_mixer(c, layer)
        if c.is_moe(layer):
            self.block_sparse_moe = make_moe(c)
        else:
            act = Activation(c.hidden_act, c.activation_situ_beta, c.activation_situ_linear_beta)
            self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, act)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.depth_reads, self.starts_block = c.attn_res_block_size is not None, False
        if self.depth_reads:
            self.starts_block = layer % c.attn_res_block_size == 0
            for name in ("self_attention", "mlp"):
                self.add_module(f"{name}_res_norm", RMSNorm(c.hidden_size, c.rms_norm_eps))
                self.add_module(f"{name}_res_proj", nn.Linear(c.hidden_size, 1, bias=False))

    @property
    def ffn(self) -> nn.Module:
        return self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp

    def query(self, name: str) -> Tensor | None:
        """The learned query of a depth read, [d]: the gain of its key norm times its projection."""
        if not self.depth_reads:
            return None
        return depth_query(getattr(self, f"{name}_res_norm"), getattr(self, f"{name}_res_proj"))

    def forward(self, stream, state=None, mask: Tensor | None = None, trace: dict | None = None) -> None:
        """Reads from `stream` and adds to it. mask [B, tokens so far], False at padding."""
        attn_in = stream.read(self.query("self_attention"), trace, "attn_read")
        if self.starts_block:
            stream.seal()
        attn_out = self.self_attn(self.input_layernorm(attn_in), state, mask, trace)
        stream.add(attn_out)
        mlp_in = stream.read(self.query("mlp"), trace, "mlp_read")
        real = None if mask is None else mask[:, -mlp_in.shape[1]:]
        mlp_out = on_real_tokens(self.ffn, self.post_attention_layernorm(mlp_in), real, trace)
        stream.add(mlp_out)
        if trace is not None:
            trace.update(attn_in=attn_in, attn_out=attn_out, mlp_in=mlp_in, mlp_out=mlp_out, prefix=stream.prefix,
                         nblocks=torch.tensor(stream.num_sealed))


def depth_query(norm: RMSNorm, proj: nn.Linear) -> Tensor:
    return norm.weight * proj.weight[0]


class K3Model(nn.Module):
    """A K3 text model of any configuration. See `forward`.

    `device="meta"` makes the shapes without memory. In a lower precision `dtype` the parameters that the release stores in
    float32 stay float32. `init` names the variant of `k3_teach.init`; seed it with `torch.manual_seed`.
    """

    def __init__(self, config: K3Config, device=None, dtype: torch.dtype | None = None, init: str = "report"):
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise InputError(f"dtype is {dtype}; it must be a floating-point dtype")
        self.config = c = config
        with torch.device(device or "cpu"):
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_hidden_layers))
            self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
            if c.attn_res_block_size is not None:
                self.output_attn_res_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
                self.output_attn_res_proj = nn.Linear(c.hidden_size, 1, bias=False)
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        init_parameters(self, init, c.initializer_range, c.pad_token_id)
        if dtype is not None:
            self.to(dtype)

    def new_cache(self, batch_size: int = 1) -> Cache:
        """An empty cache for `forward`."""
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size is {batch_size!r}; it must be a positive integer")
        return Cache([KDAState() if self.config.is_kda(i) else LatentCache() for i in range(len(self.layers))], batch_size)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None, return_trace: bool = False):
        """ids [B,T] -> logits [B,T,vocab_size] in the dtype of the model.

        attention_mask [B, cached + T]: false or 0 at padding, which must stand on the left; without a cache it may also
            stand on the right. Logits at padding carry no meaning.
        cache: from `new_cache`; updated. One call serves for prefill, prefill in pieces, and decoding. No gradient is kept.
        return_trace: return (logits, trace). trace["L3.attn_in"] and so on, for every layer: attn_in, attn_out, mlp_in,
            mlp_out [B,T,d]; prefix [B,T,d], the running sum as the layer ends; nblocks, the sources sealed by then; attn_read,
            mlp_read [B,T,n], the weights of the depth reads; g, beta, state of KDA; attn_weights [B,H,T,S] of MLA; topk_idx,
            topk_w, scores, latent of the experts, one row per real token. At the end: pre_norm, post_norm, output_read.
        """
        mask = self._check(ids, attention_mask, cache)
        if cache is None:
            logits, trace = self._run(ids, mask, [None] * len(self.layers), return_trace)
        else:
            with torch.no_grad():
                logits, trace = self._run(ids, mask, cache.states, return_trace)
            cache.advance(ids.shape[1], mask)
        return (logits, trace) if return_trace else logits

    def _run(self, ids, mask, states, return_trace):
        trace = {} if return_trace else None
        x = self.embed_tokens(ids)
        blocks = self.config.attn_res_block_size is not None
        stream = BlockStream(x, self.config.rms_norm_eps) if blocks else PlainStream(x)
        for i, (layer, state) in enumerate(zip(self.layers, states)):
            seen = {} if return_trace else None
            layer(stream, state, mask, seen)
            if return_trace:
                trace.update({f"L{i}.{name}": value for name, value in seen.items()})
        query = depth_query(self.output_attn_res_norm, self.output_attn_res_proj) if blocks else None
        h = stream.read(query, trace, "output_read")
        y = self.norm(h)
        if return_trace:
            trace.update(pre_norm=h, post_norm=y)
        return self.lm_head(y), trace

    def _check(self, ids, mask, cache) -> Tensor | None:
        """Refuse what cannot be meant; return the mask over all tokens so far, or None if there is no padding."""
        vocab = self.config.vocab_size
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or ids.numel() == 0:
            got = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise InputError(f"ids is {got}; it must be an int64 tensor [B, T] with at least one token")
        if not (torch.compiler.is_compiling() or ids.is_meta) and (ids.min() < 0 or ids.max() >= vocab):
            raise InputError(f"ids holds {ids.min().item()} to {ids.max().item()}; token ids must be from 0 to {vocab - 1}")
        if cache is not None and (cache.batch_size != len(ids) or len(cache.states) != len(self.layers)):
            raise InputError(f"the cache holds {cache.batch_size} rows and {len(cache.states)} layers; ids has {len(ids)} rows "
                             f"and the model {len(self.layers)} layers")
        past, before = (0, None) if cache is None else (len(cache), cache.mask)
        if mask is None:
            return None if before is None else torch.cat((before, torch.ones_like(ids, dtype=torch.bool)), 1)
        return check_mask(mask, ids, past, before, cache is not None)


def check_mask(mask: Tensor, ids: Tensor, past: int, before: Tensor | None, cached: bool) -> Tensor | None:
    """The boolean mask [B, past + T], or None if nothing is padding."""
    shape = [len(ids), past + ids.shape[1]]
    if not isinstance(mask, Tensor) or list(mask.shape) != shape or mask.dtype.is_floating_point or mask.dtype.is_complex:
        got = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"attention_mask is {got}; it must be bool or integer, {shape}: it covers the {past} cached tokens too")
    mask = mask.to(device=ids.device, dtype=torch.bool)
    if past and not torch.equal(mask[:, :past], torch.ones_like(mask[:, :past]) if before is None else before):
        raise InputError("attention_mask says otherwise about the cached tokens than the masks they came with")
    if bool(mask.all()):
        return None
    left, right = ((mask[:, 1:] >= mask[:, :-1]).all(-1), (mask[:, 1:] <= mask[:, :-1]).all(-1))
    wrong = ~left if cached else ~(left | right)
    if bool(wrong.any()):
        where = "on the left when there is a cache" if cached else "on one side"
        raise InputError(f"attention_mask has padding after real tokens in row {wrong.nonzero()[0].item()}; padding must stand {where}")
    return mask


def next_token_loss(logits: Tensor, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Mean cross entropy of each token from the ones before it, in nats. Targets that are padding do not count.

    logits [B,T,vocab], ids [B,T], attention_mask [B,T] or None -> a number.
    """
    if ids.shape[1] < 2:
        raise InputError(f"ids has the shape {list(ids.shape)}; a next-token loss needs at least two tokens")
    targets = ids[:, 1:] if attention_mask is None else ids[:, 1:].masked_fill(~attention_mask[:, 1:].bool(), -100)
    return F.cross_entropy(upcast(logits[:, :-1]).flatten(0, 1), targets.flatten())
