"""A Chromium for Playwright and a server for the built site, for the tests and `make pdf`."""

import functools
import http.server
import shutil
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip


def find_chromium(playwright):
    """The path of an installed Chromium or Chrome, else of Playwright's own, else None."""
    names = ("chromium", "chromium-browser", "google-chrome", MAC_CHROME)
    own = playwright.chromium.executable_path
    return next(filter(None, map(shutil.which, names)), own if Path(own).exists() else None)


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder under `prefix`; answers with its 404.html where there is no file."""

    prefix = "/"

    def translate_path(self, path):
        below = path.startswith(self.prefix)
        path = "/" + path.removeprefix(self.prefix) if below else "/no such file"
        return super().translate_path(path)

    def send_error(self, code, *words):
        page = Path(self.directory, "404.html")
        if code != 404 or not page.exists():
            super().send_error(code, *words)
            return
        body = page.read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # a browser that leaves need not hear of it
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder, prefix="/"):
    """The address at which `folder` is served, as GitHub Pages does it, while the block runs."""
    handler = type("Handler", (Server,), {"prefix": prefix})
    handler = functools.partial(handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix.rstrip('/')}"
    finally:
        server.shutdown()
        server.server_close()
