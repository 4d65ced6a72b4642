"""Serve the book, build it again when a source changes, and reload the page that is open.

    python tools/serve.py 8000

What is wrong with a build is told in the terminal; where there is no new page, the old one stays.
"""

import re
import subprocess
import sys
from pathlib import Path

from livereload import Server
from livereload.handlers import LiveReloadHandler

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["book/*.md", "book/*.ipynb", "book/*.bib"]
ABOUT_ALL = ["_config.yml", "_toc.yml", "benchmarks/stored", "book/_assets", "book/_ext",
             "book/_static"]
FAULT = re.compile(r"WARNING|ERROR|^[\w.]+(Error|Exception): \S")
BUILD = ["-c", "from jupyter_book.cli.main import main; main()", "build", ".", "-W", "-n"]


def build(*options):
    """Build what changed, or with --all everything; say how it went."""
    command = [sys.executable, *BUILD, "--keep-going", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    said = dict.fromkeys(line for line in lines if FAULT.search(line))
    if done.returncode == 0:
        print("Built.", flush=True)
    elif any("build finished with problems" in line for line in lines):
        print(*said, "Built, but `make book` would refuse it.", sep="\n", flush=True)
    else:
        place = [line for line in lines if "reading sources" in line][-1:]
        print(*place, *said, "NOT BUILT: the old pages stay.", sep="\n", flush=True)


def main(port):
    LiveReloadHandler.DEFAULT_RELOAD_TIME = 0  # else it passes over two edits within 3 s
    server = Server()
    for path in PAGES:
        server.watch(str(ROOT / path), lambda: build())
    for path in ABOUT_ALL:
        server.watch(str(ROOT / path), lambda: build("--all"))
    site = str(ROOT / "_build/html")
    server.serve(host="127.0.0.1", port=port, root=site, live_css=False)  # reload whole pages


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
