"""The whole book as one PDF: Chromium prints every page, pypdf joins them.

    python -m tools.pdf _build/html _build/book.pdf

Links between pages lead to places in the PDF, the outline has parts, chapters and their sections,
and every page has its number.
"""

import io
import re
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import yaml
from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, FloatObject, NameObject, NullObject, TextStringObject

from .chromium import FLAGS, find_chromium, serving

ROOT = Path(__file__).resolve().parents[1]
SIDES = {"top": "17mm", "bottom": "20mm", "left": "17mm", "right": "17mm"}
PAPER = {"format": "A4", "print_background": True, "margin": SIDES}

# The theme prints a title and a table of contents before each page; the book has its own.
STYLE = """
#jb-print-docs-body { display: none !important; }
.bd-main .bd-content { margin-left: 0 !important; }
.bd-main .bd-content .bd-article h1:first-of-type { display: block !important; margin-top: 0; }
.prev-next-footer, .bd-footer, .bd-footer-article { display: none !important; }
"""
# Everything folded is opened. Links to a page's own anchors make Chromium write where these are.
PREPARE = """async anchors => {
  if (window.MathJax?.startup) await MathJax.startup.promise;
  await document.fonts.ready;
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const places = document.createElement("div");
  places.style.cssText = "font-size:1px;line-height:1px;color:transparent";
  for (const id of anchors) if (document.getElementById(id)) {
    const link = document.createElement("a");
    link.style = "all: unset";
    link.href = "#" + id; link.textContent = "."; places.append(link);
  }
  document.querySelector("article").append(places);
}"""
HEADS = """() => [...document.querySelectorAll("article h1, article h2")].map(head => {
  const copy = head.cloneNode(true);
  copy.querySelectorAll(".headerlink").forEach(link => link.remove());
  return [head.tagName, copy.textContent.trim(), head.closest("section")?.id ?? ""];
})"""
FRONT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 11pt/1.5 system-ui, sans-serif; color: #20262e; }}
header {{ break-after: page; padding-top: 60mm; }} header img {{ width: 70mm; }}
h1 {{ font-size: 30pt; line-height: 1.2; }} h2 {{ font-size: 18pt; }} h3 {{ margin: 1.2em 0 .3em; }}
a {{ color: inherit; text-decoration: none; display: flex; align-items: baseline; gap: .5em; }}
a i {{ flex: 1; border-bottom: 1px dotted #888; }}
</style><header><img alt="" src="{logo}"><h1>{title}</h1><p>{author}</p><p>{address}</p>
<p>Text and figures: CC BY 4.0. Code: MIT.</p></header><h2>Contents</h2>{lines}</html>"""
NUMBERS = """<!doctype html><meta charset="utf-8"><style>
@page {{ size: A4; margin: 0; }}
body {{ margin: 0; font: 8.5pt system-ui, sans-serif; color: #555; }}
p {{ box-sizing: border-box; height: 296.9mm; margin: 0; padding: 284mm 17mm 0; display: flex;
  justify-content: space-between; break-after: page; }}
</style>{lines}"""


@dataclass
class Chapter:
    """A page of the site, and where it stands in the PDF."""

    name: str
    part: str
    reader: PdfReader = None
    title: str = ""
    sections: list = field(default_factory=list)  # (title, anchor)
    first: int = 0  # number of its first page, from 0

    def place(self, anchor=""):
        """Page and height of an anchor; of its own top, where there is no such anchor."""
        found = self.reader.named_destinations.get("/" + anchor)
        if found is None:
            return self.first, None
        return self.first + self.reader.get_destination_page_number(found), found.top


def table_of_contents():
    """The book's settings, and its pages in order."""
    config, toc = (yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
                   for name in ("_config.yml", "_toc.yml"))  # fmt: skip
    listed = [Chapter(chapter["file"], part["caption"])
              for part in toc["parts"] for chapter in part["chapters"]]  # fmt: skip
    return config, [Chapter(toc["root"], ""), *listed]


# ---- printing ------------------------------------------------------------------------------------


def anchors_in_use(site, chapters):
    """Page -> all its anchors that some page of the book links to."""
    found = {chapter.name: set() for chapter in chapters}
    for chapter in chapters:
        text = (site / f"{chapter.name}.html").read_text(encoding="utf-8")
        for link in re.findall(r'href="([^":]*#[^"]+)"', text):
            page, anchor = urldefrag(urljoin(f"{chapter.name}.html", link))
            found.get(page.removesuffix(".html"), set()).add(unquote(anchor))
    return found


def print_chapter(context, address, chapter, anchors):
    tab = context.new_page()
    tab.goto(f"{address}/{chapter.name}.html")
    heads = tab.evaluate(HEADS)
    chapter.title = heads[0][1]
    chapter.sections = [(title, anchor) for tag, title, anchor in heads if tag == "H2"]
    tab.add_style_tag(content=STYLE)
    tab.evaluate(PREPARE, sorted(anchors | {anchor for _, anchor in chapter.sections}))
    chapter.reader = PdfReader(io.BytesIO(tab.pdf(**PAPER, scale=0.8)))
    tab.close()


def print_text(context, html):
    """Pages of our own: the front of the book, and the page numbers."""
    tab = context.new_page()
    tab.set_content(html)
    data = tab.pdf(**PAPER | {"prefer_css_page_size": True})
    tab.close()
    return PdfReader(io.BytesIO(data))


def front(config, chapters, address):
    """Title page and contents."""
    lines, part = [], ""
    for chapter in chapters:
        if chapter.part != part:
            part = chapter.part
            lines.append(f"<h3>{escape(part)}</h3>")
        link = f"{address}/{chapter.name}.html"
        words = f"{escape(chapter.title)}<i></i>{chapter.first + 1}"
        lines.append(f'<a href="{link}">{words}</a>')
    home = config["html"]["baseurl"]
    return FRONT.format(title=config["title"], author=config["author"], address=home,
                        logo=f"{address}/_static/logo.svg", lines="".join(lines))  # fmt: skip


def numbers(chapters, pages_before):
    """A sheet for every page after the front: the chapter's title and the page's number."""
    lines, number = [], pages_before
    for chapter in chapters:
        for _ in chapter.reader.pages:
            number += 1
            lines.append(f"<p><span>{escape(chapter.title)}</span><span>{number}</span></p>")
    return NUMBERS.format(lines="".join(lines))


# ---- joining -------------------------------------------------------------------------------------


def join(front_pages, chapters, sheets, config):
    writer = PdfWriter()
    writer.append(front_pages, import_outline=False)
    for chapter in chapters:
        writer.append(chapter.reader, import_outline=False)
    for page, sheet in zip(writer.pages[len(front_pages.pages):], sheets.pages, strict=True):
        page.merge_page(sheet)
        page.compress_content_streams()
    writer.add_metadata({"/Title": config["title"], "/Author": config["author"]})
    writer.root_object[NameObject("/Lang")] = TextStringObject("en")
    writer.compress_identical_objects()
    return writer


def mend_links(writer, chapters, address, home):
    """Addresses of the built site become places in the PDF, or addresses of the published one."""
    pages = {chapter.name: chapter for chapter in chapters}
    for number, page in enumerate(writer.pages):
        here = next((c for c in reversed(chapters) if c.first <= number), None)
        for link in page.get("/Annots") or []:
            link = link.get_object()
            uri = link.get("/A", {}).get("/URI", "")
            page, anchor = urldefrag(uri.removeprefix(address + "/"))
            target = pages.get(page.removesuffix(".html"))
            if isinstance(link.get("/Dest"), str):
                _lead(writer, link, *here.place(link["/Dest"].removeprefix("/")))
            elif target and uri.startswith(address):
                _lead(writer, link, *target.place(unquote(anchor)))
            elif uri.startswith(address):
                link["/A"][NameObject("/URI")] = TextStringObject(uri.replace(address + "/", home))


def _lead(writer, link, at, top):
    """Let a link lead to page `at`, scrolled to the height `top`."""
    page, nothing = writer.pages[at].indirect_reference, NullObject()
    height = nothing if top is None else FloatObject(top)
    link.pop("/A", None)
    link[NameObject("/Dest")] = ArrayObject(
        [page, NameObject("/XYZ"), nothing, height, nothing]
    )


def add_outline(writer, chapters):
    put = lambda title, page, parent=None: writer.add_outline_item(
        title=title, page_number=page, parent=parent
    )
    parts = {"": None}
    for chapter in chapters:
        if chapter.part not in parts:
            parts[chapter.part] = put(chapter.part, chapter.first)
        item = put(chapter.title, chapter.first, parts[chapter.part])
        for title, anchor in chapter.sections:
            put(title, chapter.place(anchor)[0], item)


def make(site, path):
    from playwright.sync_api import sync_playwright

    config, chapters = table_of_contents()
    with serving(site) as address, sync_playwright() as playwright:
        chromium = find_chromium(playwright)
        if chromium is None:
            raise SystemExit("make pdf needs a Chromium or Chrome; none was found.")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        context = browser.new_context(color_scheme="light", viewport={"width": 900, "height": 1200})
        writer = print_book(context, address, site, config, chapters)
        browser.close()
    writer.write(path)
    print(f"{path}: {len(writer.pages)} pages, {Path(path).stat().st_size / 1e6:.1f} MB")


def print_book(context, address, site, config, chapters):
    anchors = anchors_in_use(site, chapters)
    for chapter in chapters:
        print_chapter(context, address, chapter, anchors[chapter.name])
    before = len(print_text(context, front(config, chapters, address)).pages)
    first = before
    for chapter in chapters:
        chapter.first, first = first, first + len(chapter.reader.pages)
    front_pages = print_text(context, front(config, chapters, address))
    sheets = print_text(context, numbers(chapters, before))
    writer = join(front_pages, chapters, sheets, config)
    mend_links(writer, chapters, address, config["html"]["baseurl"])
    add_outline(writer, chapters)
    return writer


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve(), sys.argv[2])
