"""Train a K3 on many processes, one for each accelerator, or on a CPU to try it.

    torchrun --standalone --nproc-per-node 4 -m k3_teach.scale.parallel --folder run \\
        --steps 20 --ep 2
    torchrun --standalone --nproc-per-node 2 -m k3_teach.scale.parallel --folder run --resume

On nodes of 8 GPUs, the same line on each node:

    torchrun --nnodes 56 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m k3_teach.scale.parallel --folder /shared/run --from /shared/Kimi-K3 \\
        --text /shared/text.txt --tokenizer /shared/Kimi-K3 --ep 64 --device cuda \\
        --rows 448 --length 1024 --autocast --recompute --steps 1000

By `k3_teach.scale.cost` that is 84 GB each, activations aside, which are 29 GB more for 1024
tokens; so it wants 141 GB. It was never run: there was no such machine.

The grid is dp x ep: --ep processes share each layer's experts, and what is left is dp. FOLDER
is seen by all and keeps the two newest checkpoints. A worker that is lost ends the run; --resume
goes on from the last checkpoint, with as many workers as there are then.
"""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.distributed_c10d import _set_pg_timeout

from k3_teach.config import K3Config
from k3_teach.errors import InputError, K3Error
from k3_teach.scale.parallel.lost import Notices
from k3_teach.scale.parallel.run import ParallelTrainer
from k3_teach.scale.parallel.shard import make_mesh, recompute, sharded
from k3_teach.scale.parallel.weights import export, fill, load
from k3_teach.train.recipe import Recipe
from k3_teach.train.store import newest
from k3_teach.train.text import Bytes, Data, corpus, load_tokenizer

NEW_RUN = "config", "weights", "tokenizer"      # what --resume finds in the folder


# --- options --------------------------------------------------------------------------

def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("torchrun ... -m k3_teach.scale.parallel", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", type=Path, required=True, help="of the run")
    p.add_argument("--resume", action="store_true", help="go on with the run in FOLDER")
    p.add_argument("--export", type=Path, help="at the end, write the released format there")
    p.add_argument("--dp", type=int, help="(what is left)")
    p.add_argument("--ep", type=int, default=1, help="processes that share experts (1)")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(cpu)")
    p.add_argument("--recompute", action="store_true",
                   help="less memory for activations, a third more work")
    p.add_argument("--timeout", type=float, default=600, metavar="SECONDS",
                   help="how long to wait for a worker that does not answer (600)")
    what = p.add_argument_group("what is trained (not with --resume)")
    what.add_argument("--config", type=Path, help="a config.json (K3Config.toy)")
    what.add_argument("--from", type=Path, dest="weights", metavar="FOLDER",
                      help="the weights of a folder in the released format (random ones)")
    what.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="its tokenizer.json (bytes)")
    p.add_argument("--text", default="topics", help="topics, library or a file (topics)")
    recipe = p.add_argument_group("the recipe (with --resume: what is to change)")
    recipe.add_argument("--steps", type=int)
    recipe.add_argument("--checkpoint-every", type=int, dest="save_every", metavar="STEPS")
    recipe.add_argument("--rows", type=int, help="of a batch, over all processes")
    recipe.add_argument("--length", type=int, help="tokens in a row")
    recipe.add_argument("--lr", type=float)
    recipe.add_argument("--optimiser", choices=["muon", "adamw"])
    recipe.add_argument("--autocast", action=argparse.BooleanOptionalAction)
    recipe.add_argument("--seed", type=int)
    return p


