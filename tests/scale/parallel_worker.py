"""What each process of test_parallel.py does: `torchrun ... parallel_worker.py WHAT FOLDER`.

FOLDER has what one process has computed; an assertion that fails here ends the launch.
"""

import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import k3_teach as k3
from k3_teach.checkpoint import Stored
from k3_teach.model import next_token_loss
from k3_teach.parts.moe import Experts
from k3_teach.parts.situ import Activation
from k3_teach.scale.parallel import (
    ParallelExperts, ParallelTrainer, __main__ as command, export, fill, load, make_mesh,
    recompute, sharded)
from k3_teach.scale.parallel.lost import Notices
from k3_teach.scale.parallel.shard import local, rows_here
from k3_teach.train.recipe import Recipe
from k3_teach.train.text import Bytes, Data, corpus

CLOSE = dict(rtol=0, atol=1e-9)         # float64; sums of up to a thousand terms in another order
RECIPE = dict(steps=2, rows=8, length=24, qk_clip=0.05, clip=0.5, lr=0.01)      # all of it has an effect


def equal_to_one_process(folder, case, mesh, change=lambda model: None):
    """Logits, loss and every gradient; then two steps with all that belongs to one."""
    one, rank, world = load_file(folder / f"{case}.safetensors"), dist.get_rank(), dist.get_world_size()
    model, ids = load(folder / case, mesh, torch.float64).train(), one["ids"][rank::world]
    change(model)
    logits = model(ids)
    torch.testing.assert_close(logits, one["logits"][rank::world], **CLOSE)
    loss = next_token_loss(logits, ids) / world
    loss.backward()
    dist.all_reduce(loss := loss.detach())
    torch.testing.assert_close(loss, one["loss"], **CLOSE)
    for name, p in model.named_parameters():
        if p.requires_grad:
            expected = one[f"grad:{name}"]
            size = expected.abs().max().clamp_min(1e-9)     # 0 for the first depth read: it has one source
            torch.testing.assert_close(local(p.grad) / size, expected[slice(*rows_here(p))] / size, **CLOSE,
                                       msg=lambda m: f"{name}: {m}")
    model.zero_grad()
    data = Data(corpus(folder / "text.txt"), Bytes())
    rows = list(ParallelTrainer(model, data, Recipe(**RECIPE)).run())
    for name in ("loss", "grad_norm", "max_vio"):
        torch.testing.assert_close(torch.tensor([r[name] for r in rows], dtype=torch.float64), one[f"rows:{name}"], **CLOSE)
    for name, p in model.named_parameters():
        torch.testing.assert_close(local(p.detach()), one[f"after:{name}"][slice(*rows_here(p))], **CLOSE,
                                   msg=lambda m: f"{name}: {m}")
    return model


def experts_at_the_extremes(mesh):
    """Process 0 has no token; everyone's tokens want the same two of eight experts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Experts(8, 16, 12, Activation("situ", 4.0, 25.0), 0.3).double()
    counts = torch.arange(world) * 3
    x, weights = torch.randn(int(counts.sum()), 16).double(), torch.rand(int(counts.sum()), 2).double()
    idx = torch.tensor([[5, 4]]).repeat(len(x), 1)
    parts = ParallelExperts(whole, mesh["ep"])
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    for name in ("w1", "w2", "w3"):
        local(getattr(parts, name)).data.copy_(getattr(whole, name)[mine])
    own = slice(int(counts[:rank].sum()), int(counts[:rank + 1].sum()))
    x1, x2 = x[own].clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = parts(x1, idx[own], weights[own]), whole(x2, idx, weights)
    torch.testing.assert_close(y1, y2[own], **CLOSE)
    y1.square().sum().backward()
    y2.square().sum().backward()
    torch.testing.assert_close(x1.grad, x2.grad[own], **CLOSE)
    for name in ("w1", "w2", "w3"):
        torch.testing.assert_close(local(getattr(parts, name).grad), getattr(whole, name).grad[mine], **CLOSE)


def from_the_released_format(folder, mesh):
    """Each process decodes its own experts, and none of another."""
    read, before = [], Stored.read
    Stored.read = lambda self, name, dtype: read.append(name) or before(self, name, dtype)
    model = load(folder / "released", mesh, torch.float64).eval()
    Stored.read = before
    one, rank, world = load_file(folder / "released.safetensors"), dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        torch.testing.assert_close(model(one["ids"]), one["logits"], **CLOSE)
        half = load(folder / "released", mesh, torch.bfloat16).eval()
        error = (half(one["ids"]).double() - one["half"]).norm() / one["half"].norm()
    assert error < 0.02, error
    experts = {n for n in read if ".experts." in n}
    assert all(n.endswith(".A_log") for n in set(read) - experts)       # nothing else is read as a whole
    everyone = [None] * world
    dist.all_gather_object(everyone, experts)
    assert sum(map(len, everyone)) == len(set.union(*everyone)) == 2 * 8 * 3    # layers, experts, matrices
    share = sum(local(p).numel() for p in model.parameters())
    assert share < 1.02 * sum(p.numel() for p in model.parameters()) / world + 64


def going_on_gives_the_same_bits(folder, mesh):
    """Four steps; and two of them, then the other two after a new start. What is no number isn't kept."""
    data, run = Data(corpus(folder / "text.txt"), Bytes()), folder / "whole"
    recipe = Recipe(**RECIPE | dict(steps=4, save_every=2))
    model = fill(sharded(k3.K3Config.from_json(folder / "six"), mesh, torch.float64))
    whole = ParallelTrainer(model, data, recipe, run)
    losses = [row["loss"] for row in whole.run()]
    if dist.get_rank() == 0:
        shutil.move(run / "step-000004", run / "aside")
    dist.barrier()
    again = ParallelTrainer.resume(run, data, mesh)
    assert again.step == 2
    assert [row["loss"] for row in again.run()] == losses[2:]
    a, b = whole.tensors(), again.tensors()
    assert a.keys() == b.keys() and all(torch.equal(local(a[n]), local(b[n])) for n in a)
    if dist.get_rank() == 1:
        local(whole.model.norm.weight.detach())[-1] = torch.inf
    with pytest.raises(k3.InputError, match="step 4 is not saved: norm.weight holds NaN or infinity"):
        whole.save()
    return losses


