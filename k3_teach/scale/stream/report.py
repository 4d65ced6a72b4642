"""What a run has cost, as tables and as JSON.

The floor of a pass is its weights read once, at the speed at which this machine reads.
"""

import time
from statistics import median

import torch

from k3_teach.config import K3Config
from k3_teach.scale.cost import components
from k3_teach.scale.stream.clock import Pass
from k3_teach.scale.stream.memory import gigabytes


def read_bandwidth(nbytes: int = 1 << 31, device="cpu", rounds: int = 5) -> float:
    """Bytes per second, at best, of a sum over an array that no cache holds, with all threads."""
    x, best = torch.ones(nbytes // 4, device=device), float("inf")
    for _ in range(rounds + 1):         # the first warms up
        start = time.perf_counter()
        x.sum().item()
        best = min(best, time.perf_counter() - start)
    return x.nbytes / best


def active_bytes(c: K3Config, size: int) -> int:
    """What one new token must read of the weights, in numbers of `size` bytes, counted from
    the configuration: its experts, all else once, one row of the embedding.

    What is stored in float32 counts so. Depth queries and the last norm are left out, which
    the streamed model reads only once.
    """
    rows = [r for r in components(c) if not r.name.startswith(("AttnRes", "last norm"))]
    wide = max(size, 4) - size
    return sum(size * r.total_active + wide * r.count * r.float32 for r in rows) \
        + size * c.hidden_size


def by_part(passes: list[Pass]) -> dict[str, dict[str, float]]:
    """Part -> seconds and bytes over these passes, the slowest first."""
    names = dict.fromkeys(n for p in passes for n in [*p.seconds, *p.nbytes])
    rows = {n: {"seconds": sum(p.seconds.get(n, 0.0) for p in passes),
                "bytes": sum(p.nbytes.get(n, 0) for p in passes)} for n in names}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["seconds"]))


def summary(run, *bandwidths: float) -> dict:
    """All of it, for JSON. bandwidths: as they were measured, before the run and after it, say;
    the floor is by the fastest."""
    model, c, bandwidth = run.model, run.model.config, max(bandwidths)
    passes = [{"tokens": p.tokens, "cached": p.cached, "first_layer": p.first_layer,
               "seconds": p.total_seconds, "bytes": p.total_bytes,
               "layer_seconds": p.layer_seconds, "memory": p.memory,
               "floor_seconds": p.total_bytes / bandwidth} for p in model.clock.passes]
    prefill, decode = split(model.clock.passes)
    return {"layers": c.num_hidden_layers, "weights": model.source.identity,
            "dtype": str(model.dtype), "device": str(model.device),
            "threads": torch.get_num_threads(), "torch": torch.__version__,
            "bandwidth": bandwidth, "bandwidths": bandwidths,
            "ceiling": model.ceiling, "plan": run.plan(), "peak": model.peak,
            "active_bytes": active_bytes(c, model.dtype.itemsize),
            "prompt_tokens": run.prompt, "new_tokens": run.new, "passes": passes,
            "prefill": by_part(prefill), "decode": by_part(decode)}


def split(passes: list[Pass]) -> tuple[list[Pass], list[Pass]]:
    """Passes over several tokens, and over one behind others."""
    one = lambda p: p.tokens == 1 and p.cached > 0
    return [p for p in passes if not one(p)], [p for p in passes if one(p)]


def text(found: dict) -> str:
    """The same as a page of text."""
    lines = [f"{found['layers']} layers, {found['weights']}, {found['dtype']}, "
             f"{found['device']}, {found['threads']} threads",
             f"this machine reads {' or '.join(map(gigabytes, found['bandwidths']))} a second; "
             f"one new token reads {gigabytes(found['active_bytes'])} of weights"]
    lines += [f"{p['tokens']} token{'s' * (p['tokens'] > 1)} behind {p['cached']}: "
              f"{p['seconds']:.2f} s, {gigabytes(p['bytes'])}, "
              f"{p['seconds'] / max(p['floor_seconds'], 1e-12):.2f} times the floor"
              for p in found["passes"]]
    lines += _median(found["passes"])
    for kind in ("prefill", "decode"):
        if found[kind]:
            lines += ["", f"{kind:25s} {'seconds':>9s} {'':>6s} {'weights':>12s} {'GB/s':>7s}"]
            lines += _rows(found[kind])
    planned = ", ".join(f"{name} {gigabytes(n)}" for name, n in found["plan"].items())
    lines += ["", f"memory, planned: {gigabytes(sum(found['plan'].values()))} ({planned})",
              f"memory, anonymous, most after a layer: {gigabytes(found['peak'])}"]
    return "\n".join(lines)


def _median(passes: list[dict]) -> list[str]:
    """Of the new tokens that ran as a whole."""
    whole = [p for p in passes if p["tokens"] == 1 and p["cached"] and not p["first_layer"]]
    if not whole:
        return []
    seconds = median(p["seconds"] for p in whole)
    times = median(p["seconds"] / max(p["floor_seconds"], 1e-12) for p in whole)
    return [f"median of {len(whole)} new tokens: {seconds:.2f} s, {times:.2f} times the floor"]


def _rows(parts: dict) -> list[str]:
    total = sum(p["seconds"] for p in parts.values()) or 1.0
    out = []
    for name, p in parts.items():
        rate = f"{p['bytes'] / p['seconds'] / 1e9:7.1f}" if p["seconds"] and p["bytes"] else ""
        out.append(f"{name:25s} {p['seconds']:9.2f} {p['seconds'] / total:6.1%} "
                   f"{gigabytes(p['bytes']):>12s} {rate:>7s}".rstrip())
    return out