def check(args) -> None:
    """InputError for options that do not go together."""
    for folder in filter(None, (args.folder, args.export)):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; it must be a folder, or not exist yet")
    given = [name for name in NEW_RUN if getattr(args, name) is not None]
    if args.resume and given:
        flag = "from" if given[0] == "weights" else given[0]
        raise InputError(f"--{flag} goes with a new run; --resume takes that of {args.folder}")
    if args.config is not None and args.weights is not None:
        raise InputError("--config and --from exclude each other: a folder has its own")
    if not args.resume and args.steps is None:
        raise InputError("--steps is needed for a new run")
    if not args.resume and list(args.folder.glob("step-*")):
        raise InputError(f"{args.folder} holds a run already; go on with --resume, or name "
                         "another folder")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda; torch finds no such device here")
    if not 0 < args.timeout < 1e6:
        raise InputError(f"--timeout is {args.timeout}; it must be above 0 and below 1e6")


# --- a run ----------------------------------------------------------------------------

def make_trainer(args) -> ParallelTrainer:
    world = dist.get_world_size()
    dp = args.dp if args.dp is not None else max(1, world // max(1, args.ep))
    mesh = make_mesh(dp, args.ep, args.device)
    for group in mesh.get_all_groups():     # they have not taken it from that of all
        _set_pg_timeout(timedelta(seconds=args.timeout), group)
    names = "steps", "save_every", "rows", "length", "lr", "optimiser", "autocast", "seed"
    recipe = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if args.resume:
        data = Data(corpus(args.text), load_tokenizer(newest(args.folder)))
        return ParallelTrainer.resume(args.folder, data, mesh, **recipe)
    recipe = Recipe(**recipe)
    tokenizer = Bytes() if args.tokenizer is None else load_tokenizer(args.tokenizer)
    data = Data(corpus(args.text), tokenizer)
    if args.weights is not None:
        model = load(args.weights, mesh)
    else:
        toy = K3Config.toy(vocab_size=tokenizer.vocab_size)
        config = toy if args.config is None else K3Config.from_json(args.config)
        model = fill(sharded(config, mesh), recipe.seed)
    return ParallelTrainer(model, data, recipe, args.folder)


def follow(trainer: ParallelTrainer) -> None:
    """Run to the end; process 0 prints a row for each step."""
    for row in trainer.run():
        if trainer.rank == 0:
            print(f"step {row['step']}  loss {row['loss']:.4f}  {row['seconds']:.2f} s", flush=True)


# --- many processes -------------------------------------------------------------------

def meet() -> Notices:
    """Find the others, by what `torchrun` has left in the environment."""
    try:
        return Notices(*next(dist.rendezvous("env://")))
    except ValueError:
        raise InputError("started without torchrun; see --help for a line that works") from None


def join(args, notices: Notices) -> None:
    """Begin to compute with them."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl", store=notices.store,
                            rank=notices.rank, world_size=notices.world,
                            timeout=timedelta(seconds=args.timeout))


def is_lost(error: RuntimeError) -> bool:
    """Is it that another worker does not answer? (gloo has no type for it.)"""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def where(trainer: ParallelTrainer) -> str:
    """How far a run has come, and what to do when it is lost."""
    kept = (f"{trainer.folder} holds step {trainer.saved}: start again with --resume"
            if trainer.saved else "no step was saved: start again")
    return f" in step {trainer.step + 1}; {kept}"


def main(arguments: list[str] | None = None) -> int:
    args, notices = parser().parse_args(arguments), None
    try:
        notices = meet()
        notices.listen()
        check(args)
        join(args, notices)
        trainer = make_trainer(args)
        if args.recompute:
            recompute(trainer.model)
        notices.where = lambda: where(trainer)
        follow(trainer)
        if args.export is not None:
            export(trainer.model, args.export)
        dist.destroy_process_group()
    except (K3Error, OSError, SafetensorError) as error:
        if notices is None:
            print(f"error: {error}", file=sys.stderr)
        else:
            notices.say(str(error))
        return 1
    except RuntimeError as error:
        if notices is None or not is_lost(error):
            raise
        notices.say_who_is_lost()
        return 1
    except KeyboardInterrupt:
        if notices is not None:
            notices.say(f"the run was stopped{notices.where()}")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
