"""The built site, the address it is served at, and a Chromium to read it with.

`make test` hands over the site that `make book` built (K3_SITE); without it the site is built here.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from tools.chromium import FLAGS, find_chromium, serving

__all__ = ["find_chromium", "serving"]  # for the tests, too
ROOT = Path(__file__).parents[2]
WIDTHS = [1280, 375]
SCHEMES = ["light", "dark"]


# ---- the site ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site."""
    if "K3_SITE" in os.environ:
        return ROOT / os.environ["K3_SITE"]
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build"]
    options = [str(ROOT), "--path-output", str(folder), "-W", "-n", "--keep-going"]
    done = subprocess.run([*build, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "_build/html"


@pytest.fixture(scope="session")
def pages(site):
    """Every page's path and parsed text."""
    found = {p: BeautifulSoup(p.read_text(encoding="utf-8"), "html.parser")
             for p in sorted(site.rglob("*.html")) if "_static" not in p.parts}
    assert site / "book/index.html" in found
    return found


@pytest.fixture(scope="session")
def address(site):
    """Where the site is served on this machine."""
    with serving(site) as found:
        yield found


def addresses(pages, site, address):
    """Path and address of every page."""
    return {path: f"{address}/{path.relative_to(site).as_posix()}" for path in pages}


# ---- the browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def browser():
    """A Chromium of Playwright's. Without one: a loud skip, and in CI a failure."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = find_chromium(playwright)
        if chromium is None:
            stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
            stop("NO CHROMIUM FOUND: THE PAGES WERE NOT LOOKED AT. Install Chromium or Chrome.")
        instance = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield instance
        instance.close()


@contextmanager
def screen(browser, width=1280, scheme="light", **options):
    """A fresh reader: a browser context of this width and colour scheme."""
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme, **options)
    yield context
    context.close()


def open_page(context, url, wait_until="networkidle"):
    """An open page and the list of what goes wrong on it: errors, failed or refused requests."""
    wrong, page = [], context.new_page()
    say = lambda message: wrong.append(f"console: {message.text}")
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: say(message) if message.type == "error" else None)
    page.on("requestfailed", lambda request: wrong.append(f"request failed: {request.url}"))
    page.on("response", lambda response: wrong.append(f"{response.status}: {response.url}")
            if response.status >= 400 else None)  # fmt: skip
    page.goto(url, wait_until=wait_until)
    return page, wrong


def too_wide(page):
    """A sentence if the page scrolls sideways, else nothing."""
    element = "document.documentElement"
    wide, room = page.evaluate(f"[{element}.scrollWidth, {element}.clientWidth]")
    return [f"scrolls sideways: {wide} px on a screen of {room} px"] if wide > room else []


def each_scheme(page, first):
    """The scheme that an open page has; then the other one, to which the page has changed."""
    yield first
    (other,) = {*SCHEMES} - {first}
    page.emulate_media(color_scheme=other)
    theme = "document.documentElement.dataset.theme"     # which the page of the 404 lacks
    page.wait_for_function(f"[undefined, '{other}'].includes({theme})")
    yield other
