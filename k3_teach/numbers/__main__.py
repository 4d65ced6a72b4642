"""The command `python -m k3_teach.numbers`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from . import VERDICTS, figures


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m k3_teach.numbers", description="Recompute every figure that is quoted.")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    asked = parser.parse_args(arguments)
    found = figures()
    for f in found:
        print(f"{f.chapter[:2]}  {f.what}\n    {f.quoted}  |  {f.computed}  |  {f.verdict}"
              + (f": {f.note}" if f.note else ""))
    if asked.output is not None:
        data = {"verdicts": VERDICTS, "figures": [asdict(f) for f in found]}
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        try:
            asked.output.write_text(text, encoding="utf-8")
        except OSError as error:
            parser.error(f"cannot write {asked.output}: {error.strerror}")


if __name__ == "__main__":
    main()
