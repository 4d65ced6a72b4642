"""Mistakes that others made with K3, made here on purpose: each changes one line of the package, and a test must notice.

`Mutant(number, what, file, old, new, test)`: the number of the pitfall in PITFALLS below (0: another known mistake), the
mistake in words, the file, the text to replace (it occurs once), its replacement, and the test that must fail.
"""

from typing import NamedTuple

PITFALLS = {  # what went wrong in public ports of K3 and Kimi Linear, from their issue threads
    1: "A_log is stored with 128 entries for 96 heads: cut blindly, or crashed on",
    2: "A_log applied per channel instead of per head",
    3: "the bounded gate coded as a clamped softplus",
    4: "the bounded gate used for a softplus model, or the other way round",
    5: "gate_lower_bound lost when the configuration is saved",
    6: "l2 norm through RMSNorm: the eps is 128 times too large",
    7: "decays rounded to bfloat16 before the recurrence",
    8: "the triangular inverse by power doubling",
    9: "tests with mild gates only",
    10: "one anchor for the decays of a whole chunk: overflow at the floor of the gate",
    11: "packed sequences whose boundary falls inside a tile",
    12: "decays counted from a later token: earlier results depend on later gates",
    13: "state handed on transposed",
    14: "prefill in pieces differs from one shot",
    15: "a one-token first piece reads a recycled state",
    16: "a cache cut back to a prefix although the recurrent state cannot be",
    17: "padding rows counted as tokens",
    18: "what stands in the padding flows into the rest",
    19: "left padding ignored by the hybrid layers",
    20: "resuming at a length that is not a multiple of the chunk",
    21: "state already advanced past rejected draft tokens",
    22: "a sealed snapshot overwritten",
    23: "a pipeline boundary that passes on the sum but not the snapshots",
    24: "normalised sources mixed, or block size read in sub-layers",
    25: "latent norm applied to partial sums",
    26: "a tensor silently not loaded",
    27: "router in bfloat16",
    28: "router bias stored in bfloat16",
    29: "expert outputs summed in bfloat16",
    30: "SiTU with one argument: the up branch is not capped",
    31: "convolution weights in the wrong dtype",
    32: "the second projection of the decay applied differently on another path",
    33: "positional arguments of a kernel in another order",
    34: "balancing runs in evaluation; k equal to the number of experts gives an infinite bias",
    35: "one eps for all norms",
    36: "the released file does not import with a newer transformers",
    37: "layer lists read as counted from 0",
    38: "gradients of replicated parameters not summed over tensor-parallel ranks",
    39: "the backward pass over a split sequence takes the wrong gate",
    40: "buffers of the cache reused or freed too early",
}

NOT_OURS = {
    9: "about tests; tests/parts/test_kda.py sweeps sums of g from -1e-3 to below -300",
    11: "no packed sequences in this package",
    23: "no pipeline here; tests/parts/test_attn_res.py::test_the_stack_can_be_cut_anywhere states what must cross a boundary",
    33: "no external kernel is called",
    36: "transformers is not used",
    38: "no tensor parallelism here",
}


