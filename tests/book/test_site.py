"""The built site, read as a reader with no network would.

`make test` hands over the site that `make book` built (K3_SITE); without it the site is built here.
"""

import re
import struct
from urllib.parse import unquote, urldefrag, urlparse

import pytest

from .browser import ROOT, addresses, open_page, screen, serving

LOADED = dict.fromkeys(["script", "img", "iframe", "source"], "src")
LOADED |= {"object": "data", "link": "href"}
MOST_BYTES = 1_500_000  # of a page and its pictures
HOME = "https://k3-teach.github.io/k3-teach/"
# <link>s that load nothing
PLAIN_LINKS = {"canonical", "next", "prev", "author", "search", "index"}


def is_elsewhere(address):
    schemes = ("http", "https", "ftp", "ws", "wss")
    return address.startswith("//") or urlparse(address).scheme in schemes


# ---- without a browser ---------------------------------------------------------------------------


def test_links_and_anchors_lead_somewhere(pages):
    anchors = {path: {e["id"] for e in page.find_all(id=True)} for path, page in pages.items()}
    bad = []
    for path, page in pages.items():
        for element in page.select("[href]:not(base), [src]"):
            address = element.get("href") or element.get("src")
            if not address or address == "#" or urlparse(address).scheme or is_elsewhere(address):
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
                plain = PLAIN_LINKS & set(element.get("rel") or [])
                if is_elsewhere(element[attribute]) and not plain:
                    bad.append(f"{path.name}: {element[attribute]}")
        inline = " ".join(script.get_text() for script in page.find_all("script", src=False))
        bad += [f"{path.name}: {found}" for found in re.findall(r"https?://\S+\.m?js\b", inline)]
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
    chapters = [path.stem for path in (ROOT / "book").glob("*.ipynb")]
    assert not [name for name in chapters if not (site / f"book/{name}.html").exists()]


def own_bytes(path, page):
    """What only this page needs: its text and the pictures in it."""
    sources = {image["src"] for image in page.select("article img[src]")}
    local = [path.parent / unquote(source) for source in sources if not urlparse(source).scheme]
    return path.stat().st_size + sum(file.stat().st_size for file in local)


def test_pages_are_light(pages):
    weights = {path.name: own_bytes(path, page) for path, page in pages.items()}
    print(weights)
    assert not {name: size for name, size in weights.items() if size > MOST_BYTES}


def test_no_page_asks_for_the_icon_script(site, pages):
    assert not list(site.rglob("fontawesome/**/*.js"))
    scripts = "script[src*=fontawesome]"
    assert not [path.name for path, page in pages.items() if page.select_one(scripts)]


def test_every_page_says_what_it_is(site, pages):
    """Title, description and card, as other sites show them; index and search share their title."""
    titles, bad = [], []
    for path, page in real_pages(site, pages).items():
        metas = page.select("head meta[content]")
        tags = {meta.get("name") or meta.get("property"): meta["content"] for meta in metas}
        address, said = HOME + path.relative_to(site).as_posix(), tags["description"]
        titles.append(tags["og:title"])
        if not 25 <= len(said) <= 200 or said != tags["og:description"]:
            bad.append(f"{path.name}: description {said!r}")
        if tags["og:url"] != address or page.select_one("link[rel=canonical]")["href"] != address:
            bad.append(f"{path.name}: address {tags['og:url']}")
        if not (page.select_one("link[rel~=icon]") and tags["og:title"] and tags["og:image:alt"]):
            bad.append(f"{path.name}: no icon, title or words for the card")
        card = site / tags["og:image"].removeprefix(HOME)
        size = struct.unpack(">II", card.read_bytes()[16:24])
        assert size == (int(tags["og:image:width"]), int(tags["og:image:height"])) == (1200, 630)
    assert not bad and len(set(titles)) >= len(titles) - 2, "\n".join(bad)


def real_pages(site, pages):
    """Without the two that are not at an address of their own."""
    others = (site / "index.html", site / "404.html")
    return {path: page for path, page in pages.items() if path not in others}


# ---- with a browser ------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize(
    "home, path",
    [("/k3-teach/", "book/no/such/page.html"), ("/", "a/b/c/d"), ("/", "404.html")],
)
def test_404_page_works_at_any_depth(browser, site, home, path):
    with serving(site, home) as address, screen(browser) as context:
        page, wrong = open_page(context, f"{address}/{path}")
        assert page.locator("h1").text_content() == "There is no page here"
        assert page.evaluate("document.styleSheets[0].cssRules.length") > 3
        assert page.locator("svg").bounding_box()["height"] > 20
        assert not [w for w in wrong if not w.startswith("console") and not w.endswith(path)]
        page.fill("input", "router")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{address}/search.html?q=router")
        page.goto(f"{address}/{path}")
        page.click("li a >> nth=0")
        page.wait_for_url(f"{address}/book/index.html")


@pytest.mark.browser
def test_first_paint_within_a_second(browser, site, pages, address):
    """A reader's first visit, nothing cached; the best of three, for the machine may be busy."""
    late = []
    for path, url in addresses(pages, site, address).items():
        milliseconds, size = first_visit(browser, url)
        for _ in range(2):
            if milliseconds >= 1000:
                milliseconds, size = min((milliseconds, size), first_visit(browser, url))
        print(f"{path.name}: {milliseconds:.0f} ms, {size / 1e6:.2f} MB")
        if milliseconds >= 1000:
            late.append(f"{path.name}: {milliseconds:.0f} ms")
    assert not late, "\n".join(late)


def first_visit(browser, url):
    """Milliseconds until something is seen, and bytes of all that is loaded."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    loaded = "performance.getEntries().reduce((sum, e) => sum + (e.encodedBodySize || 0), 0)"
    with screen(browser) as context:
        page, _ = open_page(context, url, "load")
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        return page.evaluate(paint), page.evaluate(loaded)
