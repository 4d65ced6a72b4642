"""The built site made lighter and sounder: what no page needs goes, the theme's faults are mended.

Runs over the finished files, since the theme writes these lines into each page past any setting.
"""

import re
import shutil
from pathlib import Path

# Icons are drawn by the theme's icon font, which every page has anyway. Its script draws the same
# icons a second time, and is larger than most chapters.
ICON_SCRIPT = re.compile(r'\s*<script src="[^"]*/fontawesome/[^"]*"></script>')
RARE_ICONS = re.compile(r'\s*<link rel="preload" as="font"[^>]*fa-regular[^>]*>')
# A letter of the icon font is a picture: nothing to read out.
ICON = re.compile(r'<(i|span) (?=class="fa[a-z]* fa-)')
# A bibliography's entries are neither list items nor of that deprecated role.
LIST_ROLE = re.compile(r'<div role="list" class="citation-list">')
ENTRY_ROLE = re.compile(r'(<div class="citation" id="[^"]*") role="doc-biblioentry">')
MENDED = [
    (ICON_SCRIPT, ""),
    (RARE_ICONS, ""),
    (ICON, r'<\1 aria-hidden="true" '),
    (LIST_ROLE, '<div class="citation-list">'),
    (ENTRY_ROLE, r"\1>"),
]

# Of MathJax the pages load tex-chtml.js and fonts; the rest is for rare TeX commands and its menu.
MATHJAX = ["tex-chtml.js", "output/chtml/fonts", "input/tex/extensions", "a11y", "sre", "ui"]
MATHMAPS = ["base.json", "en.json", "nemeth.json"]
UNUSED = [
    "locales",
    "sphinx-thebe.*",
    "*webpack-macros.html",
    "scripts/*.map",
    "scripts/*.LICENSE.txt.map",
    "styles/*.map",
    "vendor/fontawesome/*/js",
    "vendor/fontawesome/*/webfonts/*.ttf",
]


def finish(app, exception):
    """Mend every page, then remove the files that none of them can load."""
    if exception or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        if "_static" not in page.parts:
            mend(page)
    static = Path(app.outdir, "_static")
    for pattern in UNUSED:
        for path in list(static.glob(pattern)):
            _remove(path)
    keep_only(static / "mathjax", MATHJAX)
    keep_only(static / "mathjax/sre/mathmaps", MATHMAPS)


def mend(page):
    text = page.read_text(encoding="utf-8")
    mended = text
    for pattern, new in MENDED:
        mended = pattern.sub(new, mended)
    if mended != text:
        page.write_text(mended, encoding="utf-8", newline="\n")


def keep_only(folder, kept):
    """Remove every file of `folder` that is not one of `kept`, or below one."""
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(name == k or name.startswith(k + "/") for k in kept):
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def setup(app):
    app.connect("build-finished", finish, priority=900)  # after MathJax has been copied
    for name in ("k3_share", "k3_404"):
        app.setup_extension(name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
