"""KDA: chunks against the recurrence and the textbook's chunks; one token against a copy."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle

import torch
import torch.nn.functional as F

from benchmarks.baselines.kda import chunk_by_columns, chunk_by_tiles
from benchmarks.case import Case, Quantity, with_gradients
from k3_teach.parts.kda import chunk_kda, recurrent_kda
from k3_teach.parts.kda_step import step_kda
from k3_teach.scale.flops import BACKWARD, kda_bytes, kda_chunk_flops, kda_step_flops
from k3_teach.scale.measure import peak_memory, race

OURS, BOUND = "chunk_kda", -5.0
SIZES = [(1, 256, 4, 64), (1, 1024, 4, 64), (1, 4096, 4, 64), (1, 256, 4, 128), (1, 1024, 4, 128),
         (1, 4096, 4, 128), (1, 1024, 16, 128), (16, 128, 4, 64)]      # B, T, H, K
ANY = 1 << 40
FORMS = {       # and the largest B T H K at which each is run, forward and with its backward pass
    "recurrence": (recurrent_kda, ANY, 1 << 18),
    "textbook, columns": (chunk_by_columns, 1 << 20, 1 << 18),
    "textbook, tiles": (chunk_by_tiles, ANY, ANY)}


def inputs(B: int, T: int, H: int, K: int) -> list[torch.Tensor]:
    """q, k, v, g, beta as a layer makes them: normalised keys, gates from -5 to 0."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, z = torch.randn(4, B, T, H, K, generator=draw)
    beta = torch.rand(B, T, H, generator=draw)
    q, k = F.normalize(q, dim=-1) * K ** -0.5, F.normalize(k, dim=-1)
    return [q, k, v, BOUND * torch.sigmoid(3 * z - 3), beta]


def ours(*x):
    return chunk_kda(*x, gate_lower_bound=BOUND)


def cases(quick: bool) -> Iterator[Case | Quantity]:
    sizes = [(1, 128, 2, 32), (2, 64, 2, 32)] if quick else SIZES
    for size in sizes:
        yield prefill(*size)
    for size in sizes:
        yield training(*size)
    yield from long_text(*((128, 256) if quick else (1024, 16384)))
    steps = [(1, 4, 16, 1), (1, 4, 16, 3)] if quick else [
        (1, 4, 64, 1), (1, 96, 128, 1), (8, 32, 128, 1), (1, 96, 128, 69)]
    for size in steps:
        yield step(*size)


def label(B: int, T: int, H: int, K: int) -> str:
    return f"{f'B {B}, ' if B > 1 else ''}T {T}, H {H}, K {K}"


def prefill(B: int, T: int, H: int, K: int) -> Case:
    x, foreign = inputs(B, T, H, K), installed()
    forms, not_run = affordable(B * T * H * K, backward=False)
    if "textbook, columns" in forms:        # the others take as long
        forms |= foreign
    else:
        not_run |= dict.fromkeys(foreign, "too slow")
    contenders = {name: lambda form=form: form(*x) for name, form in forms.items()}
    return Case("KDA forward", label(B, T, H, K), contenders, OURS,
                kda_chunk_flops(B * T, H, K, K), tokens=B * T, foreign=foreign, not_run=not_run)


def training(B: int, T: int, H: int, K: int) -> Case:
    x = inputs(B, T, H, K)
    forms, not_run = affordable(B * T * H * K, backward=True)
    contenders = {name: with_gradients(form, *x) for name, form in forms.items()}
    return Case("KDA forward and backward", label(B, T, H, K), contenders, OURS,
                BACKWARD * kda_chunk_flops(B * T, H, K, K), tokens=B * T, tolerance=1e-3,
                not_run=not_run)


def affordable(size: int, backward: bool) -> tuple[dict, dict]:
    """Ours and the forms that take seconds at most, and why the others are not run."""
    slow = {name for name, (_, *largest) in FORMS.items() if size > largest[backward]}
    forms = {OURS: ours} | {name: form for name, (form, *_) in FORMS.items() if name not in slow}
    return forms, dict.fromkeys(slow, "too slow")


def installed() -> dict:
    """The plain PyTorch forms of other packages, where there are any; forward only, since
    the gradients of fla's overflow."""
    found = {}
    with suppress(ImportError, RuntimeError):
        from fla.ops.kda.naive import naive_chunk_kda
        found["fla, naive"] = lambda *x: naive_chunk_kda(*x, scale=1.0, output_final_state=True)
    with suppress(ImportError, RuntimeError, StopIteration):
        from transformers.models.kimi_linear import modeling_kimi_linear as model
        names = "chunk_kimi_delta_attention", "torch_chunk_kda"     # by version
        form = next(getattr(model, name) for name in names if hasattr(model, name))
        found["transformers"] = lambda q, *x: form(                 # it scales q itself
            q * q.shape[-1] ** 0.5, *x, output_final_state=True)
    return found


def long_text(short: int, long: int) -> Iterator[Quantity]:
    """Does a token cost the same in a long text, and how much memory does it take?"""
    H, K = 4, 64
    few, many = inputs(1, short, H, K), inputs(1, long, H, K)
    contenders = {short: lambda: ours(*few), long: lambda: ours(*many)}
    times = race(contenders, threads=torch.get_num_threads())
    for T in (short, long):
        each = times.seconds(T).median / T
        yield Quantity("KDA forward, time of one token", label(1, T, H, K), {OURS: 1e6 * each},
                       OURS, "µs")
    for what, wrap, T in (("forward", lambda form, *x: lambda: form(*x), long),
                          ("forward and backward", with_gradients, 2 * short)):
        x = inputs(1, T, H, K)
        memory = {name: peak_memory(wrap(form, *x)) / 1e6
                  for name, form in {OURS: ours, "textbook, tiles": chunk_by_tiles}.items()}
        yield Quantity("KDA, peak memory beyond the inputs", f"{what}, {label(1, T, H, K)}",
                       memory, OURS)


def step(B: int, H: int, K: int, layers: int) -> Case:
    """One token; with more layers than one, their states take turns, as in a model.

    The floor is a copy of one state, which reads and writes it once.
    """
    x = inputs(B, 1, H, K)
    states = torch.randn(layers, B, H, K, K, generator=torch.Generator().manual_seed(1))
    spare, turns = torch.empty_like(states[0]), [cycle(states) for _ in range(3)]
    name = f"B {B}, H {H}, K {K}" + (f", {layers} layers in turn" if layers > 1 else "")
    return Case("KDA, one token", name, {
        "step_kda": lambda: step_kda(*x, next(turns[0])),
        "recurrence": lambda: recurrent_kda(*x, next(turns[1]))}, "step_kda",
        kda_step_flops(B, H, K, K), kda_bytes(B, 1, H, K, K),
        floors={"copy of the state": lambda: spare.copy_(next(turns[2]))})
