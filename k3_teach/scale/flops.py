"""What an operator costs at least, from its sizes: floating-point operations and bytes.

A multiply-add counts as two operations. Counted are the matrix products, which are
nearly all of it, and the bytes that must be read or written once, whatever the program
does in between; softmax, activations and norms are left out. What a machine takes
longer than these counts over its rates is what a program could still save.

Shapes as in `parts`: B batch, T new tokens, S tokens so far, H heads, K and V widths of a
key and a value, L and R MLA's latent and shared key, N a head's own part of a key.
"""

from k3_teach.config import K3Config
from k3_teach.scale.cost import cache_bytes, checkpoint_bytes, components
from k3_teach.scale.roofline import attentions

BACKWARD = 3    # forward and backward together: each product has two in the backward pass


# --- KDA ------------------------------------------------------------------------------

def kda_chunk_flops(tokens: int, heads: int, K: int, V: int, chunk: int = 32) -> int:
    """6KV + 4CK + 4CV + (C-1)(C-2)/3 a token and head, in chunks of C.

    S^T k, the write and S^T q; two squares of scores; the inverse of a triangle times
    the values, and the attention over the corrections; the inverse itself, by
    substitution (arXiv 2510.26692, section 3).
    """
    inverse = (chunk - 1) * (chunk - 2)
    return tokens * heads * (3 * (6 * K * V + 4 * chunk * (K + V)) + inverse) // 3


def kda_bytes(B: int, T: int, heads: int, K: int, V: int, size: int = 4) -> int:
    """q, k, g, v, beta read, o written, and the state read and written once."""
    token = heads * (3 * K + 2 * V + 1)
    return size * (B * T * token + 2 * B * heads * K * V)


def kda_step_flops(B: int, heads: int, K: int, V: int) -> int:
    """One token: S^T k, the write and S^T q, two operations each, and the decay."""
    return 7 * B * heads * K * V


# --- MLA ------------------------------------------------------------------------------

def attention_flops(T: int, S: int, heads: int, key: int, value: int) -> int:
    """Scores and weighted sums of the T last of S tokens, each with those before it."""
    pairs = T * S - T * (T - 1) // 2
    return 2 * pairs * heads * (key + value)


def mla_expand_flops(tokens: int, heads: int, L: int, N: int, V: int) -> int:
    """Keys and values of all heads from the latents (arXiv 2405.04434)."""
    return 2 * tokens * heads * L * (N + V)


def mla_absorbed_flops(T: int, S: int, heads: int, L: int, R: int, N: int, V: int) -> int:
    """Queries to the latent's width, attention over the latents, outputs back from it."""
    return attention_flops(T, S, heads, L + R, L) + mla_expand_flops(T, heads, L, N, V)


def mla_absorbed_bytes(S: int, heads: int, L: int, R: int, N: int, V: int, size: int = 4
                       ) -> int:
    """The cached rows and the matrices of all heads, read once."""
    return size * (S * (L + R) + heads * L * (N + V))


# --- experts, depth, balancing --------------------------------------------------------

def experts_flops(tokens: int, chosen: int, width: int, inner: int) -> int:
    """Three matrices for every pair of a token and one of its experts."""
    return 6 * tokens * chosen * width * inner


def experts_bytes(tokens: int, in_use: int, width: int, inner: int, size: int = 4) -> int:
    """The matrices of the experts in use read once, the tokens read and written."""
    return size * (3 * in_use * width * inner + 2 * tokens * width)


def depth_sources(sublayers: int, block: int) -> list[int]:
    """How many sources each depth read mixes, with blocks of `block` sub-layers.

    The embedding alone, then embedding, finished blocks and the live sum; the last read
    stands behind all sub-layers: `sublayers + 1` numbers (arXiv 2603.15031).
    """
    return [1 + i // block + (i % block > 0) for i in range(sublayers + 1)]


def depth_flops(tokens: int, d: int, sources: list[int]) -> int:
    """A score and a weighted sum over the sources of every read."""
    return 4 * tokens * d * sum(sources)


def depth_bytes(tokens: int, d: int, sublayers: int, block: int, size: int = 4) -> int:
    """Every output read and every mixture written once, and the finished sources read
    once a block, for all of its reads together."""
    finished = sum(1 + i // block for i in range(0, sublayers, block))
    return size * tokens * d * (sublayers + (sublayers + 1) + finished)


def balance_bytes(tokens: int, experts: int, size: int = 4) -> int:
    """The scores, read once."""
    return size * tokens * experts


# --- the whole model ------------------------------------------------------------------

def multiply_adds(c: K3Config, context: int, decoding: bool = False) -> dict[str, int]:
    """Multiply-adds for one token that sees `context` tokens, by component.

    A weight that the token uses is one multiply-add (`cost.components`). To the weights
    come what KDA does with its state (three products of K x V a head), MLA's attention
    (expanded in prefill, absorbed in decoding) and the depth reads: two for each channel
    of each source.
    """
    rows = {row.name: row.total_active for row in components(c) if row.active}
    a = c.linear_attn_config
    rows["KDA state"] = 3 * len(a.kda_layers) * a.num_heads * a.head_dim ** 2
    mla = next(x for x in attentions(c) if x.name == "MLA absorbed")
    pair = mla.decode_macs if decoding else mla.prefill_macs
    rows["MLA attention"] = len(c.mla_layers) * context * pair
    if c.attn_res_block_size is not None:
        sources = depth_sources(2 * c.num_hidden_layers, 2 * c.attn_res_block_size)
        rows["AttnRes reads"] = 2 * c.hidden_size * sum(sources)
    return rows


def experts_in_use(num_experts: int, chosen: int, tokens: int) -> float:
    """How many experts of a layer a batch uses on average: E (1 - (1 - k/E)^tokens).

    Each token takes k of E, all of them equally likely, independently of the others.
    """
    return num_experts * (1 - (1 - chosen / num_experts) ** tokens)


def decode_bytes(c: K3Config, batch: int, context: int, tokens: int = 1
                 ) -> dict[str, float]:
    """Bytes that one step of decoding must move, by part; `multiply_adds` has its work.

    `tokens` new ones in each of `batch` sequences, behind `context` others. Weights in the
    released format are read once for all, of the experts those in use; an embedding's row
    is left out. A state of KDA, in float32, is read and written with its convolutions'
    inputs, MLA's rows are read.
    """
    stored, kept = checkpoint_bytes(c, vision=False), cache_bytes(c, context)
    embedding = 0 if c.tie_word_embeddings else 2 * c.vocab_size * c.hidden_size
    used = 0.0
    if c.num_experts:
        used = experts_in_use(c.num_experts, c.num_experts_per_token, batch * tokens)
        used /= c.num_experts
    latents = kept.pop("MLA latents")
    return {"routed experts": used * (stored["mxfp4"] + stored["scales"]),
            "other weights": stored["bfloat16"] + stored["float32"] - embedding,
            "KDA states": 2 * batch * (kept.pop("total") - latents),
            "MLA rows": batch * latents}
