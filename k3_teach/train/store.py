"""The checkpoints of a run: a folder `step-000500` in the released format, and beside the
model what the next step needs.

    config.json, model.safetensors, tokenizer.json      the model; `load_checkpoint` reads it
    optimiser.safetensors                               momenta, by optimiser and parameter
    training.json                                       step, recipe, which text

A folder is made under another name and renamed when it is whole, and only then is an old
one removed. Two are kept: the newest may be of a run that has begun to diverge. No pickle:
what is read can't run.
"""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from k3_teach.checkpoint import load_checkpoint
from k3_teach.errors import CheckpointError, InputError
from k3_teach.files import read_json
from k3_teach.model import K3Model
from k3_teach.saving import save_checkpoint
from k3_teach.train.recipe import Recipe

OPTIMISER, TRAINING = "optimiser.safetensors", "training.json"
UNFINISHED, KEPT = ".saving-", 2
MOMENTA = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}


def check(folder, model: nn.Module) -> None:
    """InputError for a model that the released format can't hold, and for a folder that
    can't be one."""
    if not isinstance(model, K3Model):
        raise InputError(f"a {type(model).__name__} has no released format; only a K3Model "
                         "is kept in a folder")
    if Path(folder).exists() and not Path(folder).is_dir():
        raise InputError(f"{folder} is a file; a run needs a folder")


def save(folder, model: nn.Module, optimisers: dict, tokenizer, step: int, recipe,
         fingerprint: str) -> Path:
    """Write the checkpoint of a step; it and the one before are kept. -> its folder.

    InputError for weights that are not finite: the folder stays as it is.
    """
    check(folder, model)
    bad = [n for n, p in model.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        raise InputError(f"step {step} is not saved: {bad[0]} holds NaN or infinity")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    new = Path(tempfile.mkdtemp(dir=folder, prefix=UNFINISHED))
    try:
        save_checkpoint(model, new)
        tokenizer.save(new)
        save_file(_optimiser_tensors(model, optimisers), new / OPTIMISER)
        about = dict(step=step, recipe=asdict(recipe), text=fingerprint)
        (new / TRAINING).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        new.chmod(0o755)            # mkdtemp makes folders for one user alone
        target = folder / f"step-{step:06d}"
        if target.exists():         # of a run that was resumed from before it
            os.rename(target, f"{new}-old")
        os.rename(new, target)
    finally:
        _remove_leftovers(folder)
    for old in _whole(folder)[:-KEPT]:
        shutil.rmtree(old)
    return target


def _remove_leftovers(folder: Path) -> None:
    """What a save that was killed has left."""
    for leftover in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def newest(folder) -> Path:
    """The checkpoint of a folder. CheckpointError where there is none."""
    found = _whole(Path(folder))
    if not found:
        raise CheckpointError(f"{folder}: holds no checkpoint of a run (step-NNNNNN)")
    return found[-1]


def load(checkpoint: Path, device="cpu") -> tuple[K3Model, int, dict, str]:
    """-> model, step, the recipe's fields, the text's fingerprint."""
    about = read_json(checkpoint / TRAINING, CheckpointError)
    try:
        step, recipe, text = about["step"], about["recipe"], about["text"]
        good = type(step) is int and step >= 0 and "steps" in recipe
        good = good and recipe.keys() <= {f.name for f in fields(Recipe)}
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise CheckpointError(f"{checkpoint / TRAINING}: must be JSON with step, recipe and "
                              "text, as a run writes them")
    return load_checkpoint(checkpoint, device=device).train(), step, recipe, text


def load_optimisers(checkpoint: Path, model: nn.Module, optimisers: dict) -> None:
    """Give every optimiser its momenta. CheckpointError for a file that does not fit."""
    file = checkpoint / OPTIMISER
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file}: not a readable safetensors file ({e})") from None
    parameters = dict(model.named_parameters())
    for key, value in stored.items():
        kind, field, name = (key.split(":", 2) + ["", ""])[:3]
        if kind not in optimisers or name not in parameters:
            raise CheckpointError(f"{file}: {key} belongs to no optimiser of this run")
        p = parameters[name]
        shape = torch.Size([]) if field == "step" else p.shape
        if value.shape != shape or not value.is_floating_point():
            raise CheckpointError(f"{file}: {key} is {value.dtype} {list(value.shape)}; it "
                                  f"must be floats {list(shape)}")
        # AdamW counts its steps on the CPU.
        optimisers[kind].state[p][field] = value if field == "step" else value.to(p.device)
    for kind, optimiser in optimisers.items():
        for state in optimiser.state.values():
            if state.keys() != MOMENTA[kind]:
                raise CheckpointError(f"{file}: a parameter of {kind} has {sorted(state)}; "
                                      f"it must have {sorted(MOMENTA[kind])}")


def _optimiser_tensors(model: nn.Module, optimisers: dict) -> dict[str, torch.Tensor]:
    names = {p: n for n, p in model.named_parameters()}
    return {f"{kind}:{field}:{names[p]}": value.detach().cpu().contiguous().clone()
            for kind, optimiser in optimisers.items()
            for p, state in optimiser.state.items() for field, value in state.items()}


def _whole(folder: Path) -> list[Path]:
    """The checkpoints that are complete, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / TRAINING).is_file())
