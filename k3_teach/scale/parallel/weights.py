"""The weights of a model that lies on many processes: from a seed, from a folder in the
released format, and into one. No process ever holds more than its part and one tensor; and,
while it writes, the tensors of one file.

A tensor is what the release calls one: a matrix of one expert, say, not a stack of them.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from k3_teach.checkpoint import CONFIG, INDEX, Stored, fitted, fitting_model, released_names
from k3_teach.config import K3Config
from k3_teach.init import RULES
from k3_teach.model import K3Model
from k3_teach.saving import _config_to_write, _cut, _index, _put_in_place, _shard_names
from k3_teach.scale.parallel.shard import local, rows_here, sharded


def parts_here(model: K3Model):
    """Yields of each tensor that lies here, wholly or in part: released name, whole shape, the
    part, to be written to, and which rows of the tensor it is."""
    for name, (p, e) in released_names(model).items():
        first, end = rows_here(p)
        if e is None:
            yield name, p.shape, local(p), slice(first, end)
        elif first <= e < end:
            yield name, p.shape[1:], local(p)[e - first], slice(None)


# --- in -------------------------------------------------------------------------------

@torch.no_grad()
def fill(model: K3Model, seed: int = 0) -> K3Model:
    """Initial weights, by the "report" column of `k3_teach.init`.

    Every tensor has its own random numbers, by seed and name, and they are drawn on the CPU:
    the weights are the same on any number of processes and on any device. (They are not those
    of `K3Model`, which draws one tensor after the other.)
    """
    std = model.config.initializer_range
    for name, shape, part, rows in parts_here(model):
        rule = next(report for end, report, _ in RULES if name.endswith(end))
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        with torch.random.fork_rng([]):
            torch.manual_seed(int.from_bytes(digest[:7]))
            whole = torch.empty(shape, dtype=part.dtype)
            rule(whole, std)
        part.copy_(whole[rows])
    return model


@torch.no_grad()
def load(folder, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> K3Model:
    """The model of a folder in the released format, of which each process reads its part: its
    experts, decoded from MXFP4 if they are stored so, and its rows of the rest.

    Errors as in `load_checkpoint`: every process meets those of names and shapes, and those of
    its own numbers.
    """
    folder = Path(folder)
    config, stored = K3Config.from_json(folder), Stored(folder)
    fitting_model(stored, config, folder)
    model = sharded(config, mesh, dtype)
    for name, shape, part, rows in parts_here(model):
        if name in stored.files and stored.shape(name) == list(shape):
            file, inside = stored.files[name]
            part.copy_(file.get_slice(inside)[rows])
        else:                                       # MXFP4, or a padded A_log
            whole = stored.read(name, part.dtype)
            part.copy_(fitted(name, whole, shape)[rows])
    return model


# --- out ------------------------------------------------------------------------------

def export(model: K3Model, folder, max_shard_bytes: int = 5 * 10 ** 9) -> None:
    """Write a folder in the released format, which `load_checkpoint` and `load` read.

    Each process writes its experts and its share of the other tensors. Files take their place
    when all are whole, the configuration last. All processes must call it, and see the same
    file system.
    """
    folder, rank = Path(folder), dist.get_rank()
    new = Path(everyone_gets(_new_folder(folder) if rank == 0 else None))
    sizes = []                              # of each file of this process: name -> bytes
    for shard in _cut(tensors_to_write(model), max_shard_bytes):
        if shard:
            save_file(shard, new / f"{rank}-{len(sizes)}", metadata={"format": "pt"})
            sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sizes)         # also: all files are written
    if rank == 0:
        files = [f"{r}-{i}" for r, those in enumerate(everyone) for i in range(len(those))]
        names = _shard_names(len(files))
        for file, name in zip(files, names):
            os.rename(new / file, new / name)
        index = _index(names, [size for those in everyone for size in those])
        (new / INDEX).write_text(index, encoding="utf-8")
        _config_to_write(model.config, False, False).to_json(new / CONFIG)
        _put_in_place(new, folder, [path.name for path in new.iterdir()])
    dist.barrier()


def tensors_to_write(model: K3Model):
    """Yields name and tensor, on the CPU, of what this process is to write. All processes
    gather each cut tensor together, and one keeps it: the one with the least so far."""
    rank, loads = dist.get_rank(), [0] * dist.get_world_size()
    for name, (p, e) in released_names(model).items():
        first, end = rows_here(p)
        if e is not None:
            if first <= e < end:
                yield name, local(p)[e - first].detach().cpu().clone()
            continue
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        writer = loads.index(min(loads))
        loads[writer] += whole.nbytes
        if rank == writer:
            yield name, whole.detach().cpu().clone()


def _new_folder(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".saving-*"):       # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    return tempfile.mkdtemp(dir=folder, prefix=".saving-")


def everyone_gets(value):
    """What process 0 has, on all."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
