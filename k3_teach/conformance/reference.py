"""K3 and Kimi Linear once more, from the equations alone: NumPy, float64, one token after
another. It shares no line with the rest of the package, and computes what the kit expects.

    logits, trace = forward(config, weights, ids)

`config` is the released `config.json` as a dictionary, `weights` the stored tensors, `ids`
[T] one text. There is no cache and no padding: the kit asks a port to give, in pieces and
in batches, what this gives at once.

Shapes: T tokens, d model width, H heads, K width of a key of KDA, n depth sources.
"""

import numpy as np

E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6]


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))      # never overflows


def softmax(x):
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    """weight * x / sqrt(mean x^2 + eps)."""
    return weight * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


class Weights:
    """The tensors of one module, by the rest of their names, in float64.

    weights: all tensors; prefix: "model.layers.3." and the like.
    """

    def __init__(self, weights, prefix=""):
        self.weights, self.prefix = weights, prefix

    def at(self, name):
        return Weights(self.weights, f"{self.prefix}{name}.")

    def has(self, name):
        return f"{self.prefix}{name}.weight" in self.weights

    def raw(self, name):
        return self.weights[self.prefix + name].astype(np.float64)

    def __call__(self, name):
        """The weight of `name`, decoded where it is MXFP4: two numbers in a byte, one
        power of two for 32 of them."""
        name = f"{self.prefix}{name}.weight"
        if name in self.weights:
            return self.weights[name].astype(np.float64)
        packed, scale = self.weights[f"{name}_packed"], self.weights[f"{name}_scale"]
        pairs = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1, 32)
        values = np.array(E2M1)[pairs] * 2.0 ** (scale[..., None].astype(int) - 127)
        return values.reshape(len(packed), -1)


# --- the two mixers -------------------------------------------------------------------

def convolve(x, w):
    """Causal, one filter per channel: x [T,P], w [P,1,W] -> SiLU(sum_j w_j x_{t-W+1+j})."""
    W = w.shape[-1]
    before = np.concatenate([np.zeros((W - 1, x.shape[1])), x])
    return silu(sum(before[j:j + len(x)] * w[:, 0, j] for j in range(W)))


def log_decay(z, A_log, dt_bias, lower_bound):
    """z [T,H,K], A_log [H], dt_bias [H,K] -> g [T,H,K]."""
    rate, z = np.exp(A_log)[:, None], z + dt_bias
    if lower_bound is None:
        return -rate * np.logaddexp(0, z)           # softplus
    return lower_bound * sigmoid(rate * z)


def kda(c, w, x, trace):
    """Kimi Delta Attention: x [T,d] -> [T,d]."""
    a = c["linear_attn_config"]
    H, K, T = a["num_heads"], a["head_dim"], len(x)
    heads = lambda y: y.reshape(T, H, K)
    q, k, v = (heads(convolve(x @ w(f"{n}_proj").T, w(f"{n}_conv1d"))) for n in "qkv")
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    z = heads(x @ w("f_a_proj").T @ w("f_b_proj").T)
    A_log, dt_bias = w.raw("A_log").flatten()[:H], w.raw("dt_bias").reshape(H, K)
    g = log_decay(z, A_log, dt_bias, a.get("gate_lower_bound"))
    beta = sigmoid(x @ w("b_proj").T)               # [T, H]
    S, o = np.zeros((H, K, K)), np.empty((T, H, K))
    for t in range(T):
        for h in range(H):
            S[h] = np.exp(g[t, h])[:, None] * S[h]              # forget
            u = beta[t, h] * (v[t, h] - S[h].T @ k[t, h])       # what is wrong under k
            S[h] = S[h] + np.outer(k[t, h], u)                  # correct it
            o[t, h] = S[h].T @ (q[t, h] * K ** -0.5)            # read
    gate = w("g_proj") if a.get("use_full_rank_gate") else w("g_b_proj") @ w("g_a_proj")
    y = rms(o, w("o_norm"), c["rms_norm_eps"]) * sigmoid(heads(x @ gate.T))
    trace.update(g=g, beta=beta, state=S)
    return y.reshape(T, -1) @ w("o_proj").T


def mla(c, w, x, trace):
    """Gated multi-head latent attention without positions: x [T,d] -> [T,d]."""
    H, N, V, T = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"], len(x)
    L, eps = c["kv_lora_rank"], 1e-6                # not rms_norm_eps
    if c.get("q_lora_rank") is None:
        q = x @ w("q_proj").T
    else:
        q = rms(x @ w("q_a_proj").T, w("q_a_layernorm"), eps) @ w("q_b_proj").T
    q = q.reshape(T, H, -1)                         # [T, H, N + R]
    latent = x @ w("kv_a_proj_with_mqa").T          # [T, L + R]
    kv = (rms(latent[:, :L], w("kv_a_layernorm"), eps) @ w("kv_b_proj").T).reshape(T, H, -1)
    o, weights = np.empty((T, H, V)), np.zeros((H, T, T))
    for h in range(H):
        keys = np.concatenate([kv[:, h, :N], latent[:, L:]], 1)     # the last R are shared
        scores = q[:, h] @ keys.T / np.sqrt(keys.shape[1])
        scores[np.triu_indices(T, 1)] = -np.inf                     # nothing later
        weights[h] = softmax(scores)
        o[:, h] = weights[h] @ kv[:, h, N:]
    o = o.reshape(T, -1)
    if c.get("mla_use_output_gate"):
        o = o * sigmoid(x @ w("g_proj").T)
    trace.update(attn_weights=weights)
    return o @ w("o_proj").T


