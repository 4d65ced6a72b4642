"""The toy K3 at work: reading a text, writing after it, and what it keeps in between.

The GPT beside it has as many active parameters. Its cache holds the keys and values of
every layer; that of the K3 grows in its MLA layers only.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.baselines.gpt import GPT, gpt_like
from benchmarks.case import Case, Disagreement, Quantity, distance
from benchmarks.cases.training import toy
from k3_teach.cache import Cache, KDAState
from k3_teach.model import K3Model
from k3_teach.scale.cost import active_parameters, cache_bytes
from k3_teach.scale.flops import multiply_adds
from k3_teach.scale.measure import peak_memory

OURS, FLOAT = "K3 toy", 4           # bytes of a float32
PARTS = "its KDA layers", "its MLA layers"
AT_ONCE = 8192                      # tokens; longer texts take many seconds in one call


def cases(quick: bool) -> Iterator[Case | Quantity]:
    lengths = [32, 64] if quick else [1024 << i for i in range(6)]
    torch.manual_seed(0)
    c = toy(32 if quick else 128)
    k3, gpt = K3Model(c).eval(), gpt_like(c, lengths[-1] + 1).eval()
    ids = torch.randint(0, c.vocab_size, (1, lengths[-1] + 1))
    for T in (lengths if quick else (1024, 4096, AT_ONCE)):
        yield prefill(k3, gpt, ids[:, :T])
    caches, peaks = in_pieces(k3, ids, lengths)
    for S, cache in caches.items():
        yield kept(k3, gpt, cache, S)
    for S, peak in peaks.items():
        yield memory(k3, gpt, ids[:, :S], peak)
    for S, cache in caches.items():
        yield decode(k3, gpt, cache, ids[:, :S + 1])


def prefill(k3: K3Model, gpt: GPT, ids: Tensor) -> Case:
    """A text in one call, into an empty cache."""
    T = ids.shape[1]
    macs = sum(multiply_adds(k3.config, (T + 1) // 2).values())
    return Case("Whole model, prefill", f"T {T}", at_once(k3, gpt, ids), OURS,
                flops=2 * T * macs, tokens=T, check=finite, seconds=8)


def at_once(k3: K3Model, gpt: GPT, ids: Tensor) -> dict:
    @torch.no_grad()
    def read():
        return gpt(ids, gpt.new_cache(1, ids.shape[1]))

    return {OURS: lambda: k3(ids, cache=k3.new_cache()), "GPT": read}


def in_pieces(k3: K3Model, ids: Tensor, lengths: list[int]
              ) -> tuple[dict[int, Cache], dict[int, int]]:
    """Read the text in pieces of `lengths[0]` tokens. For every length: a copy of the
    cache, and the most bytes held so far, the cache included."""
    cache, piece, peak = k3.new_cache(), lengths[0], 0
    caches, peaks = {}, {}
    for start in range(0, lengths[-1], piece):
        part, before = ids[:, start:start + piece], cache.nbytes()
        peak = max(peak, before + peak_memory(lambda: k3(part, cache=cache)))
        if len(cache) in lengths:
            caches[len(cache)], peaks[len(cache)] = cache.copy(), peak
    return caches, peaks


def kept(k3: K3Model, gpt: GPT, cache: Cache, S: int) -> Quantity:
    """Bytes of the cache of S tokens. Disagreement if they are not those counted."""
    kda = sum(layer_bytes(s) for s in cache.states if isinstance(s, KDAState))
    mla = sum(layer_bytes(s) for s in cache.states if not isinstance(s, KDAState))
    counted = cache_bytes(k3.config, S, FLOAT)
    states = counted["KDA states"] + counted["KDA convolution inputs"]
    if (kda, mla, cache.nbytes()) != (states, counted["MLA latents"], counted["total"]):
        raise Disagreement(f"the cache of {S} tokens takes {kda} bytes in KDA layers and "
                           f"{mla} in MLA layers; counted are {counted}")
    values = {OURS: cache.nbytes(), **dict(zip(PARTS, (kda, mla))),
              "GPT": gpt.new_cache(1, S).nbytes}
    return Quantity("Whole model, cache of one sequence", f"S {S}", in_megabytes(values),
                    OURS, note=f"KDA {kda / 1e6:.3f} MB", parts=PARTS)


def layer_bytes(state) -> int:
    return sum(t.nbytes for t in state.tensors())


def memory(k3: K3Model, gpt: GPT, ids: Tensor, peak: int) -> Quantity:
    """Most bytes of tensors during prefill, beyond the weights, cache and logits included."""
    values, not_run = {"K3 toy in pieces": peak}, {}
    for name, call in at_once(k3, gpt, ids).items():
        if ids.shape[1] <= AT_ONCE:
            values[f"{name} at once"] = peak_memory(call)
        else:
            not_run[f"{name} at once"] = "many seconds"
    return Quantity("Whole model, peak memory of prefill", f"T {ids.shape[1]}",
                    in_megabytes(values), "K3 toy in pieces", not_run=not_run)


def in_megabytes(values: dict[str, int]) -> dict[str, float]:
    return {name: value / 1e6 for name, value in values.items()}


def decode(k3: K3Model, gpt: GPT, cache: Cache, ids: Tensor) -> Case:
    """One token after S others, which is then forgotten again.

    What lies in the GPT's cache does not matter for its time: random numbers.
    """
    S, token = ids.shape[1] - 1, ids[:, -1:]
    past, c = gpt.new_cache(1, S + 1).normal_(), k3.config

    def write():
        mark = cache.snapshot()
        logits = k3(token, cache=cache)
        cache.rollback(mark)
        return logits

    macs = sum(multiply_adds(c, S, decoding=True).values())
    return Case("Whole model, one token", f"S {S}",
                {OURS: write, "GPT": torch.no_grad()(lambda: gpt(token, past, S))}, OURS,
                flops=2 * macs, bytes=FLOAT * active_parameters(c) + cache.nbytes(), tokens=1,
                check=lambda results: as_prefill(results, k3, ids))


def as_prefill(results: dict[str, Tensor], k3: K3Model, ids: Tensor) -> None:
    """Disagreement unless ours is what one call with all of `ids` gives for the last."""
    finite(results)
    if ids.shape[1] <= 1025:        # longer ones take too long
        error = distance(results[OURS], k3(ids, cache=k3.new_cache())[:, -1:])
        if not error <= 1e-3:
            raise Disagreement(f"decoding after {ids.shape[1] - 1} tokens differs from prefill "
                               f"by {error:.1e}")


def finite(results: dict[str, Tensor]) -> None:
    """Disagreement for NaN or infinity; different models do not agree on more."""
    for name, logits in results.items():
        if not logits.isfinite().all():
            raise Disagreement(f"{name}: the logits are not finite")
