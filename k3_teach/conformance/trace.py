"""What is compared of the inside of a port, and where to look when it is off.

A trace has an entry "L3.beta" for layer 3, counted from 0, and the entries of `END` for the
whole model. A port gives those that it has, with or without the axis of the batch.
"""

import numpy as np

# Per layer, in the order in which it is computed: the first that is off is the culprit.
LAYER = {
    "attn_read": "weights [T,n] of the depth read before attention: query res_norm * res_proj, "
                 "keys normalised, no scale; sealed sources oldest first, then the live sum",
    "attn_in": "what attention reads before its norm [T,d]: the weighted sum of raw sources, and "
               "the embedding in layer 0; which sources are sealed by now",
    "g": "log-decay [T,H,K] = gate_lower_bound * sigmoid(exp(A_log) * (f_b_proj f_a_proj x + "
         "dt_bias)), A_log one per head, nothing between f_a and f_b; x after input_layernorm",
    "beta": "sigmoid(b_proj x) [T,H]",
    "state": "[H,K,V] after the last token: k and v (projection, taps, SiLU, l2 norm of k alone), "
             "or decay, then delta rule. If this layer's attn_out is right, only its layout is not",
    "attn_weights": "softmax [H,T,T]: norms of the latents, heads of q_b_proj and kv_b_proj, the "
                    "shared part of the key (no norm, no rotation), 1 / sqrt(nope + rope), mask",
    "attn_out": "of attention, after o_proj [T,d]",       # see `place`
    "mlp_read": "weights [T,n] of the depth read before the feed-forward, the live sum being last "
                "and with this layer's attention in it",
    "mlp_in": "what the feed-forward reads before its norm [T,d]: the depth read before it; the "
              "live sum (attention is added to it, not to attn_in); which sources are sealed",
    "scores": "sigmoid of the router [T,E], on the full width after post_attention_layernorm, "
              "with inputs and weights in full precision",
    "topk_idx": "the chosen experts [T,k], in any order: by scores + e_score_correction_bias",
    "topk_w": "their weights [T,k]: scores without the bias, made to sum to 1, times "
              "routed_scaling_factor; in the order of topk_idx",
    "experts": "choice and weights of experts: chosen by scores + e_score_correction_bias, "
               "weighted by scores without it, made to sum to 1",
    "latent": "weighted sum of experts [T,latent] before its norm: routed_expert_down_proj, w1 "
              "gate, w3 up, SiTU, w2",
    "mlp_out": "of the feed-forward [T,d]",               # see `place`
    "prefix": "the live sum as the layer ends [T,d]: attn_out + mlp_out, and before them the sum "
              "so far unless this layer sealed it",
    "nblocks": "how many sources are sealed: one where layer % attn_res_block_size is 0",
}
END = {
    "output_read": "weights [T,n] of the last depth read, over all sealed sources and the live sum",
    "pre_norm": "the last depth read [T,d]: all sealed sources and the live sum",
    "post_norm": "the last norm [T,d]",
}
ATTENTION = {
    "KDA": "output of KDA [T,d]: q (taps, SiLU, l2 norm, 1 / sqrt(K)), the read after the update, "
           "o_norm, then the sigmoid of g_proj, o_proj",
    "MLA": "output of MLA [T,d]: values (the second part of kv_b_proj's heads), the sigmoid of "
           "g_proj x without a norm, o_proj",
}
FEED_FORWARD = {
    "dense MLP": "output of the dense MLP [T,d]: gate, up, SiTU, down; x after "
                 "post_attention_layernorm",
    "experts": "output of the experts [T,d]: routed_expert_norm after the sum, "
               "routed_expert_up_proj; the shared experts, on the full width",
}
MLA_LAYERS, DENSE_LAYERS = {3, 7}, {0}      # of the model `odd`


def known(key: str) -> bool:
    """Is it the name of an entry?"""
    layer, _, entry = key.rpartition(".")
    return entry in LAYER if layer[:1] == "L" and layer[1:].isdigit() else key in END


def place(key: str) -> str:
    """Of an entry of the model `odd`: the layer, its part, and what the entry is made of."""
    if key in END:
        return f"after the layers: {END[key]}"
    layer, entry = int(key[1:].split(".")[0]), key.split(".")[1]
    mixer = "MLA" if layer in MLA_LAYERS else "KDA"
    ffn = "dense MLP" if layer in DENSE_LAYERS else "experts"
    what = {"attn_out": ATTENTION[mixer], "mlp_out": FEED_FORWARD[ffn]}.get(entry, LAYER[entry])
    return f"layer {layer}, counted from 0 ({mixer} and {ffn}): {what}"


def as_computed(key: str) -> tuple[int, int]:
    """Sorts the keys of a trace: by layer, then as a layer computes them; the end last."""
    if key in END:
        return 10 ** 6, list(END).index(key)
    layer, entry = key[1:].split(".")
    return int(layer), list(LAYER).index(entry)


def with_experts(trace: dict) -> dict:
    """A trace with `experts` [T,E], the weight of each expert, instead of topk_idx and topk_w,
    whose columns may come in any order. Entries with other names are left out. ValueError or
    IndexError if the three do not fit together."""
    trace = {key: x for key, x in trace.items() if known(key)}
    for key in [k for k in trace if k.endswith(".topk_idx")]:
        layer = key.removesuffix("topk_idx")
        idx, weights = trace.pop(key), trace.get(f"{layer}topk_w")
        scores = trace.get(f"{layer}scores")
        if weights is not None and scores is not None:
            spread = np.zeros(scores.shape)
            np.put_along_axis(spread, idx.reshape(weights.shape).astype(int), weights, -1)
            trace[f"{layer}experts"] = spread
    return {key: x for key, x in trace.items() if not key.endswith(".topk_w")}


def matching(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """`theirs` without the axis of the batch, if it has one."""
    one_more = theirs.ndim == ours.ndim + 1 and len(theirs) == 1
    return (theirs[0] if one_more else theirs).astype(np.float64)
