"""A K3 whose parameters lie on many processes, each with its part, and that computes what one
process would.

Processes form a grid, dp x ep. Two things are done, both with torch's own engine, FSDP2:

    experts     [E, m, l] are cut by expert: over "ep" for good, over "dp" for storage
    the rest    is cut by rows over all dp ep processes, for storage

What is cut for storage is put together for the moment in which it is used: before a unit (a
mixer, a feed-forward, the experts of a layer) runs, its parts are gathered, and after it they
are dropped; its gradients are summed and cut again (ZeRO stage 3, arXiv 1910.02054). What is
cut for good is never put together: tokens travel to the experts instead (GShard, arXiv
2006.16668). Every process has its own rows of the batch.

Norms and the queries of the depth reads belong to the unit of the whole model: a stream reads
the queries of all layers before the first one runs.

Shapes: N tokens of this process, k experts a token, l their width, E experts, R rows that
this process computes.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from k3_teach.config import K3Config
from k3_teach.errors import InputError
from k3_teach.model import K3Model
from k3_teach.parts.balancer import is_router
from k3_teach.parts.moe import Experts, experts_grouped
from k3_teach.parts.precision import upcast


def make_mesh(dp: int, ep: int, device: str = "cpu") -> DeviceMesh:
    """The grid ("dp", "ep"). InputError unless it has as many places as there are processes."""
    if not dist.is_initialized():
        raise InputError("there is no process group; start with torchrun and call "
                         "torch.distributed.init_process_group first")
    world = dist.get_world_size()
    if not (isinstance(dp, int) and isinstance(ep, int) and dp > 0 and dp * ep == world):
        raise InputError(f"dp is {dp!r} and ep is {ep!r}; their product must be the number of "
                         f"processes, {world}")
    return init_device_mesh(device, (dp, ep), mesh_dim_names=("dp", "ep"))


# --- experts on several processes -----------------------------------------------------

class Exchange(torch.autograd.Function):
    """Rows to the other processes and rows from them: [sum(send), ...] -> [sum(receive), ...].

    send, receive: how many go to and come from each process of the group, in its order. The
    derivative of sending is sending back.
    """

    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int], group) -> Tensor:
        ctx.back = receive, send, group
        y = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), receive, send, group=group)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Exchange.apply(grad, *ctx.back), None, None, None


class ParallelExperts(nn.Module):
    """`Experts` of which each process of "ep" holds E / ep. Called alike, with its own tokens.

    The N k pairs (token, expert) are sorted by expert, and so by owner; they travel there, are
    computed, and travel back. All processes of "ep" must call it together; one may have no
    tokens.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh):
        super().__init__()
        self.mesh, self.act, self.num_experts = mesh, experts.act, len(experts.w1)
        for name in ("w1", "w2", "w3"):
            whole = getattr(experts, name)
            part = torch.empty_like(whole[:len(whole) // mesh.size()])
            cut = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(cut, requires_grad=whole.requires_grad))

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        group = self.mesh.get_group()
        expert, order = idx.flatten().sort(stable=True)                 # [N k]
        counts = torch.bincount(expert, minlength=self.num_experts)     # [E]
        counts = counts.view(self.mesh.size(), -1)                      # [ep, E / ep]
        theirs = torch.empty_like(counts)       # what each process sends to the experts here
        dist.all_to_all_single(theirs, counts, group=group)
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        token = order // idx.shape[1]
        rows = Exchange.apply(x.index_select(0, token), send, receive, group)   # [R, l]
        out = Exchange.apply(self.compute(rows, theirs), receive, send, group)  # [N k, l]
        out = upcast(out) * weights.flatten()[order, None]
        return torch.zeros_like(upcast(x)).index_add(0, token, out).to(x.dtype)

    def compute(self, rows: Tensor, theirs: Tensor) -> Tensor:
        """Each row through its expert: rows [R, l], ordered by sender and expert, as theirs
        [ep, E / ep] counts them -> [R, l]."""
        experts = torch.arange(theirs.shape[1], device=rows.device).expand_as(theirs)
        expert = experts.flatten().repeat_interleave(theirs.flatten())          # [R]
        # One row of zeros more: without any row there would be no gradient, and the processes
        # that hold the same experts would wait for it.
        rows, expert = F.pad(rows, (0, 0, 0, 1)), F.pad(expert, (0, 1))
        ones = upcast(rows).new_ones(len(rows), 1)
        w1, w2, w3 = (w.to_local() for w in (self.w1, self.w2, self.w3))
        return experts_grouped(rows, expert[:, None], ones, w1, w2, w3, self.act)[:-1]


# --- the whole model ------------------------------------------------------------------

def sharded(config: K3Config, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> K3Model:
    """A K3Model of which this process holds its part, of undefined values: see `weights`.

    It is made without memory ("meta"), cut, and only then given memory. Gradients are summed
    over the processes: for a mean, divide the loss by their number. In 16 bits it can't be
    trained: a unit would hold parameters of two precisions. InputError for experts that "ep"
    can't share evenly.
    """
    if config.num_experts % mesh["ep"].size():
        raise InputError(f"num_experts is {config.num_experts}; it must be a multiple of ep, "
                         f"{mesh['ep'].size()}")
    model = K3Model(config, device="meta", dtype=dtype)
    model.requires_grad_(dtype in (torch.float32, torch.float64))
    # Small, the same everywhere, and set by the balancer: these stay whole.
    whole = {m.e_score_correction_bias for m in model.modules() if is_router(m)}
    for bias in whole:
        bias.requires_grad_(False)
    everyone = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("all",))
    for module in units(model, mesh):
        over = mesh["dp"] if isinstance(module, ParallelExperts) else everyone
        fully_shard(module, mesh=over, reshard_after_forward=True, ignored_params=whole)
        # Sums: torch 2.13 divides twice in a group of one process, and gloo can't do means.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=mesh.device_type)
    return model


def units(model: K3Model, mesh: DeviceMesh):
    """Yields what is gathered at once, inner ones first; experts become ParallelExperts."""
    for layer in model.layers:
        yield layer.self_attn
        if hasattr(layer, "block_sparse_moe"):
            layer.ffn.experts = ParallelExperts(layer.ffn.experts, mesh["ep"])
            yield layer.ffn.experts
        yield layer.ffn
    if not model.config.tie_word_embeddings:
        yield from (model.embed_tokens, model.lm_head)
    yield model


def recompute(model: K3Model) -> None:
    """Keep of every mixer and feed-forward only what it reads, and compute the rest again when
    its gradient is due: less memory, for one more forward pass (arXiv 1604.06174)."""
    for layer in model.layers:
        for unit in (layer.self_attn, layer.ffn):
            unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def local(p: Tensor) -> Tensor:
    """The part of a parameter, a gradient or a momentum that lies here, to be written to."""
    return p.to_local() if isinstance(p, DTensor) else p


def rows_here(p: Tensor) -> tuple[int, int]:
    """Which rows of the whole parameter `local(p)` has, of a stack which experts: the first, and
    the one after the last."""
    first, end = 0, len(p)
    if isinstance(p, DTensor):          # experts: first over "ep", and each part over "dp"
        mesh = p.device_mesh
        for i, of in zip(reversed(mesh.get_coordinate()), reversed(mesh.shape)):
            start, stop = cut_rows(end - first, i, of)
            first, end = first + start, first + stop
    return first, end


def cut_rows(n: int, i: int, of: int) -> tuple[int, int]:
    """The same for part i of n rows in `of` parts, as torch cuts them: the last parts may have
    fewer, or none."""
    size = -(-n // of)
    return min(i * size, n), min((i + 1) * size, n)