def main(what, folder):
    torch.set_num_threads(1)
    options = command.parser().parse_args(["--folder", str(folder / "killed")])
    command.join(options, notices := command.meet())
    six = k3.K3Config.from_json(folder / "six")
    if what == "four":
        equal_to_one_process(folder, "small", make_mesh(2, 2))
        model = equal_to_one_process(folder, "small", mesh := make_mesh(1, 4), recompute)
        export(model, folder / "exported", max_shard_bytes=200_000)
        experts_at_the_extremes(mesh)
        export(fill(sharded(six, make_mesh(2, 2))), folder / "filled-4")
        killed(notices, folder)
    equal_to_one_process(folder, "other", make_mesh(2, 1))
    equal_to_one_process(folder, "other", mesh := make_mesh(1, 2))
    from_the_released_format(folder, mesh)
    losses = going_on_gives_the_same_bits(folder, mesh)
    export(fill(sharded(six, make_mesh(2, 1))), folder / "filled-2")
    after_the_kill(folder, mesh, losses)
    refusals(notices, folder)


def arguments(folder, *more):
    return ["--text", str(folder / "text.txt"), "--folder", str(folder / "killed"), *more]


def killed(notices, folder):
    """The command, until process 1 is killed in its third step. Of the 3 experts of a column one has 2."""
    command.meet, command.join, before = lambda: notices, lambda *_: None, ParallelTrainer._update
    command.sharded, command.Recipe = partial(sharded, dtype=torch.float64), partial(Recipe, qk_clip=0.05, clip=0.5)

    def update(self, lr):
        ep = self.model.layers[1].ffn.experts.mesh.get_group()
        assert ep._get_backend(torch.device("cpu")).options._timeout.seconds == 99
        if self.rank == 1 and self.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        before(self, lr)

    ParallelTrainer._update = update
    given = "--steps 4 --checkpoint-every 2 --rows 8 --length 24 --lr 0.01 --ep 2 --timeout 99".split()
    sys.exit(command.main(arguments(folder, "--config", str(folder / "six"), *given)))


def after_the_kill(folder, mesh, losses):
    """What four processes have kept, two go on with."""
    data = Data(corpus(folder / "text.txt"), Bytes())
    again = ParallelTrainer.resume(folder / "killed", data, mesh)
    assert again.step == 2
    rows = [row["loss"] for row in again.run()]
    assert len(rows) == 2 and max(abs(a - b) for a, b in zip(rows, losses[2:])) < 1e-9


def refusals(notices, folder):
    """Each is said once, and both processes come back from it."""
    notices_of = lambda case: Notices(dist.PrefixStore(case, notices.store), notices.rank, notices.world)
    dist.destroy_process_group, command.join = lambda: None, lambda *_: None
    new = ["--steps", "1", "--rows", "8", "--length", "24"]
    damaged, garbled = folder / "damaged" / "step-000002", folder / "garbled" / "step-000002"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "whole" / "step-000002", damaged)
        shutil.copytree(folder / "whole" / "step-000002", garbled)
        (damaged / (name := "shard-00002-model-00001-of-00001.safetensors")).unlink()
        (garbled / name).write_bytes(b"x" * (garbled / name).stat().st_size)
        (folder / "seven").mkdir()
        k3.K3Config.toy(num_experts=7).to_json(folder / "seven" / "config.json")
    dist.barrier()
    cases = [["--dp", "3", *new], ["--ep", "0", *new], ["--ep", "2", "--config", str(folder / "seven"), *new], ["--resume"],
             ["--from", str(folder / "seven"), *new], ["--export", str(folder / "text.txt"), *new],
             ["--rows", "3", "--steps", "1"], [], ["--resume", "--config", "x"],
             ["--timeout", "0", *new]]
    for n, case in enumerate(cases):
        command.meet = lambda: notices_of(f"case {n}")
        assert command.main(["--folder", str(folder / "nothing"), *case]) == 1
        dist.barrier()
    for broken in (damaged, garbled):
        command.meet = lambda: notices_of(broken.parent.name)
        assert command.main(arguments(folder, "--resume", "--folder", str(broken.parent))) == 1
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
