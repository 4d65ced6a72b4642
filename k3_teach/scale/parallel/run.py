"""Training on many processes: `k3_teach.train.Trainer` for a model that is cut, and its
checkpoints.

    step-000500/shard-00003-model-00001-of-00001.safetensors    what process 2 held
    step-000500/training.json                                   what is no tensor

They are written by `torch.distributed.checkpoint`, which cuts them anew for the processes that
read them: a run of 4 can go on with 2. Its own format keeps a pickle, and who reads a pickle
runs what is in it; so the parts are stored by its other writer, as safetensors, whose headers
say where in the whole tensor each part belongs. The rest is JSON. (Pickles do travel between
the processes of a run, never out of a file.)
"""

import json
import os
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import DeviceMesh

from k3_teach.config import K3Config
from k3_teach.errors import CheckpointError, InputError, shown
from k3_teach.files import read_json
from k3_teach.model import next_token_loss
from k3_teach.parts.mla import MLA
from k3_teach.scale.parallel.optimiser import clip_gradients, make_optimisers
from k3_teach.scale.parallel.shard import local, rows_here, sharded
from k3_teach.train.loop import Trainer
from k3_teach.train.muon import apply_qk_clip_
from k3_teach.train.recipe import Recipe
from k3_teach.train.store import KEPT, TRAINING, newest
from k3_teach.train.text import Data

PARTS = "*.safetensors"
DTYPES = {"float32": torch.float32, "float64": torch.float64}     # that are trained


