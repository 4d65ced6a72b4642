"""`make serve`: an edited chapter appears on the open page; a broken one leaves the old page there."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from .browser import ROOT, screen

IN_BOOK = ["_config.yml", "_toc.yml", "benchmarks", "book", "k3_teach", "tools"]


def until(server, words):
    """What the server says up to a line with these words."""
    said = ""
    for line in server.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"the server stopped before it said {words!r}: {said}")


@pytest.fixture
def edited(site, tmp_path):
    """A copy of the book, built, that the test may edit."""
    for name in IN_BOOK:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    shutil.copytree(site, tmp_path / "_build/html")
    return tmp_path


@pytest.fixture
def address(edited):
    """Where tools/serve.py serves that copy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "tools/serve.py", str(port)]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"PYTHONPATH": str(edited)}
    server = subprocess.Popen(command, cwd=edited, env=environment, **settings)
    until(server, "Start detecting")
    yield f"http://127.0.0.1:{port}", server
    server.terminate()
    server.wait()


@pytest.mark.slow
@pytest.mark.browser
def test_an_edit_appears_and_a_mistake_is_told(browser, edited, address):
    address, server = address
    source = edited / "book/index.md"
    good = source.read_text(encoding="utf-8")
    with screen(browser) as context:
        page = context.new_page()
        page.goto(f"{address}/book/index.html")
        until(server, "Browser Connected")
        source.write_text(good + "\n\nA new last line.\n", encoding="utf-8")
        page.wait_for_selector("text=A new last line.", timeout=120_000)
        (edited / "_toc.yml").write_text("format: [", encoding="utf-8")
        assert "Error: " in until(server, "NOT BUILT")
        until(server, "Reload")
        page.wait_for_timeout(1000)
        page.wait_for_selector("text=A new last line.")
