"""Train a K3 on the text that comes with Python, or on a file.

    python -m k3_teach.train run --steps 300                      a toy, bytes, 2 minutes
    python -m k3_teach.train run --resume                         go on after Ctrl-C
    python -m k3_teach.train run --text my.txt --bpe 1024 --config my.json
    torchrun --nproc-per-node 2 -m k3_teach.train run             two processes

RUN is a folder: the newest checkpoint, in the released format, and log.jsonl, a row for
each step. Ctrl-C ends after the step that is being done, and saves it.
"""

import argparse
import json
import os
import shutil
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
from k3_teach.train.loop import Recipe, Trainer
from k3_teach.train.store import newest
from k3_teach.train.text import BPE, Bytes, Data, corpus, load_tokenizer

LOG = "log.jsonl"


def parser() -> argparse.ArgumentParser:
    """The options: where, what, and every field of `Recipe`."""
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m k3_teach.train", description=__doc__,
                                formatter_class=form)
    p.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    p.add_argument("--resume", action="store_true", help="go on with the run in RUN")
    p.add_argument("--ship", type=Path, metavar="FOLDER",
                   help="at the end, write model, tokenizer and log there, in bfloat16")
    what = p.add_argument_group("what is trained (with --resume: as before)")
    what.add_argument("--config", type=Path, metavar="FILE",
                      help="a config.json (default: K3Config.toy)")
    what.add_argument("--init", choices=["report", "released"], default="report")
    what.add_argument("--device", default="cpu")
    what.add_argument("--threads", type=int, default=None, help="of the CPU")
    text = p.add_argument_group("the text (with --resume: the same again)")
    text.add_argument("--text", default="topics",
                      help="'topics' (Python's manual), 'library' (and its docstrings) or "
                      "a file (default: topics)")
    text.add_argument("--bpe", type=int, metavar="TOKENS",
                      help="learn a byte-pair encoding of so many tokens (default: bytes)")
    text.add_argument("--tokenizer", type=Path, metavar="FOLDER",
                      help="take the tokenizer.json of this folder")
    recipe = p.add_argument_group("the recipe (with --resume: as before)")
    for f in fields(Recipe):
        default = None if f.default is MISSING else f.default
        add_option(recipe, f.name, default)
    return p


def add_option(group, name: str, default) -> None:
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
    elif name == "steps":
        group.add_argument(flag, type=int, help="how many (needed for a new run)")
    elif name == "qk_clip":
        off = lambda value: None if value == "off" else float(value)
        group.add_argument(flag, type=off, default=default, help="a number, or 'off'")
    else:
        group.add_argument(flag, type=type(default), default=default, help=f"({default})")


def read_data(args) -> Data:
    """The text, cut into tokens. With --resume, by the tokenizer of the run."""
    text = corpus(args.text)
    folder = newest(args.run) if args.resume else args.tokenizer
    if folder is not None:
        tokenizer = load_tokenizer(folder)
    else:
        tokenizer = Bytes() if args.bpe is None else BPE.train(text, args.bpe)
    return Data(text, tokenizer)


def new_trainer(args, data: Data) -> Trainer:
    """InputError if RUN has a run already."""
    if list(args.run.glob("step-*")):
        raise InputError(f"{args.run} holds a run already; go on with --resume, or name "
                         "another folder")
    if args.steps is None:
        raise InputError("--steps is needed for a new run")
    recipe = Recipe(**{f.name: getattr(args, f.name) for f in fields(Recipe)})
    if args.config is None:
        config = K3Config.toy(vocab_size=data.tokenizer.vocab_size)
    else:
        config = K3Config.from_json(args.config)
    torch.manual_seed(recipe.seed)
    model = K3Model(config, init=args.init).to(args.device)
    return Trainer(model, data, recipe, args.run)


def follow(trainer: Trainer, log: Path) -> None:
    """Run to the end, with a bar on the screen and a row in the log for each step."""
    keep_rows(log, trainer.step)
    first, r = trainer.rank == 0, trainer.recipe
    bar = tqdm(total=r.steps, initial=trainer.step, disable=not first, unit="step",
               file=sys.stderr, mininterval=0.5)
    with bar, log.open("a", encoding="utf-8") as rows:
        for row in trainer.run():
            if not first:
                continue
            short = {name: float(f"{value:.6g}") for name, value in row.items()}
            rows.write(json.dumps(short | {"step": row["step"]}) + "\n")
            rows.flush()
            rate = r.rows * (r.length - 1) / row["seconds"]
            shown = dict(loss=f"{row['loss']:.3f}", tokens_s=f"{rate:.0f}",
                         MaxVio=f"{row['max_vio']:.2f}")
            if "validation_loss" in row:
                bar.write(f"step {row['step']}: validation loss {row['nats_per_byte']:.4f} "
                          "nats a byte", file=sys.stderr)
            bar.set_postfix(shown, refresh=False)
            bar.update()


def keep_rows(log: Path, step: int) -> None:
    """Leave the rows up to `step`: a run that was killed may have logged more than it kept."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    log.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


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
    args = parser().parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        with processes(args.device):
            data = read_data(args)
            trainer = (Trainer.resume(args.run, data, args.device) if args.resume
                       else new_trainer(args, data))
            follow(trainer, args.run / LOG)
            if args.ship is not None and trainer.rank == 0:
                save_checkpoint(trainer.model.to(torch.bfloat16), args.ship,
                                released_layout=True)
                data.tokenizer.save(args.ship)
                shutil.copy(args.run / LOG, args.ship)
    except KeyboardInterrupt:
        print(f"\nstopped, and saved in {args.run}; --resume goes on", file=sys.stderr)
        return 130
    except K3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