class ParallelTrainer(Trainer):
    """A Trainer for a model of `sharded`, which all processes make and call together.

    `folder` must be the same for all, on a file system that all see. Only whole steps that
    are due are kept: an interruption leaves the checkpoint before.
    """

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe, folder=None):
        super().__init__(model, data, recipe, None if folder is None else Path(folder))
        self.optimisers = make_optimisers(model, recipe.optimiser, recipe.per_head,
                                          recipe.weight_decay)

    def run(self):
        """Yields a row after each step until the recipe's end, as `Trainer.run` does."""
        while self.step < self.recipe.steps:
            yield self._step_and_what_is_due()
        self._keep()

    def _gradients(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            logits = self.model(ids)
        loss = next_token_loss(logits, ids) / self.world    # gradients will be summed
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss, clip_gradients(self.model, self.recipe.clip)

    def _largest(self, name: str) -> Tensor:
        mla = self.mla[name]
        mla.unshard()
        largest = super()._largest(name)
        mla.reshard()
        return largest

    def _clip(self, mla: MLA, gamma: Tensor) -> None:
        clip_logits_(mla, gamma)

    # --- keeping it -------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All that the next step reads, by name: parameters and momenta, cut as they are."""
        named = dict(self.model.named_parameters())
        names = {p: n for n, p in named.items()}
        state = {f"{kind}:{field}:{names[p]}": value
                 for kind, optimiser in self.optimisers.items()
                 for p, fields in optimiser.state.items() for field, value in fields.items()}
        return {f"model:{n}": p.detach() for n, p in named.items()} | state

    def save(self) -> int:
        """Write the checkpoint of this step; it and the one before are kept. -> the step.

        InputError for weights that are not finite: the folder stays as it is.
        """
        self._must_be_finite()
        new = self.folder / f".saving-{self.step:06d}"
        if self.rank == 0:
            for leftover in self.folder.glob(".saving-*"):      # of a run that was killed
                shutil.rmtree(leftover)
            new.mkdir(parents=True)
        dist.barrier()
        writer = HuggingFaceStorageWriter(str(new), save_distributed=True)
        try:
            dcp.save(self.tensors(), storage_writer=writer)
        except CheckpointException as error:
            raise CheckpointError(f"{new}: can't be written; {last_line(error)}") from None
        if self.rank == 0:
            self._finish(new)
        dist.barrier()
        self.saved = self.step
        return self.step

    def _must_be_finite(self) -> None:
        bad = [n for n, p in self.model.named_parameters() if not bool(local(p).isfinite().all())]
        everyone = [None] * self.world
        dist.all_gather_object(everyone, bad[:1])
        if bad := sum(everyone, []):
            raise InputError(f"step {self.step} is not saved: {bad[0]} holds NaN or infinity")

    def _finish(self, new: Path) -> None:
        """Give the checkpoint its name, and only then remove an old one."""
        dtype = str(self.model.embed_tokens.weight.dtype).removeprefix("torch.")
        about = dict(step=self.step, recipe=asdict(self.recipe), text=self.fingerprint(),
                     config=self.model.config.to_dict(), dtype=dtype, files=sizes(new))
        self.data.tokenizer.save(new)
        (new / TRAINING).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        target = self.folder / f"step-{self.step:06d}"
        if target.exists():             # of a run that was resumed from before it
            shutil.rmtree(target)
        os.rename(new, target)
        whole = sorted(p for p in self.folder.glob("step-*") if (p / TRAINING).is_file())
        for old in whole[:-KEPT]:
            shutil.rmtree(old)

    @classmethod
    def resume(cls, folder, data: Data, mesh: DeviceMesh, **changes) -> "ParallelTrainer":
        """Go on from the newest checkpoint, on any number of processes.

        With the same ones on the same machines, the bits are those of one run. changes: of
        fields of the recipe. InputError for another text; CheckpointError for a folder without
        a whole checkpoint.
        """
        if unknown := changes.keys() - {f.name for f in fields(Recipe)}:
            raise InputError(f"a recipe has no {min(unknown)}; what may change are its fields")
        checkpoint = newest(folder)
        config, dtype, recipe, step, fingerprint = read_about(checkpoint)
        model = sharded(config, mesh, dtype=dtype)
        trainer = cls(model, data, replace(recipe, **changes), folder)
        if trainer.fingerprint() != fingerprint:
            raise InputError(f"{checkpoint} was trained on another text, or with another "
                             "tokenizer; a run is resumed with the data it began with")
        try:
            dcp.load(trainer.tensors(), storage_reader=HuggingFaceStorageReader(str(checkpoint)))
        except (CheckpointException, SafetensorError, OSError, LookupError, ValueError, TypeError,
                AttributeError, AssertionError) as error:
            raise CheckpointError(f"{checkpoint}: does not hold this model; "
                                  f"{last_line(error)}") from None
        trainer.step = trainer.saved = step
        return trainer


def last_line(error: BaseException) -> str:
    """Of its message, in which `torch.distributed.checkpoint` has a traceback first."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def sizes(checkpoint: Path) -> dict[str, int]:
    """The files that hold parts, and their bytes."""
    return {path.name: path.stat().st_size for path in sorted(checkpoint.glob(PARTS))}


def read_about(checkpoint: Path) -> tuple[K3Config, torch.dtype, Recipe, int, str]:
    """What stands beside the tensors. CheckpointError if it is not as it was written, and if a
    file of parts is: what it held would keep the values that happen to be in memory."""
    file = checkpoint / TRAINING
    about = read_json(file, CheckpointError)
    try:
        files, recipe = dict(about["files"]), Recipe(**about["recipe"])
        step, text, dtype = about["step"], str(about["text"]), DTYPES[about["dtype"]]
        config = K3Config.from_dict(about["config"])
        if type(step) is not int or step < 1:
            raise ValueError(f"step is {shown(step)}")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file}: not what a run on many processes writes ({e})") from None
    there = sizes(checkpoint)
    wrong = sorted(n for n in files.keys() | there.keys() if files.get(n) != there.get(n))
    if wrong:
        raise CheckpointError(f"{checkpoint / wrong[0]}: has {there.get(wrong[0], 'no')} bytes; "
                              f"it must have {files.get(wrong[0], 'no')}")
    return config, dtype, recipe, step, text


@torch.no_grad()
def clip_logits_(mla: MLA, gamma: Tensor) -> None:
    """`apply_qk_clip_` for weights that are cut: gamma [H].

    It multiplies rows; so let it do that to one column of ones, and take the rows here.
    """
    if bool((gamma == 1).all()):
        return
    weights = {name: getattr(mla, name).weight for name in ("q_proj", "q_b_proj", "kv_b_proj")
               if hasattr(mla, name)}
    ones = {name: SimpleNamespace(weight=torch.ones(len(w), 1, dtype=w.dtype, device=w.device))
            for name, w in weights.items()}
    apply_qk_clip_(SimpleNamespace(num_heads=mla.num_heads, nope_dim=mla.nope_dim, **ones), gamma)
    for name, w in weights.items():
        local(w).mul_(ones[name].weight[slice(*rows_here(w))])
