"""What a configuration costs, from its numbers alone: parameters, bytes of the released
file, bytes of the cache, bytes of training.

The model is not built here, so that counting its tensors (on the meta device) is a second,
independent route.
"""

from dataclasses import dataclass

from k3_teach.config import K3Config
from k3_teach.errors import InputError
from k3_teach.mxfp4 import BLOCK

# The released checkpoint also holds an image encoder and a projector into the text model,
# all of it in bfloat16.
VISION_TOWER = 401_214_464
PROJECTOR = 46_144_512


@dataclass(frozen=True)
class Component:
    """`count` times the same part. The other numbers are parameters of one of them."""

    name: str
    count: int
    each: int           # all
    active: int         # those that a token uses
    float32: int = 0    # those stored in float32
    mxfp4: int = 0      # those stored in MXFP4
    vectors: int = 0    # those in no matrix: gains, biases, convolutions, depth queries

    @property
    def total(self) -> int:
        return self.count * self.each

    @property
    def total_active(self) -> int:
        return self.count * self.active


def kda_parameters(c: K3Config) -> tuple[int, int]:
    """One KDA mixer: (all parameters, those stored in float32)."""
    a, d = c.linear_attn_config, c.hidden_size
    width, rank = a.num_heads * a.head_dim, a.head_dim
    low_rank = d * rank + rank * width
    convolutions = 3 * width * a.short_conv_kernel_size
    float32 = convolutions + a.num_heads + width + a.head_dim       # A_log, dt_bias, o_norm
    output_gate = d * width if a.use_full_rank_gate else low_rank
    q_k_v_o, decay, beta = 4 * d * width, low_rank, d * a.num_heads
    return q_k_v_o + decay + beta + output_gate + float32, float32


def mla_parameters(c: K3Config) -> int:
    """One MLA mixer."""
    d, H, L = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    queries, values, rank = H * c.qk_head_dim, H * c.v_head_dim, c.q_lora_rank
    q = d * queries if rank is None else d * rank + rank + rank * queries
    kv = d * (L + c.qk_rope_head_dim) + L + L * H * (c.qk_nope_head_dim + c.v_head_dim)
    gate = d * values if c.mla_use_output_gate else 0
    return q + kv + gate + values * d


