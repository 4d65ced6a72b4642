"""The rows of `benchmarks.gpu`: what is run, how much it has to do, and how far off it may be.

A row is built when its turn comes and let go after it: some need most of the memory. All
of it runs without gradients, but for what asks for them.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import k3_teach as k3
from benchmarks.gpu_layers import depth, layers
from benchmarks.gpu_work import Refused, Row, Sizes, Work, normal, off
from k3_teach.model import make_activation
from k3_teach.parts.attention import attention_weights
from k3_teach.parts.kda_fla import fla_kda, fla_refuses
from k3_teach.parts.kda_step import step_kda
from k3_teach.parts.mla import expand
from k3_teach.parts.moe import experts_few
from k3_teach.scale import flops


def rows(c: k3.K3Config, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    torch.manual_seed(0)
    for T in sizes.kda:
        yield from kda_prefill(c, device, sizes, T)
    yield from kda_decode(c, device, sizes)
    for S in sizes.contexts:
        yield from mla(c, device, sizes, S)
    for N in sizes.expert_tokens:
        yield from experts(c, device, N)
    for N in sizes.depth_tokens:
        yield from depth(c, device, N)
    yield from layers(c, device, sizes)
    yield (f"KDA forward, T {sizes.kda[0]}, ours compiled",
           lambda: kda_work(c, device, sizes, sizes.kda[0], compiled(device)))


# --- KDA ------------------------------------------------------------------------------

def kda_inputs(c, device, T: int) -> list[Tensor]:
    """As the layer makes them: q, k, v in bfloat16, g and beta in float32."""
    a = c.linear_attn_config
    x, f = (1, T, a.num_heads, a.head_dim), F.normalize
    q, k = f(normal(device, *x), dim=-1) * a.head_dim ** -0.5, f(normal(device, *x), dim=-1)
    g = -5 * torch.sigmoid(torch.randn(x, device=device) - 3)
    return [q, k, normal(device, *x), g, torch.rand(x[:3], device=device)]


def ours(*args):
    return k3.chunk_kda(*args, gate_lower_bound=-5.0)


def fla(*args):
    if (why := fla_refuses(args[2])) is not None:
        raise Refused(f"fla: {why}")
    return fla_kda(*args, gate_lower_bound=-5.0)


def compiled(device):
    def run(*args):
        if device.type == "cpu":
            raise Refused("the compiler is tried on a GPU only")
        return run.compiled(*args)
    run.compiled = torch.compile(ours)
    return run


def kda_work(c, device, sizes: Sizes, T: int, way, backward: bool = False, state=None) -> Work:
    a, args = c.linear_attn_config, kda_inputs(c, device, T) + ([] if state is None else [state])
    shape = a.num_heads, a.head_dim, a.head_dim
    count = flops.kda_step_flops(1, *shape) if T == 1 else flops.kda_chunk_flops(T, *shape)
    moved = kda_moved(T, *shape)

    def result(way, xs):
        if not backward:
            return way(*xs)[0]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in xs]
            return torch.autograd.grad(way(*leaves)[0].sum(), leaves)

    def error():
        part = [x[:, :sizes.slice, :2] if i < 5 else x[:, :2] for i, x in enumerate(args)]
        return off(result(way, part), result(k3.recurrent_kda, [x.double() for x in part]))
    return Work(lambda: result(way, args), 3 * count if backward else count,
                None if backward else moved, error)


def kda_moved(T: int, heads: int, K: int, V: int) -> int:
    """Bytes: q, k, v and o in bfloat16; g, beta and the state, there and back, in float32."""
    return 4 * T * heads * (K + V) + 4 * (T * heads * (K + 1) + 2 * heads * K * V)


def kda_prefill(c, device, sizes: Sizes, T: int) -> Iterator[Row]:
    for name, way in (("ours", ours), ("fla", fla)):
        yield f"KDA forward, T {T}, {name}", lambda way=way: kda_work(c, device, sizes, T, way)
        yield (f"KDA forward and backward, T {T}, {name}",
               lambda way=way: kda_work(c, device, sizes, T, way, backward=True))
    if T == min(sizes.kda):
        yield (f"KDA forward, T {T}, token by token",
               lambda: kda_work(c, device, sizes, T, k3.recurrent_kda))


def kda_decode(c, device, sizes: Sizes) -> Iterator[Row]:
    a = c.linear_attn_config
    state = lambda: torch.randn(1, a.num_heads, a.head_dim, a.head_dim, device=device)
    for name, way in (("ours", step_kda), ("fla", fla)):
        yield (f"KDA, one token, {name}",
               lambda way=way: kda_work(c, device, sizes, 1, way, state=state()))


# --- MLA ------------------------------------------------------------------------------

def plain_products(q, latent, kv_b, v_dim, scale):
    """`mla_absorbed` for one token with two products instead of torch's fused kernel."""
    w_uk, w_uv = kv_b.split([kv_b.shape[1] - v_dim, v_dim], 1)
    own, shared = q.split([w_uk.shape[1], q.shape[-1] - w_uk.shape[1]], -1)
    q = torch.cat((torch.einsum("bhtn,hnl->bhtl", own, w_uk), shared), -1)
    seen = torch.ones(1, latent.shape[1], dtype=torch.bool, device=q.device)
    a = attention_weights(q[:, :, 0], latent, scale, seen).to(q.dtype)         # [B, H, S]
    return torch.einsum("bhl,hvl->bhv", a @ latent[..., :kv_b.shape[2]], w_uv)[:, :, None]


