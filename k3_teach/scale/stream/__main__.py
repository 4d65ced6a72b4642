"""Run a K3 that doesn't fit: layer by layer, only the experts that are chosen.

    python -m k3_teach.scale.stream --virtual --layers 4       weights from a seed, no disk
    python -m k3_teach.scale.stream FOLDER --ids 1,2,3         the released format
    python -m k3_teach.scale.stream --virtual --save run       kept when it is interrupted
    python -m k3_teach.scale.stream --virtual --resume run     and taken up again

Ctrl-C or SIGTERM ends after the layer that is running, and saves; a second Ctrl-C ends at
once. To resume, give the same options again, apart from --new-tokens and the prompt.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from k3_teach.arguments import COUNT, NOT_NEGATIVE, SIZE, check_arguments
from k3_teach.config import K3Config
from k3_teach.errors import InputError, K3Error
from k3_teach.scale.stream.memory import gigabytes, resident
from k3_teach.scale.stream.model import StreamedModel
from k3_teach.scale.stream.report import read_bandwidth, summary, text
from k3_teach.scale.stream.run import EVERY, FILE, Run, Sampling, Stopped
from k3_teach.scale.stream.source import SEED, FolderSource, VirtualSource, first_layers

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
          "float16": torch.float16}
THREADS = "an integer from 1 to 1024", lambda n: 1 <= n <= 1024
OPTIONS = {"prompt_tokens": SIZE, "new_tokens": COUNT, "prefill_chunk": SIZE, "seed": SEED,
           "threads": THREADS, "every": NOT_NEGATIVE}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m k3_teach.scale.stream", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("folder", nargs="?", type=Path, help="a checkpoint in the released format")
    add("--virtual", action="store_true", help="weights from --seed; no folder is read")
    add("--config", type=Path, help="with --virtual: a config.json (the released one)")
    add("--layers", type=int, help="only the first so many (all)")
    add("--ids", help="the prompt as token ids: 1,2,3")
    add("--prompt-tokens", type=int, help="or so many token ids, drawn from the seed (8)")
    add("--new-tokens", type=int, default=1, help="(%(default)s)")
    add("--temperature", type=float, default=0.0, help="0: the most likely (%(default)s)")
    add("--top-k", type=int, help="only the k most likely tokens")
    add("--top-p", type=float, help="only the most likely tokens that sum to this")
    add("--prefill-chunk", type=int, help="read the prompt in pieces of so many tokens")
    add("--seed", type=int, default=0, help="of weights, prompt and draws (%(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="(%(default)s)")
    add("--device", default="cpu", help="(%(default)s)")
    add("--threads", type=int, help="of the CPU (as torch has it)")
    add("--ceiling", default="8GB", help="of anonymous memory (%(default)s)")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--save", type=Path, metavar="FOLDER", help="keep the run there")
    where.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with that run")
    add("--every", type=float, default=EVERY, metavar="SECONDS",
        help="how often it is saved in between (%(default).0f)")
    add("--report", type=Path, metavar="FILE.json", help="write what it has cost")
    return p


def check(args) -> None:
    """InputError, before anything long is done, for what can't be meant."""
    if args.virtual == (args.folder is not None):
        raise InputError("give either a folder or --virtual")
    if args.config and not args.virtual:
        raise InputError("--config goes with --virtual; a folder has its own")
    if args.ids is not None and args.prompt_tokens is not None:
        raise InputError("give either --ids or --prompt-tokens")
    if args.resume and (args.ids is not None or args.prompt_tokens is not None):
        raise InputError("a prompt goes with a new run; --resume has one")
    check_arguments(OPTIONS, {n: x for n, x in vars(args).items() if x is not None})
    if args.save and (args.save / FILE).exists():
        raise InputError(f"{args.save} holds a run already; go on with --resume, or name "
                         "another folder")
    if args.report and args.report.is_dir():
        raise InputError(f"--report is {args.report}, a folder; it must be a file")


