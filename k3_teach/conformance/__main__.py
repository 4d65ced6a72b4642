"""The command `python -m k3_teach.conformance`."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from k3_teach.conformance import adapters, describe, run
from k3_teach.conformance.kit import TOLERANCE
from k3_teach.conformance.report import listing, pitfall
from k3_teach.errors import K3Error


def main(arguments: list[str] | None = None) -> int:
    """0 if no probe failed, 1 if one did."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.list:
        print(listing())
        return 0
    try:
        results = run(adapters.find(asked.adapter), asked.probe, asked.dtype)
        print(describe(results))
        if asked.json:
            rows = [{"name": pitfall(r).name, **{k: _number(x) for k, x in asdict(r).items()}}
                    for r in results]
            Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except (K3Error, OSError) as error:
        parser.error(str(error))
    return int(any(r.status == "failed" for r in results))


def _number(x):
    """JSON has no infinity."""
    return "inf" if x == float("inf") else x


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m k3_teach.conformance",
        description="Does a port of Kimi K3 compute what the release computes, and if not, "
                    "which of forty known mistakes is it?")
    add = parser.add_argument
    add("adapter", nargs="?", default="k3_teach.conformance:k3_teach",
        help="module:attribute with load, forward and trace; see k3_teach/conformance/"
             "adapters.py (%(default)s)")
    add("--list", action="store_true", help="print the pitfalls and how they are looked for")
    add("--probe", type=int, action="append", metavar="N",
        help="only this one, 0 for equality with the released model; repeatable")
    add("--dtype", choices=TOLERANCE, default="float64",
        help="what the port computes in (%(default)s); float32 cannot show small mistakes")
    add("--json", metavar="FILE", help="write the results to this file, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
