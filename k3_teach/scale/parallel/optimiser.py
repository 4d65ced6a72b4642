"""The optimisers of `k3_teach.train` for parameters that are cut into parts.

AdamW treats every number by itself, so that parts need nothing of each other. Muon needs
whole matrices: the experts of a process are whole, and the others are shared out. Each is
gathered by one process, orthogonalised there, and sent back in parts.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3_teach.scale.parallel.shard import Exchange, cut_rows, local
from k3_teach.train import optimiser
from k3_teach.train.muon import Muon, muon_direction


class ShardedMuon(Muon):
    """`Muon` for the parameters of `sharded`. Momenta are cut as the parameters are."""

    @torch.no_grad()
    def step(self) -> None:
        world = dist.get_world_size()
        for group in self.param_groups:
            direction = partial(muon_direction, num_heads=group["num_heads"],
                                steps=group["steps"], rms=group["rms"])
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                if p.ndim == 3 and len(local(p)):           # experts: whole matrices
                    self.move(p, group, direction(self.ahead(p, group)))
            cut = [p for p in trained if p.ndim == 2]
            for some in (cut[i:i + world] for i in range(0, len(cut), world)):
                parts = one_each(direction, some, [self.ahead(p, group) for p in some])
                for p, part in zip(some, parts):
                    self.move(p, group, part)

    def ahead(self, p: Tensor, group: dict) -> Tensor:
        """The momentum with the new gradient, of the part of p that lies here."""
        mu, grad = group["momentum"], local(p.grad)
        M = local(self.state[p]["momentum_buffer"]).mul_(mu).add_(grad)
        return grad + mu * M if group["nesterov"] else M

    def move(self, p: Tensor, group: dict, direction: Tensor) -> None:
        lr = group["lr"]
        local(p).mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)


def one_each(fn, whole: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    """fn of matrices that are cut by rows over all processes: the first is put together and
    computed by process 0, the second by process 1, at the same time.

    whole: the matrices [m, n], at most as many as processes; parts: the rows of each that lie
    here -> these rows of the results, which have the same shapes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    send = [part.numel() for part in parts] + [0] * (world - len(parts))
    receive, mine = [0] * world, rank < len(whole)
    if mine:
        m, n = whole[rank].shape
        ends = [cut_rows(m, r, world) for r in range(world)]
        receive = [(end - first) * n for first, end in ends]
    here = Exchange.apply(torch.cat([part.flatten() for part in parts]), send, receive, None)
    if mine:
        here = fn(here.view(m, n)).flatten()
    back = Exchange.apply(here, receive, send, None).split(send)
    return [rows.view_as(part) for rows, part in zip(back, parts)]


def make_optimisers(model: nn.Module, kind: str = "muon", per_head: bool = True,
                    weight_decay: float = 0.1) -> dict[str, torch.optim.Optimizer]:
    """As in `k3_teach.train.optimiser`; their state is there from the start, so that it can be
    saved and loaded."""
    made = optimiser.make_optimisers(model, kind, per_head, weight_decay)
    for group in made["adamw"].param_groups:
        group["foreach"] = False    # it would mix the parameters of both meshes in one call
        for p in group["params"]:
            made["adamw"].state[p] = dict(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p),
                                          exp_avg_sq=torch.zeros_like(p))
    if "muon" in made:
        made["muon"] = muon = ShardedMuon(made["muon"].param_groups)
        for p in (p for group in muon.param_groups for p in group["params"]):
            muon.state[p] = dict(momentum_buffer=torch.zeros_like(p))
    return made


@torch.no_grad()
def clip_gradients(model: nn.Module, longest: float) -> Tensor:
    """Shorten the gradient of the whole model to `longest`. -> its length before.

    Every number lies on one process: squares are summed here, then over all.
    """
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    squares = torch.stack([g.square().sum(dtype=torch.float64) for g in grads]).sum()
    dist.all_reduce(squares)
    length = squares.sqrt()
    scale = (longest / (length + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale.to(g.dtype))
    return length
