"""Train a K3 on the text that comes with Python, or on a file.

    python -m k3_teach.train run --steps 300                      a toy, bytes, 2 minutes
    python -m k3_teach.train run --resume                         go on after Ctrl-C
    python -m k3_teach.train run --steps 300 --text my.txt --bpe 1024 --config my.json
    torchrun --nproc-per-node 2 -m k3_teach.train run --steps 300

RUN is a folder: the two newest checkpoints, in the released format, and log.jsonl, a row
for each step. Ctrl-C ends after the step that is being done, and saves it.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from k3_teach.config import K3Config
from k3_teach.errors import InputError, K3Error
from k3_teach.model import K3Model
from k3_teach.saving import save_checkpoint
from k3_teach.train.loop import Trainer
from k3_teach.train.recipe import Recipe
from k3_teach.train.store import newest
from k3_teach.train.text import BPE, TOKENIZER, Bytes, Data, corpus, load_tokenizer
from k3_teach.validate import check_device

LOG = "log.jsonl"
OF_THE_RUN = "config", "init", "bpe", "tokenizer"   # what --resume finds in the folder
CHOICES = {"optimiser": ["muon", "adamw"],
           "balance": ["quantile", "quantile_exact", "sign", "none"]}


# --- options --------------------------------------------------------------------------

def parser() -> argparse.ArgumentParser:
    """Where, what, and every field of `Recipe`. Options that are not given have no value."""
    p = argparse.ArgumentParser("python -m k3_teach.train", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                argument_default=argparse.SUPPRESS)
    p.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    p.add_argument("--resume", action="store_true", default=False,
                   help="go on with the run in RUN")
    p.add_argument("--ship", type=Path, metavar="FOLDER", default=None,
                   help="at the end, write model, tokenizer and log there, in bfloat16")
    p.add_argument("--device", default="cpu", help="(cpu)")
    p.add_argument("--threads", type=int, help="of the CPU")
    what = p.add_argument_group("what is trained (not with --resume)")
    what.add_argument("--config", type=Path, metavar="FILE",
                      help="a config.json (K3Config.toy)")
    what.add_argument("--init", choices=["report", "released"], help="(report)")
    text = p.add_argument_group("the text (with --resume: the same again)")
    text.add_argument("--text", default="topics",
                      help="topics (Python's manual), library (and its docstrings) or a "
                      "file (topics)")
    how = text.add_mutually_exclusive_group()
    how.add_argument("--bpe", type=int, metavar="TOKENS",
                     help="learn a byte-pair encoding of so many tokens (bytes)")
    how.add_argument("--tokenizer", type=Path, metavar="FOLDER",
                     help="take the tokenizer.json of this folder")
    recipe = p.add_argument_group("the recipe (with --resume: what is to change)")
    for f in fields(Recipe):
        _add(recipe, f)
    return p


def _add(group, f) -> None:
    flag, default = "--" + f.name.replace("_", "-"), f.default
    if default is MISSING:
        group.add_argument(flag, type=int, help="how many")
        return
    more = {"help": f"{f.metadata['help']} ({default})"}
    if isinstance(default, bool):
        more["action"] = argparse.BooleanOptionalAction
    elif f.name in CHOICES:
        more["choices"] = CHOICES[f.name]
    else:
        more["type"] = number_or_off if f.name == "qk_clip" else type(default)
    group.add_argument(flag, **more)


def number_or_off(value: str) -> float | None:
    return None if value == "off" else float(value)


def check(args) -> None:
    """InputError, before anything long is done, for what will not work."""
    given, ignored = vars(args), [name for name in OF_THE_RUN if name in vars(args)]
    if args.resume and ignored:
        raise InputError(f"--{ignored[0]} goes with a new run; --resume takes that of {args.run}")
    if given.get("threads", 1) < 1:
        raise InputError(f"--threads is {args.threads}; it must be at least 1")
    for folder in filter(None, (args.run, args.ship)):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; it must be a folder, or not exist yet")
    check_device(args.device, "--device")
    if args.ship is not None and args.ship.resolve() == args.run.resolve():
        raise InputError("--ship must be another folder than RUN")
    if not args.resume and list(args.run.glob("step-*")):
        raise InputError(f"{args.run} holds a run already; go on with --resume, or name "
                         "another folder")
    if not args.resume and "steps" not in given:
        raise InputError("--steps is needed for a new run")
    if "tokenizer" in given and not (args.tokenizer / TOKENIZER).is_file():
        raise InputError(f"{args.tokenizer} has no {TOKENIZER}")


# --- a run ----------------------------------------------------------------------------

def read_data(args) -> Data:
    """The text, cut into tokens. With --resume, by the tokenizer of the run."""
    text, given = corpus(args.text), vars(args)
    if args.resume:
        tokenizer = load_tokenizer(newest(args.run))
    elif "tokenizer" in given:
        tokenizer = load_tokenizer(args.tokenizer)
    else:
        tokenizer = BPE.train(text, args.bpe) if "bpe" in given else Bytes()
    return Data(text, tokenizer)


def make_trainer(args, data: Data) -> Trainer:
    given = vars(args)
    recipe = {f.name: given[f.name] for f in fields(Recipe) if f.name in given}
    if args.resume:
        return Trainer.resume(args.run, data, args.device, **recipe)
    recipe = Recipe(**recipe)
    if "config" in given:
        config = K3Config.from_json(args.config)
    else:
        config = K3Config.toy(vocab_size=data.tokenizer.vocab_size)
    torch.manual_seed(recipe.seed)
    model = K3Model(config, init=given.get("init", "report")).to(args.device)
    return Trainer(model, data, recipe, args.run)


def follow(trainer: Trainer, log: Path) -> None:
    """Run to the end, with a bar on the screen and a row in the log for each step."""
    if trainer.rank:
        for _ in trainer.run():
            pass
        return
    keep_rows(log, trainer.step)
    recipe = trainer.recipe
    bar = tqdm(total=recipe.steps, initial=trainer.step, unit="step", mininterval=0.5)
    with bar, log.open("a", encoding="utf-8") as rows:
        for row in trainer.run():
            short = {name: float(f"{value:.6g}") for name, value in row.items()}
            rows.write(json.dumps(short | {"step": row["step"]}) + "\n")
            rows.flush()
            if "nats_per_byte" in row:
                bar.write(f"step {row['step']}: validation loss {row['nats_per_byte']:.4f} "
                          "nats a byte", file=sys.stderr)
            rate = recipe.rows * recipe.length / row["seconds"]
            bar.set_postfix(loss=f"{row['loss']:.3f}", tokens_s=f"{rate:.0f}",
                            MaxVio=f"{row['max_vio']:.2f}", refresh=False)
            bar.update()


def keep_rows(log: Path, step: int) -> None:
    """Leave the rows up to `step`: a run that was killed may have logged more than it kept,
    and half of a row."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    aside = log.with_suffix(".new")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(log)


def ship(trainer: Trainer, folder: Path, log: Path) -> None:
    save_checkpoint(trainer.model.to(torch.bfloat16), folder, released_layout=True)
    trainer.data.tokenizer.save(folder)
    shutil.copy(log, folder)


@contextmanager
def processes(device: str):
    """Join the others, where `torchrun` has started several."""
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    args, trainer = parser().parse_args(arguments), None
    # A scheduler ends a job with SIGTERM; that is to lose as little as Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        check(args)
        torch.set_num_threads(vars(args).get("threads", torch.get_num_threads()))
        with processes(args.device):
            trainer = make_trainer(args, read_data(args))
            follow(trainer, args.run / LOG)
            if args.ship is not None and trainer.rank == 0:
                ship(trainer, args.ship, args.run / LOG)
    except KeyboardInterrupt:
        saved = trainer is not None and trainer.saved
        what = f"saved step {saved} in {args.run}; --resume goes on" if saved else "nothing to save"
        print(f"\nstopped, {what}", file=sys.stderr)
        return 130
    except (K3Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
