"""When is decoding bound by memory, when by arithmetic? The roofline, for the reads of
the cache.

    time >= max(FLOP / peak, bytes / bandwidth)
    FLOP/s <= min(peak, bandwidth * intensity)     intensity: FLOP per byte that is read

The two limits meet at the ridge, peak / bandwidth: below it the chip waits for memory,
above it for its own arithmetic (Williams, Waterman and Patterson 2009).

Attention that decodes m tokens at once reads each cached token once and uses it m
times, in all heads:

    intensity = 2 m H (key + value) / (bytes_per_number cached)

Heads that share what is cached use each byte more often. Counted is only what grows
with the history: scores and the weighted sum, 2 FLOP a multiply-add, and the cache
itself; not the softmax, nor the projections of the new tokens. A batch changes nothing,
as every sequence has a cache of its own; it helps the weights. Peaks are those of data
sheets, for dense matrices in bfloat16; no program reaches them.
"""

import math
from dataclasses import dataclass

from k3_teach.config import K3Config
from k3_teach.errors import InputError


@dataclass(frozen=True)
class Chip:
    """An accelerator on paper. `source` is its key in book/references.bib."""

    name: str
    flops: float        # dense bfloat16 FLOP per second, at most
    bandwidth: float    # bytes per second from its memory, at most
    memory: float       # bytes
    source: str

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic is the limit."""
        return self.flops / self.bandwidth


# Data sheets often print the peak "with sparsity", which is twice the dense one.
CHIPS = (
    Chip("A100 80GB SXM", 312e12, 2.039e12, 80e9, "nvidia_a100"),
    Chip("H100 SXM", 989.4e12, 3.35e12, 80e9, "nvidia_h100"),
    Chip("H200 SXM", 989.4e12, 4.8e12, 141e9, "nvidia_h200"),
    Chip("H20", 148e12, 4.0e12, 96e9, "rollart"),
    Chip("B200", 2250e12, 8.0e12, 180e9, "nvidia_b200"),
    Chip("MI300X", 1307.4e12, 5.3e12, 192e9, "amd_mi300x"),
    Chip("MI355X", 2516.6e12, 8.0e12, 288e9, "amd_mi355x"),
)


@dataclass(frozen=True)
class Attention:
    """What one layer's attention multiplies and keeps, in numbers.

    The widths are per head; `cached` is per token. MLA decodes in another form than it
    prefills: `decode_key` and `decode_value` (None: the same).
    """

    name: str
    heads: int
    key: int
    value: int
    cached: int
    decode_key: int | None = None
    decode_value: int | None = None

    @property
    def prefill_macs(self) -> int:
        """Multiply-adds per pair of tokens, H (key + value): scores, weighted sum."""
        return self.heads * (self.key + self.value)

    @property
    def decode_macs(self) -> int:
        """The same for one new token and one cached one."""
        key = self.key if self.decode_key is None else self.decode_key
        value = self.value if self.decode_value is None else self.decode_value
        return self.heads * (key + value)


def attentions(c: K3Config) -> list[Attention]:
    """MLA as configured, and what might stand in its place with as many heads.

    MHA and GQA (8 groups) have keys and values of v_head_dim. "MLA expanded" caches its
    keys and values for every head. "MFA-like" is one key and one value for all heads,
    each of twice v_head_dim: a wide MQA, the sizes of MFA's core (arXiv 2412.19255).
    "K = V" is one vector of the latent's width that is both (as DeepSeek-V4 has it,
    arXiv 2606.19348, compression and rotation left out).
    """
    H, N, R, V = (c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim,
                  c.v_head_dim)
    L, groups = c.kv_lora_rank, min(8, H)
    return [
        Attention("MHA", H, V, V, cached=2 * H * V),
        Attention("MLA expanded", H, N + R, V, cached=H * (N + R + V)),
        Attention(f"GQA{groups}", H, V, V, cached=2 * groups * V),
        Attention("MLA absorbed", H, N + R, V, cached=L + R,
                  decode_key=L + R, decode_value=L),
        Attention("MFA-like", H, 2 * V, 2 * V, cached=4 * V),
        Attention("K = V", H, L, L, cached=L),
    ]


def intensity(a: Attention, query_tokens: int = 1, bytes_per_number: float = 2
              ) -> float:
    """FLOP per cached byte in decoding: 181.3 for K3's absorbed MLA and one token.

    query_tokens: new tokens that are computed together, such as drafts to be verified.
    InputError for fewer than 1, and for numbers without size.
    """
    if query_tokens < 1:
        raise InputError(f"query_tokens is {query_tokens}; it must be at least 1")
    if not bytes_per_number > 0:
        got = f"bytes_per_number is {bytes_per_number}"
        raise InputError(f"{got}; it must be above 0")
    return 2 * query_tokens * a.decode_macs / (bytes_per_number * a.cached)


def attainable(chip: Chip, flop_per_byte: float) -> float:
    """The roof: FLOP/s that `chip` can reach at best. InputError below 0."""
    if not flop_per_byte >= 0:
        raise InputError(f"flop_per_byte is {flop_per_byte}; it must be at least 0")
    return min(chip.flops, chip.bandwidth * flop_per_byte)


def chips_needed(chip: Chip, nbytes: float, usable: float = 0.9) -> int:
    """How many chips hold so many bytes, divided evenly, in a share of their memory.

    InputError for a share that is not above 0 and at most 1.
    """
    if not 0 < usable <= 1:
        raise InputError(f"usable is {usable}; it must be above 0 and at most 1")
    return math.ceil(nbytes / (usable * chip.memory))


def least_seconds(chip: Chip, flop: float, nbytes: float, chips: int = 1) -> float:
    """The longer of two times, to multiply and to read, if `chips` share both evenly."""
    return max(flop / chip.flops, nbytes / chip.bandwidth) / chips
