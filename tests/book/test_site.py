"""The built site, read as a reader with no network would.

`make test` hands over the site that `make book` built (K3_SITE); without it the site is built here.
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).parents[2]
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}
PLAIN_LINKS = {"canonical", "next", "prev", "author", "search", "index"}  # <link>s that load nothing


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    if "K3_SITE" in os.environ:
        return ROOT / os.environ["K3_SITE"]
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(ROOT)]
    options = ["--path-output", str(folder), "-W", "-n", "--keep-going"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "_build/html"


@pytest.fixture(scope="session")
def pages(site):
    """Every page's path and parsed text."""
    found = {p: BeautifulSoup(p.read_text(encoding="utf-8"), "html.parser")
             for p in sorted(site.rglob("*.html")) if "_static" not in p.parts}
    assert site / "book/index.html" in found
    return found


def is_elsewhere(address):
    return address.startswith("//") or urlparse(address).scheme in ("http", "https", "ftp", "ws", "wss")


# ---- without a browser ----------------------------------------------------------------------------


def test_links_and_anchors_lead_somewhere(pages):
    anchors = {path: {e["id"] for e in page.find_all(id=True)} for path, page in pages.items()}
    bad = []
    for path, page in pages.items():
        for element in page.find_all(href=True) + page.find_all(src=True):
            address = element.get("href") or element.get("src")
            if not address or address == "#" or urlparse(address).scheme or address.startswith("//"):
                continue
            file, anchor = urldefrag(address)
            target = (path.parent / unquote(file.split("?")[0])).resolve() if file else path
            if not target.exists():
                bad.append(f"{path.name}: no file {address}")
            elif anchor and target in anchors and unquote(anchor) not in anchors[target]:
                bad.append(f"{path.name}: no anchor {address}")
    assert not bad, "\n".join(bad)


def test_pages_load_nothing_from_elsewhere(pages):
    bad = []
    for path, page in pages.items():
        for tag, attribute in LOADED.items():
            for element in page.find_all(tag, **{attribute: True}):
                if is_elsewhere(element[attribute]) and not PLAIN_LINKS & set(element.get("rel") or []):
                    bad.append(f"{path.name}: {element[attribute]}")
        for script in page.find_all("script", src=False):
            bad += [f"{path.name}: {found}" for found in re.findall(r"https?://\S+\.m?js\b", script.get_text())]
    assert not bad, "\n".join(bad)


def test_style_sheets_load_nothing_from_elsewhere(site):
    outside = re.compile(r"url\(\s*['\"]?(?:https?:)?//[^)]*|@import\s+['\"](?:https?:)?//[^'\"]*")
    bad = [f"{sheet.name}: {found[:100]}" for sheet in site.rglob("*.css")
           for found in outside.findall(sheet.read_text(encoding="utf-8"))]
    assert not bad, "\n".join(bad)


def test_every_picture_has_alt_text(pages):
    bad = [f"{path.name}: {image['src'][:80]}" for path, page in pages.items()
           for image in page.select("article img") if not image.get("alt", "").strip()]
    assert not bad, "\n".join(bad)


def test_every_chapter_is_in_the_book(site):
    missing = [p.name for p in (ROOT / "book").glob("*.ipynb") if not (site / f"book/{p.stem}.html").exists()]
    assert not missing


# ---- with a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def address(site):
    """Where the site is served on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def find_chromium(playwright):
    names = ("chromium", "chromium-browser", "google-chrome", MAC_CHROME)
    own = playwright.chromium.executable_path
    return next(filter(None, map(shutil.which, names)), own if Path(own).exists() else None)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = find_chromium(playwright)
        if chromium is None:
            stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
            stop("NO CHROMIUM FOUND: THE PAGES WERE NOT LOOKED AT. Install Chromium or Chrome to run these tests.")
        instance = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield instance
        instance.close()


def visit(context, url):
    """Open one page; return what went wrong: errors, failed or outside requests, sideways scrolling."""
    wrong, page = [], context.new_page()
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("requestfailed", lambda request: wrong.append(f"request failed: {request.url}"))
    page.on("response", lambda response: wrong.append(f"{response.status}: {response.url}")
            if response.status >= 400 else None)  # fmt: skip
    page.goto(url, wait_until="networkidle")
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    if wide[0] > wide[1]:
        wrong.append(f"scrolls sideways: {wide[0]} px on a screen of {wide[1]} px")
    page.close()
    return wrong


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_a_browser_without_network(browser, address, site, pages, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    outside = []

    def only_here(route):
        if route.request.url.startswith((address, "data:", "blob:")):
            return route.continue_()
        outside.append(route.request.url)
        return route.abort()

    context.route("**/*", only_here)
    bad = [f"{path.name}: {wrong}" for path in pages
           for wrong in visit(context, f"{address}/{path.relative_to(site).as_posix()}")]
    context.close()
    assert not outside and not bad, "\n".join(outside + bad)
