"""The optimisers of `k3_teach.train` for parameters that are cut into parts.

AdamW treats every number by itself, so that parts need nothing of each other. Muon needs
whole matrices: the experts of a process are whole, and every other matrix is gathered,
orthogonalised by everyone, and cut again.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3_teach.scale.parallel.shard import local, rows_here
from k3_teach.train.muon import Muon, muon_direction
from k3_teach.train.optimiser import parameter_groups


class ShardedMuon(Muon):
    """`Muon` for the parameters of `sharded`. Momenta are cut as the parameters are."""

    def update(self, p: Tensor, group: dict) -> None:
        mu, lr, here = group["momentum"], group["lr"], local(p)
        grad = local(p.grad)
        M = local(self.state[p]["momentum_buffer"]).mul_(mu).add_(grad)
        ahead = grad + mu * M if group["nesterov"] else M
        here.mul_(1 - lr * group["weight_decay"])
        how = group["num_heads"], group["steps"], group["rms"]
        if p.ndim == 3:                             # experts: whole matrices
            direction = muon_direction(ahead, *how)
        else:
            direction = muon_direction(gathered(ahead, p), *how)[slice(*rows_here(p))]
        here.add_(direction, alpha=-lr)


def gathered(part: Tensor, p: DTensor) -> Tensor:
    """The whole matrix of which every process has the part that it has of p."""
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False,
                              shape=p.shape, stride=p.stride()).full_tensor()


def make_optimisers(model: nn.Module, kind: str = "muon", per_head: bool = True,
                    weight_decay: float = 0.1) -> dict[str, torch.optim.Optimizer]:
    """As in `k3_teach.train.optimiser`; their state is there from the start, so that it can be
    saved and loaded."""
    by_muon, by_adamw = parameter_groups(model, per_head)
    if kind == "adamw":
        by_adamw, by_muon = [{"params": g["params"]} for g in by_muon] + by_adamw, []
    # foreach would mix the parameters of both meshes in one call.
    adamw = torch.optim.AdamW(by_adamw, betas=(0.9, 0.95), weight_decay=weight_decay,
                              foreach=False)
    for p in (p for group in adamw.param_groups for p in group["params"]):
        adamw.state[p] = dict(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p),
                              exp_avg_sq=torch.zeros_like(p))
    if not by_muon:
        return {"adamw": adamw}
    muon = ShardedMuon(by_muon, weight_decay=weight_decay)
    for p in (p for group in muon.param_groups for p in group["params"]):
        muon.state[p] = dict(momentum_buffer=torch.zeros_like(p))
    return {"muon": muon, "adamw": adamw}


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