class Mutant(NamedTuple):
    number: int
    what: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    Mutant(1, "cut A_log without looking", "checkpoint.py", "if x[shape[0]:].any():", "if False:", "test_checkpoint.py::test_padded_a_log"),
    Mutant(2, "A_log per channel", "parts/kda_layer.py", "torch.sigmoid(upcast(A_log).exp()[:, None]", "torch.sigmoid(F.pad(upcast(A_log).exp(), (0, z.shape[-1] - len(A_log)), value=1.0)", "parts/test_kda_layer.py::test_bounded_gate_is_a_scaled_sigmoid_and_no_clamp"),
    Mutant(3, "clamped softplus", "parts/kda_layer.py", "return lower_bound * torch.sigmoid(", "return softplus_gate(z, A_log, dt_bias).clamp_min(lower_bound)\n    return lower_bound * torch.sigmoid(", "parts/test_kda_layer.py::test_bounded_gate_is_a_scaled_sigmoid_and_no_clamp"),
    Mutant(4, "softplus always", "parts/kda_layer.py", "if self.gate_lower_bound is None:", "if True:", "test_golden.py::test_logits_and_every_trace"),
    Mutant(4, "bounded always", "parts/kda_layer.py", "return softplus_gate(z, self.A_log, dt_bias)", "return bounded_gate(z, self.A_log, dt_bias, -5.0)", "test_golden.py::test_logits_and_every_trace"),
    Mutant(5, "bound not written", "config.py", "for f in fields(LinearAttnConfig)}\n        own[", "for f in fields(LinearAttnConfig) if f.name != 'gate_lower_bound'}\n        own[", "test_config.py::test_lower_bound_survives_a_save"),
    Mutant(6, "eps on the mean", "parts/kda_layer.py", "torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)", "torch.rsqrt(x.square().sum(-1, keepdim=True) + eps * x.shape[-1])", "parts/test_kda_layer.py::test_l2_eps_is_on_the_sum"),
    Mutant(6, "eps on the mean, seen in the logits", "parts/kda_layer.py", "torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)", "torch.rsqrt(x.square().sum(-1, keepdim=True) + eps * x.shape[-1])", "test_golden.py::test_logits_and_every_trace"),
    Mutant(7, "decay in bfloat16", "parts/kda.py", "(q, k, v, g.exp(), beta)", "(q, k, v, g.exp().bfloat16().to(g.dtype), beta)", "parts/test_kda.py::test_long_memory_in_float32"),
    Mutant(8, "inverse by power doubling", "parts/kda.py", "return torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)", "X, P = eye - A, A @ A\n    while P.any():\n        X, P = X @ (eye + P), P @ P\n    return X", "parts/test_kda.py::test_slow_decay_with_similar_keys"),
    Mutant(10, "one anchor for a chunk", "parts/kda.py", "while leaf > 1 and -gate_lower_bound * leaf > room:", "while False:", "parts/test_kda.py::test_chunks_equal_the_recurrence"),
    Mutant(12, "anchor on the last token", "parts/kda.py", "G = from_first @ tile(g, leaf)", "G = from_first @ tile(g, leaf)\n    G = G - G[..., -1:, :]", "parts/test_kda.py::test_the_future_changes_no_bit"),
    Mutant(13, "state transposed", "parts/kda_layer.py", "state.S, state.taps = S, ", "state.S, state.taps = S.mT, ", "test_model.py::test_pieces_equal_one_shot"),
    Mutant(14, "state dropped by a longer piece", "parts/kda_layer.py", "S = None if state is None else state.S", "S = None if state is None or T > 1 else state.S", "test_model.py::test_pieces_equal_one_shot"),
    Mutant(14, "convolution inputs dropped", "parts/kda_layer.py", "if state is None or state.taps is None else", "if True else", "test_model.py::test_pieces_equal_one_shot"),
    Mutant(15, "one row too many is read", "cache.py", "return self.buffer[:, :self.length]", "return self.buffer[:, :self.length + 1]", "test_cache.py::test_recycled_memory_is_never_read"),
    Mutant(16, "any snapshot is taken", "cache.py", "default=to.length) < to.length:", "default=to.length) < 0:", "test_cache.py::test_replaced_tokens_cannot_be_returned_to"),
    Mutant(17, "padding is written into the state", "parts/kda_layer.py", "padding = None if mask is None else ~mask[:, -T:, None]", "padding = None", "parts/test_kda_layer.py::test_padding_on_either_side_leaves_the_state_alone"),
    Mutant(18, "padding multiplied by zero", "parts/kda_layer.py", "x = x.masked_fill(padding, 0)", "x = x * ~padding", "parts/test_kda_layer.py::test_padding_of_any_content_changes_nothing"),
    Mutant(18, "padding multiplied by zero in MLA", "parts/mla.py", "x = x.masked_fill(~mask[:, -T:, None], 0)", "x = x * mask[:, -T:, None]", "parts/test_mla.py::test_padding_of_any_content_changes_nothing"),
    Mutant(19, "keys of the padding visible", "parts/attention.py", "return causal & valid[:, None, None, :] | itself", "return causal.expand(len(valid), 1, T, S)", "test_model.py::test_left_padded_row_equals_the_row_alone"),
    Mutant(20, "inputs of the convolution forgotten after a short piece", "parts/kda_layer.py", "padded[:, T:].clone()", "F.pad(x, (0, 0, W, 0))[:, T + 1:].clone()", "parts/test_kda_layer.py::test_short_conv_continues_from_its_taps"),
    Mutant(21, "recurrent state not rolled back", "cache.py", "            s.restore(saved)", "            s.restore(saved) if isinstance(s, LatentCache) else None", "test_cache.py::test_rollback_is_exact"),
    Mutant(21, "convolution inputs not rolled back", "cache.py", "self.S, self.taps = saved", "self.S, _ = saved", "test_cache.py::test_rollback_is_exact"),
    Mutant(22, "last snapshot used as scratch", "parts/attn_res.py", "self.prefix = y if self.prefix is None else self.prefix + y", "self.prefix = self.sealed[-1].copy_(y) if self.prefix is None else self.prefix + y", "parts/test_attn_res.py::test_snapshots_are_written_once"),
    Mutant(24, "keys mixed instead of sources", "parts/attn_res.py", 'torch.einsum("n...,n...d->...d", a, u)', 'torch.einsum("n...,n...d->...d", a, rms_normalize(u, eps))', "parts/test_attn_res.py::test_values_are_raw_and_keys_are_normed"),
    Mutant(24, "raw scores", "parts/attn_res.py", "a = torch.softmax(rms_normalize(u, eps) @ upcast(query), 0)", "a = torch.softmax(u @ upcast(query), 0)", "parts/test_attn_res.py::test_values_are_raw_and_keys_are_normed"),
    Mutant(24, "block size in sub-layers", "model.py", "layer % c.attn_res_block_size == 0", "2 * layer % c.attn_res_block_size == 0", "parts/test_attn_res.py::test_model_reads_as_many_sources"),
    Mutant(25, "norm before the sum", "parts/latent_moe.py", "u = self.experts(self.routed_expert_down_proj(tokens), idx, weights)", "u = sum(self.routed_expert_norm(self.experts(self.routed_expert_down_proj(tokens), idx[:, [s]], weights[:, [s]])) for s in range(idx.shape[1]))", "parts/test_moe.py::test_latent_block_by_hand"),
    Mutant(26, "missing tensors accepted", "checkpoint.py", 'problems += [f"missing: {n}" for n in places if n not in stored.names]', "stored.read = lambda n, d, read=stored.read: read(n, d) if n in stored.names else torch.ones(())", "test_checkpoint.py::test_missing_extra_and_misshapen_in_one_error"),
    Mutant(27, "router in the dtype of the model", "parts/moe.py", "logits = F.linear(upcast(x), upcast(self.weight))", "logits = upcast(F.linear(x, self.weight))", "parts/test_moe.py::test_router_is_float32_in_a_bfloat16_model"),
    Mutant(28, "bias follows the model", "parts/moe.py", 'float32_names = ("e_score_correction_bias",)', "float32_names = ()", "parts/test_moe.py::test_router_is_float32_in_a_bfloat16_model"),
    Mutant(29, "experts summed in bfloat16", "parts/moe.py", "return torch.zeros_like(upcast(x)).index_add(0, token, out).to(x.dtype)", "return torch.zeros_like(x).index_add(0, token, out.to(x.dtype))", "parts/test_moe.py::test_experts_sum_in_float32"),
    Mutant(30, "up branch not capped", "parts/situ.py", "* softcap(b, linear_beta)", "* b", "parts/test_situ.py::test_both_branches_are_capped_everywhere"),
    Mutant(31, "convolution weights follow the model", "parts/kda_layer.py", 'float32_names = ("weight",)\n\n    def __init__(self, channels', "float32_names = ()\n\n    def __init__(self, channels", "parts/test_kda_layer.py::test_bfloat16_layer_keeps_what_the_release_keeps"),
    Mutant(32, "SiLU between the two projections", "parts/kda_layer.py", "self.f_b_proj(self.f_a_proj(x))", "self.f_b_proj(F.silu(self.f_a_proj(x)))", "parts/test_kda_layer.py::test_whole_layer_by_hand"),
    Mutant(34, "balancing in evaluation", "parts/balancer.py", "if not router.training or recomputing():", "if recomputing():", "parts/test_balance.py"),
    Mutant(35, "eps of the configuration in MLA", "parts/mla.py", "LATENT_NORM_EPS = 1e-6", "LATENT_NORM_EPS = 1e-5", "parts/test_mla.py::test_norms_inside_have_their_own_eps"),
    Mutant(35, "eps of the configuration in MLA, seen in the logits", "parts/mla.py", "LATENT_NORM_EPS = 1e-6", "LATENT_NORM_EPS = 1e-5", "test_golden.py::test_logits_and_every_trace"),
    Mutant(37, "layers counted from 0", "config.py", "return layer + 1 in self", "return layer in self", "test_config.py::test_layer_lists_count_from_one"),
    Mutant(39, "no gradient across segments", "parts/kda.py", "_segment(*part, S, ", "_segment(*part, S.detach(), ", "parts/test_kda.py::test_gradients_cross_segments"),
    Mutant(40, "old rows lost when the buffer grows", "cache.py", "grown[:, :self.length] = self.rows", "pass", "test_cache.py::test_first_use_growth_and_divergence"),
    Mutant(0, "decay after the correction", "parts/kda.py", "        S = S * decay_t[..., None]\n", "", "parts/test_kda.py::test_recurrence_against_numpy"),
    Mutant(0, "read before the update", "parts/kda.py", '        S = S + k_t[..., None] * u[..., None, :]\n        out.append(torch.einsum("bhkv,bhk->bhv", S, q_t))', '        out.append(torch.einsum("bhkv,bhk->bhv", S, q_t))\n        S = S + k_t[..., None] * u[..., None, :]', "parts/test_kda.py::test_recurrence_against_numpy"),
    Mutant(0, "no 1/sqrt(K) on q", "parts/kda_layer.py", "q = l2_normalize(self.heads(q)) * self.head_dim ** -0.5", "q = l2_normalize(self.heads(q))", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "beta doubled", "parts/kda_layer.py", "torch.sigmoid(upcast(self.b_proj(x)))", "2 * torch.sigmoid(upcast(self.b_proj(x)))", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "gate before the norm", "parts/kda_layer.py", "rms_normalize(o, self.eps) * upcast(self.weight)\n        return normed * torch.sigmoid(upcast(gate))", "rms_normalize(o * torch.sigmoid(upcast(gate)), self.eps) * upcast(self.weight)\n        return normed", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "scale of MLA from the 128 alone", "parts/mla.py", "self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5", "self.scale = qk_nope_head_dim ** -0.5", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "shared key normed", "parts/mla.py", "return torch.cat((self.kv_a_layernorm(c), shared), -1)", "return torch.cat((self.kv_a_layernorm(c), F.normalize(shared, dim=-1)), -1)", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "no gate in MLA", "parts/mla.py", "o if self.g_proj is None else o * torch.sigmoid(self.g_proj(x))", "o", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "sigmoid sees the capped gate", "parts/situ.py", "softcap(a, beta) * torch.sigmoid(a)", "softcap(a, beta) * torch.sigmoid(softcap(a, beta))", "parts/test_situ.py::test_sigmoid_sees_the_uncapped_gate"),
    Mutant(0, "bias in the mixture weights", "parts/moe.py", "weights = scores.gather(-1, idx)", "weights = (scores + bias).gather(-1, idx)", "parts/test_moe.py::test_bias_chooses_and_does_not_weigh"),
    Mutant(0, "no renormalisation", "parts/moe.py", "if renormalize and top_k > 1:", "if False:", "parts/test_moe.py::test_renormalisation_and_scaling"),
    Mutant(0, "router reads the latent", "parts/latent_moe.py", "idx, weights, scores = self.gate(tokens)", "idx, weights, scores = self.gate(self.routed_expert_up_proj(self.routed_expert_down_proj(tokens)))", "parts/test_moe.py::test_latent_block_by_hand"),
    Mutant(0, "no latent norm", "parts/latent_moe.py", "if self.routed_expert_norm is not None:", "if False:", "parts/test_moe.py::test_latent_block_by_hand"),
    Mutant(0, "nothing is ever sealed", "model.py", "        if self.starts_block:\n            stream.seal()\n", "", "parts/test_attn_res.py::test_model_reads_as_many_sources"),
    Mutant(0, "embedding stays in the sum", "parts/attn_res.py", "        self.prefix = None\n", "", "parts/test_attn_res.py::test_embedding_leaves_the_sum"),
    Mutant(0, "scores divided by sqrt(d)", "parts/attn_res.py", "@ upcast(query), 0)", "@ upcast(query) * u.shape[-1] ** -0.5, 0)", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "query without the gain of its norm", "model.py", "return norm.weight * proj.weight[0]", "return proj.weight[0]", "test_golden.py::test_logits_and_every_trace"),
    Mutant(0, "weight before the cast", "parts/norm.py", "return weight * rms_normalize(x, eps).to(x.dtype)", "return (weight.float() * rms_normalize(x, eps)).to(x.dtype)", "parts/test_norm.py::test_cast_comes_before_the_weight"),
    Mutant(0, "no causal mask in a later piece", "parts/attention.py", "if mask is None and 1 < T < S:", "if False:", "parts/test_attention.py::test_fused_and_eager_equal_the_loops"),
    Mutant(0, "high nibble first", "mxfp4.py", "torch.stack([element[byte & 15], element[byte >> 4]], -1)", "torch.stack([element[byte >> 4], element[byte & 15]], -1)", "test_golden.py::test_logits_and_every_trace"),
]
