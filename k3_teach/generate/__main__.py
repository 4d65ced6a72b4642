"""The command `python -m k3_teach.generate`."""

import argparse
import os
import sys

import torch

from k3_teach.checkpoint import load_checkpoint
from k3_teach.errors import K3Error
from k3_teach.generate.text import complete


def main(arguments: list[str] | None = None) -> None:
    from k3_teach.train.text import load_tokenizer
    parser = _parser()
    asked = vars(parser.parse_args(arguments))
    folder, prompt = asked.pop("folder"), asked.pop("prompt")
    sys.stdout.reconfigure(errors="replace")
    try:
        model = load_checkpoint(folder, dtype=torch.float32)
        for piece in complete(model, load_tokenizer(folder), prompt, **asked):
            print(piece, end="", flush=True)
        print()
    except K3Error as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:     # the reader has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m k3_teach.generate",
        description="Continue a text; the new part is written as it comes.")
    add = parser.add_argument
    add("folder", help="a checkpoint, with the tokenizer.json that it was trained with")
    add("prompt", help="the text to continue")
    add("--max-new-tokens", type=int, default=200, help="at most so many (%(default)s)")
    add("--temperature", type=float, default=1.0,
        help="0: always the most likely token (%(default)s)")
    add("--top-k", type=int, help="only the k most likely tokens")
    add("--top-p", type=float, help="only the most likely tokens that sum to this")
    add("--seed", type=int, help="the same seed, the same text")
    add("--stop", action="append", default=[], help="a string that ends it; repeatable")
    return parser


if __name__ == "__main__":
    main()