def check_writable(*folders: Path | None) -> None:
    """Make them. InputError, rather than hours later, where a file can't be written."""
    for folder in filter(None, folders):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as e:
            raise InputError(f"{folder} can't be written to: {e.strerror}") from None


def make_source(args):
    if not args.virtual:
        return FolderSource(args.folder, args.layers)
    whole = K3Config.from_json(args.config) if args.config else K3Config.k3()
    return VirtualSource(first_layers(whole, args.layers), args.seed, DTYPES[args.dtype])


def prompt(args, vocab_size: int) -> list[int]:
    if args.ids is None:
        chance = torch.Generator().manual_seed(args.seed)
        return torch.randint(vocab_size, (args.prompt_tokens or 8,), generator=chance).tolist()
    try:
        return [int(i) for i in args.ids.split(",")]
    except ValueError:
        raise InputError(f"--ids is {args.ids!r}; it must be token ids: 1,2,3") from None


def make_run(args) -> Run:
    source = make_source(args)
    model = StreamedModel(source, DTYPES[args.dtype], args.device, args.ceiling)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, args.prefill_chunk)
    if args.resume:
        return Run.resume(model, args.resume, args.new_tokens, sampling, every=args.every)
    ids = prompt(args, source.config.vocab_size)
    return Run(model, ids, args.new_tokens, sampling, args.save, every=args.every)


@contextmanager
def gentle(run: Run):
    """Ctrl-C and SIGTERM ask the run to stop; a second one ends it at once."""
    def stop(number, frame):
        if run.asked_to_stop:
            raise KeyboardInterrupt
        print("\nstopping after this layer", file=sys.stderr)
        run.stop()

    signals = (signal.SIGINT, signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    before = [signal.signal(s, stop) for s in signals] if main else []
    try:
        yield
    finally:
        for s, handler in zip(signals, before):
            signal.signal(s, handler)


def follow(run: Run) -> None:
    """Run to its end: tokens as they come, and a bar over the layers of each pass."""
    print("prompt " + " ".join(map(str, run.tokens[:run.prompt])), flush=True)
    for token in run.new:
        print(f"token {token} (from before)", flush=True)
    layers, model = run.model.config.num_hidden_layers, run.model
    with tqdm(total=layers, unit="layer", mininterval=0.5) as bar:
        def show(layer: int) -> None:
            p, read = model.clock.now, gigabytes(model.clock.now.total_bytes)
            bar.set_description(f"{p.tokens} token(s) behind {p.cached}", refresh=False)
            bar.set_postfix_str(f"{read} read, {gigabytes(model.peak)} held", refresh=False)
            bar.update(layer + 1 - bar.n)

        run.after_layer = show
        for token in run:
            bar.write(f"token {token}", file=sys.stdout)
            sys.stdout.flush()
            bar.reset()


def main(arguments: list[str] | None = None) -> int:
    args, run = parser().parse_args(arguments), None
    try:
        check(args)
        if args.threads:
            torch.set_num_threads(args.threads)
        run = make_run(args)
        check_writable(run.folder, args.report and args.report.parent)
        before = bandwidth(run.model)
        with gentle(run):
            follow(run)
        finish(run, (before, bandwidth(run.model)), args.report)
        return 0
    except Stopped:
        kept = f"saved in {run.folder}; --resume goes on" if run.folder else "nothing saved"
        print(f"stopped, {kept}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (K3Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def bandwidth(model: StreamedModel) -> float:
    """Measured with an array of 2 GiB, or half of what the ceiling leaves."""
    room = model.ceiling - (resident() or 0)
    return read_bandwidth(max(min(1 << 31, room // 2), 1 << 20), model.device)


def finish(run: Run, bandwidths: tuple[float, ...], file: Path | None) -> None:
    found = summary(run, *bandwidths)
    print(text(found), flush=True)
    if file is not None:
        beside = file.with_name(file.name + ".unfinished")
        beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, file)


if __name__ == "__main__":
    sys.exit(main())