def components(c: K3Config) -> list[Component]:
    """Every part of the model with its count.

    The embedding is not active: a token reads one row of it.
    """
    d, L = c.hidden_size, c.num_hidden_layers
    moe = sum(c.is_moe(i) for i in range(L))
    kda, kda32 = kda_parameters(c)
    num_kda = len(c.linear_attn_config.kda_layers)
    mla = mla_parameters(c)
    dense = 3 * d * c.intermediate_size
    expert = 3 * c.expert_width * c.moe_intermediate_size
    experts, chosen = c.num_experts * expert, c.num_experts_per_token * expert
    shared = 3 * d * c.num_shared_experts * c.moe_intermediate_size
    router, latent, latent_norm = c.num_experts * (d + 1), 0, 0
    if c.routed_expert_hidden_size is not None:
        latent_norm = c.expert_width if c.latent_moe_use_norm else 0
        latent = 2 * d * c.expert_width + latent_norm
    reads = 4 * d if c.attn_res_block_size is not None else 0
    head = 0 if c.tie_word_embeddings else c.vocab_size * d
    rows = [
        Component("embedding", 1, c.vocab_size * d, 0),
        Component("KDA mixers", num_kda, kda, kda, kda32, vectors=kda32),
        Component("MLA mixers", L - num_kda, mla, mla,
                  vectors=(c.q_lora_rank or 0) + c.kv_lora_rank),
        Component("dense feed-forward", L - moe, dense, dense),
        Component("MoE: router", moe, router, router, c.num_experts, vectors=c.num_experts),
        Component("MoE: latent projections and norm", moe, latent, latent,
                  vectors=latent_norm),
        Component("MoE: shared experts", moe, shared, shared),
        Component("MoE: routed experts", moe, experts, chosen, mxfp4=experts),
        Component("norms before the sub-layers", L, 2 * d, 2 * d, vectors=2 * d),
        Component("AttnRes queries and key norms", L, reads, reads, vectors=reads),
        Component("last norm and depth read", 1, d + reads // 2, d + reads // 2,
                  vectors=d + reads // 2),
        Component("output head", 1, head, c.vocab_size * d),
    ]
    return [row for row in rows if row.count and (row.each or row.active)]


def total_parameters(c: K3Config) -> int:
    """All parameters of the text model: 2,779,484,476,000 for K3."""
    return sum(row.total for row in components(c))


def active_parameters(c: K3Config) -> int:
    """Parameters that one token multiplies with: 104.2 B for K3.

    The output head is among them, the embedding lookup is not.
    """
    return sum(row.total_active for row in components(c))


def checkpoint_bytes(c: K3Config, vision: bool = True) -> dict[str, int]:
    """Bytes of the released file format, by dtype, and their total.

    Experts are in MXFP4 (half a byte a weight, one byte of scale for 32), a few tensors in
    float32, the rest in bfloat16. `A_log` is padded to the head width. `vision` adds the
    image encoder and the projector.
    """
    rows = components(c)
    a = c.linear_attn_config
    padding = len(a.kda_layers) * max(a.head_dim - a.num_heads, 0)
    mxfp4 = sum(r.count * r.mxfp4 for r in rows)
    float32 = sum(r.count * r.float32 for r in rows)
    bfloat16 = total_parameters(c) - mxfp4 - float32
    if vision:
        bfloat16 += VISION_TOWER + PROJECTOR
    out = {"mxfp4": mxfp4 // 2, "scales": mxfp4 // BLOCK,
           "bfloat16": 2 * bfloat16, "float32": 4 * (float32 + padding)}
    return out | {"total": sum(out.values())}


def cache_bytes(c: K3Config, tokens: int, bytes_per_number: int = 2,
                state_bytes_per_number: int = 4) -> dict[str, int]:
    """What one sequence keeps for decoding, in bytes, and the total.

    The rows of MLA grow with `tokens`; the states of KDA and the inputs of its convolutions
    do not.
    """
    a = c.linear_attn_config
    num_kda, num_mla = len(a.kda_layers), len(c.mla_layers)
    width, row = a.num_heads * a.head_dim, c.kv_lora_rank + c.qk_rope_head_dim
    inputs = 3 * width * (a.short_conv_kernel_size - 1)
    out = {"MLA latents": num_mla * row * tokens * bytes_per_number,
           "KDA states": num_kda * width * a.head_dim * state_bytes_per_number,
           "KDA convolution inputs": num_kda * inputs * bytes_per_number}
    return out | {"total": sum(out.values())}


# --- training -------------------------------------------------------------------------

def trained_by(c: K3Config) -> dict[str, int]:
    """Parameters by what trains them (see `train.optimiser`): Muon the matrices of the
    layers, AdamW the embedding, the head and the vectors, the balancer the biases of the
    routers.
    """
    rows = {row.name: row for row in components(c)}
    ends = sum(rows[name].total for name in ("embedding", "output head") if name in rows)
    biases = rows["MoE: router"].count * c.num_experts if "MoE: router" in rows else 0
    vectors = sum(row.count * row.vectors for row in rows.values())
    muon = total_parameters(c) - ends - vectors
    return {"Muon": muon, "AdamW": ends + vectors - biases, "balancer": biases}


def training_bytes(c: K3Config, weight: int = 2, gradient: int = 2, master: int = 4,
                   moment: int = 4, optimiser: str = "muon") -> dict[str, int]:
    """What training holds from step to step, in bytes, and the total; no activations.

    weight, gradient, master, moment: bytes of a number. `master` is the copy in float32
    to which small updates are added, 0 where there is none. Muon keeps one moment of a
    parameter, AdamW two. InputError for an optimiser other than "muon" and "adamw".
    """
    if optimiser not in ("muon", "adamw"):
        raise InputError(f"optimiser is {optimiser!r}; it must be 'muon' or 'adamw'")
    parts = trained_by(c)
    trained = parts["Muon"] + parts["AdamW"]
    moments = 2 * trained - (parts["Muon"] if optimiser == "muon" else 0)
    out = {"weights": weight * total_parameters(c), "gradients": gradient * trained,
           "master copy": master * trained, "moments": moment * moments}
    return out | {"total": sum(out.values())}


def gathered_bytes(c: K3Config, dp: int, ep: int, weight: int = 2) -> int:
    """Bytes of the largest unit of weights that a rank of a mesh dp x ep has whole while
    it computes: the experts of one layer that are its own, or a dense part.

    Dense parts are divided among all ranks and gathered before use. A rank owns E / ep
    experts, which the dp ranks of its column divide further. InputError if ep does not
    divide the experts.
    """
    if dp < 1 or ep < 1 or c.num_experts % ep:
        raise InputError(f"dp is {dp}, ep is {ep}; both must be positive, and ep must "
                         f"divide the {c.num_experts} experts")
    each = {row.name: row.each for row in components(c)}
    experts = each.pop("MoE: routed experts", 0) // ep
    return weight * max(experts, *each.values())
