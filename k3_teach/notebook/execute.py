"""The one tool that executes the chapters and writes them down.

    python -m k3_teach.notebook.execute run   book/*.ipynb    # execute, store in normal form
    python -m k3_teach.notebook.execute check book/*.ipynb    # only tell what is wrong
"""

import argparse
import sys
import time
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from . import form


def execute(path, timeout=300):
    """The text in normal form of the notebook at `path`, run in its folder with a fresh kernel."""
    notebook = form.normalise(form.read(path.read_text(encoding="utf-8")))
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # the kernel's own talk
        resources={"metadata": {"path": str(path.parent.resolve())}},
    )
    return form.write(client.execute())


def run(path):
    """Execute one notebook and store it; a notebook that fails is left as it was."""
    start = time.perf_counter()
    try:
        text = execute(path)
    except CellExecutionError as error:
        print(f"{path}: FAILED\n{error}", file=sys.stderr)
        return False
    path.write_text(text, encoding="utf-8", newline="\n")
    seconds, size = time.perf_counter() - start, len(text.encode()) / 1024
    print(f"{path}: {seconds:.1f} s, {size:.0f} KiB", flush=True)
    return check(path)


def check(path):
    """Print what is wrong with one stored notebook; True if nothing is."""
    found = form.problems(path)
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    return not found


def main(arguments=None):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("command", choices=["run", "check"])
    parser.add_argument("notebooks", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    action = {"run": run, "check": check}[options.command]
    results = [action(path) for path in options.notebooks]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