def mla(c, device, sizes: Sizes, S: int) -> Iterator[Row]:
    H, N, R = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
    L, V = c.kv_lora_rank, c.v_head_dim
    prefill = flops.mla_expand_flops(S, H, L, N, V) + flops.attention_flops(S, S, H, N + R, V)
    decode = flops.mla_absorbed_flops(1, S, H, L, R, N, V)
    moved = flops.mla_absorbed_bytes(S, H, L, R, N, V, size=2)
    yield (f"MLA prefill, T {S}, expanded",
           lambda: mla_work(c, device, sizes, S, S, k3.mla_expanded, prefill))
    for name, way in (("absorbed", k3.mla_absorbed), ("absorbed, plain products", plain_products)):
        yield (f"MLA, one token, S {S}, {name}",
               lambda way=way: mla_work(c, device, sizes, 1, S, way, decode, moved))
    yield (f"MLA, one token, S {S}, keys and values cached",
           lambda: over_expanded_cache(c, device, S))


def mla_inputs(c, device, T: int, S: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of T tokens, the latents of S, and the matrices that expand them."""
    width, L = c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank
    return (normal(device, 1, heads, T, c.qk_head_dim),
            normal(device, 1, S, L + c.qk_rope_head_dim),
            normal(device, heads, width, L) / L ** 0.5)


def mla_work(c, device, sizes: Sizes, T: int, S: int, way, count: int, moved: int | None = None
             ) -> Work:
    last = c.v_head_dim, c.qk_head_dim ** -0.5      # arguments of every way

    def error():
        part = mla_inputs(c, device, min(T, sizes.slice), sizes.slice, 2)
        return off(way(*part, *last), k3.mla_expanded(*(x.double() for x in part), *last))
    args = mla_inputs(c, device, T, S, c.num_attention_heads)
    return Work(lambda: way(*args, *last), count, moved, error)


def over_expanded_cache(c, device, S: int) -> Work:
    """Every head's keys and values kept; two products, since no kernel takes both widths."""
    H, V, scale = c.num_attention_heads, c.v_head_dim, c.qk_head_dim ** -0.5
    q, latent, kv_b = mla_inputs(c, device, 1, S, H)
    k, v = (x.contiguous() for x in expand(latent, kv_b, V))
    count = flops.attention_flops(1, S, H, c.qk_head_dim, V)
    return Work(lambda: (q @ k.mT * scale).softmax(-1) @ v, count, k.nbytes + v.nbytes)


# --- experts --------------------------------------------------------------------------

def experts_that_fit(c, device) -> int:
    """All of them, or as many as fill eight tenths of the free memory."""
    if device.type == "cpu":
        return c.num_experts
    each = 2 * 3 * c.expert_width * c.moe_intermediate_size
    fit = int(0.8 * torch.cuda.mem_get_info(device)[0] / each)
    if fit < c.num_experts_per_token:
        raise Refused(f"room for {fit} experts; a token uses {c.num_experts_per_token}")
    return min(c.num_experts, fit)


def experts_work(c, device, N: int, way) -> Work:
    E, top, act = experts_that_fit(c, device), c.num_experts_per_token, make_activation(c)
    width, inner = c.expert_width, c.moe_intermediate_size
    draw = lambda *shape: torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
    matrices = [draw(E, inner, width), draw(E, width, inner), draw(E, inner, width)]
    x, idx = normal(device, N, width), torch.rand(N, E, device=device).topk(top).indices
    weights = torch.rand(N, top, device=device).softmax(-1)

    def error():
        few = [w[idx[0]] for w in matrices]         # of the first token, in its order
        one = x[:1], torch.arange(top, device=device)[None], weights[:1]
        return off(way(*one, *few, act), one_by_one(*one, few, act))

    count = flops.experts_flops(N, top, width, inner)
    moved = flops.experts_bytes(N, len(idx.unique()), width, inner, size=2)
    note = "" if E == c.num_experts else f"{E} of {c.num_experts} experts fit"
    return Work(lambda: way(x, idx, weights, *matrices, act), count, moved, error, note)


def one_by_one(x, idx, weights, matrices, act) -> Tensor:
    """The float64 result, with one expert's matrices in float64 at a time."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for slot, e in enumerate(idx[0].tolist()):
        w1, w2, w3 = (w[e].double() for w in matrices)
        y += weights[0, slot].double() * (act(x.double() @ w1.T, x.double() @ w3.T) @ w2.T)
    return y


def experts(c, device, N: int) -> Iterator[Row]:
    ways = {"grouped products": k3.experts_grouped}
    if N <= 16:
        ways["expert by expert"] = experts_few
    elif N <= 256:
        ways["loop with masks"] = k3.experts_loop
    for name, way in ways.items():
        yield f"experts, tokens {N}, {name}", lambda way=way: experts_work(c, device, N, way)