# --- feed-forwards --------------------------------------------------------------------

def glu(c, gate, up):
    """SiTU-GLU, or SwiGLU where the configuration says silu."""
    if c["hidden_act"] == "silu":
        return silu(gate) * up
    b, b_up = c.get("activation_situ_beta") or 1.0, c.get("activation_situ_linear_beta")
    up = up if b_up is None else b_up * np.tanh(up / b_up)
    return b * np.tanh(gate / b) * sigmoid(gate) * up


def mlp(c, w, x, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return glu(c, x @ w(gate).T, x @ w(up).T) @ w(down).T


def moe(c, w, x, trace):
    """Routed experts, in a latent where there is one, beside shared ones: x [T,d] -> [T,d]."""
    k, E = c["num_experts_per_token"], c["num_experts"]
    scores = sigmoid(x @ w("gate").T)                               # [T, E], of the full x
    biased = scores + w.at("gate").raw("e_score_correction_bias")
    latent = c.get("routed_expert_hidden_size") is not None
    z = x @ w("routed_expert_down_proj").T if latent else x
    u, chosen = np.zeros_like(z), np.argsort(-biased, -1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, chosen, -1)                # without the bias
    if c.get("moe_renormalize", True) and k > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = weights * c.get("routed_scaling_factor", 1.0)
    for e in range(E):
        t, slot = np.nonzero(chosen == e)
        if len(t):
            u[t] += weights[t, slot, None] * mlp(c, w.at(f"experts.{e}"), z[t], ("w1", "w3", "w2"))
    trace.update(topk_idx=chosen, topk_w=weights, scores=scores, latent=u)
    if latent and c.get("latent_moe_use_norm"):
        u = rms(u, w("routed_expert_norm"), c["rms_norm_eps"])      # after the sum
    y = u @ w("routed_expert_up_proj").T if latent else u
    return y + mlp(c, w.at("shared_experts"), x) if c.get("num_shared_experts") else y


# --- depth ----------------------------------------------------------------------------

def read(c, w, name, sources):
    """A depth read over sources [n,T,d], oldest first -> [T,d] and its weights [T,n]."""
    query = w(f"{name}_res_norm") * w(f"{name}_res_proj")[0]
    keys = rms(sources, 1.0, c["rms_norm_eps"])
    a = softmax((keys @ query).T)                                   # [T, n]
    return np.einsum("tn,ntd->td", a, sources), a


def forward(config: dict, weights: dict, ids) -> tuple[np.ndarray, dict]:
    """ids [T] -> logits [T,vocab], and a trace by the names of `K3Model.forward`."""
    c = config.get("text_config", config)
    weights = {name.removeprefix("language_model."): x for name, x in weights.items()}
    w, block = Weights(weights, "model."), c.get("attn_res_block_size")
    trace, sealed, prefix = {}, [], w("embed_tokens")[ids]
    for i in range(c["num_hidden_layers"]):
        layer, seen = w.at(f"layers.{i}"), {}
        sources = lambda: np.stack(sealed + ([] if prefix is None else [prefix]))
        h = prefix
        if block and sealed:
            h, seen["attn_read"] = read(c, layer, "self_attention", sources())
        if block and i % block == 0:            # read first, then seal
            sealed, prefix = [*sealed, prefix], None
        mixer = kda if i + 1 in c["linear_attn_config"]["kda_layers"] else mla
        x = rms(h, layer("input_layernorm"), c["rms_norm_eps"])
        a = mixer(c, layer.at("self_attn"), x, seen)
        seen.update(attn_in=h, attn_out=a)
        prefix = a if prefix is None else prefix + a
        h = prefix
        if block:
            h, seen["mlp_read"] = read(c, layer, "mlp", sources())
        x = rms(h, layer("post_attention_layernorm"), c["rms_norm_eps"])
        routed = c.get("num_experts", 0) and i >= c["first_k_dense_replace"]
        routed = routed and i % c.get("moe_layer_freq", 1) == 0
        m = moe(c, layer.at("block_sparse_moe"), x, seen) if routed else mlp(c, layer.at("mlp"), x)
        prefix = prefix + m
        seen.update(mlp_in=h, mlp_out=m, prefix=prefix, nblocks=np.array(len(sealed)))
        trace.update({f"L{i}.{name}": value for name, value in seen.items()})
    h = prefix
    if block:
        h, trace["output_read"] = read(c, w, "output_attn", np.stack([*sealed, prefix]))
    y = rms(h, w("norm"), c["rms_norm_eps"])
    trace.update(pre_norm=h, post_norm=y)
    tied = c.get("tie_word_embeddings")
    head = w("embed_tokens") if tied else Weights(weights)("lm_head")
    return y @ head.T, trace
