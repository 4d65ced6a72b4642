"""Figures of the chapters on the sequence."""

from collections.abc import Iterator

from k3_teach.config import K3Config

from .figure import Figure


def crossing(c: K3Config) -> Iterator[Figure]:
    a, latent = c.linear_attn_config, c.kv_lora_rank + c.qk_rope_head_dim
    for b, quoted, verdict, note in (
            (2, "2731", "agrees", "bytes of a state's number; 2730.67"),
            (4, "5461", "rounded", "5461.33: the first whole token is 5462")):
        tokens = a.num_heads * a.head_dim ** 2 * b / (2 * latent)
        yield Figure("08_kda_hybrid", f"tokens at which the hybrid's cache is smaller, {b} "
                     "bytes", quoted, f"{tokens:.0f}", verdict, note)
