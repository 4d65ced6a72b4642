"""What the pages add to plain Markdown: labels, terms, numbers, pictures, in the built book."""

import re
import runpy
import sys

import nbformat
import pytest

from .browser import ROOT, SCHEMES, addresses, open_page, screen
from .colours import PAGES, contrast

sys.path.insert(0, str(ROOT / "book/_ext"))

from k3_words import LABELS, is_nearly_a_label, label_of  # noqa: E402

CHAPTERS = sorted((ROOT / "book").glob("*.ipynb"))
STYLE = (ROOT / "book/_static/k3.css").read_text(encoding="utf-8")


def number_of(path):
    """02_moe -> 2; None for a page that is no chapter."""
    found = re.match(r"(\d+)_", path.stem)
    return int(found[1]) if found else None


def found_in(pages, selector):
    """Every such element, with the page it is on."""
    return [(path, element) for path, page in pages.items() for element in page.select(selector)]


def words_of(element):
    return " ".join(element.get_text().split()).rstrip("#")


# ---- evidence labels -----------------------------------------------------------------------------


def in_markdown(path):
    """The Markdown of a chapter or page, captions included, code left out."""
    if path.suffix == ".md":
        return re.sub(r"```text.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.S)
    cells = nbformat.read(path, as_version=4).cells
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    figures = [cell.metadata.get("mystnb", {}).get("figure", {}) for cell in cells]
    captions = [figure.get("caption", "") for figure in figures]
    return re.sub(r"`[^`\n]*`", "", "\n\n".join(text + captions))


def test_every_label_is_a_badge(pages, site):
    label = re.compile(r"(?<!\*)\*\[(" + "|".join(LABELS) + r")\]\*(?!\*)")
    for source in [*CHAPTERS, *(ROOT / "book").glob("*.md")]:
        page = pages[site / f"book/{source.stem}.html"]
        shown = [words_of(badge) for badge in page.select("article .k3-label")]
        assert sorted(shown) == sorted(label.findall(in_markdown(source))), source.name


def test_no_label_was_missed(pages):
    left = [f"{path.name}: {words_of(em)}" for path, em in found_in(pages, "article em")
            if label_of(words_of(em)) or is_nearly_a_label(words_of(em))]  # fmt: skip
    assert not left, "\n".join(left)


def test_badges_lead_to_the_legend(pages, site):
    rows = {row["id"]: row for row in pages[site / "book/index.html"].select("tr[id^=label-]")}
    assert set(rows) == {f"label-{name}" for name, _ in LABELS.values()}
    assert all(row.select(".k3-label") for row in rows.values())
    links = found_in(pages, "article a.k3-label")
    assert len(links) > 100
    for path, link in links:
        row = rows[link["href"].partition("#")[2]]
        assert link["title"] == words_of(row.select("td")[1]), path.name


# ---- the glossary --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def entries(pages, site):
    """The word of each entry -> its section on the page."""
    found = pages[site / "book/glossary.html"].select("#glossary > section")
    return {words_of(section.h2): section for section in found}


def test_glossary_is_in_order_and_short(entries):
    assert len(entries) > 60
    letters = lambda word: re.sub(r"[^a-z0-9 ]", "", word.lower())
    assert list(entries) == sorted(entries, key=letters)
    for word, section in entries.items():
        says = words_of(section.p)
        assert 15 < len(says) < 320 and says.endswith("."), f"{word}: {says}"


def test_glossary_calls_the_chapters_by_their_names(entries, pages):
    titles = {path.name: words_of(page.h1) for path, page in pages.items() if number_of(path) is not None}
    for word, section in entries.items():
        for link in section.select("a[href*='.html']"):
            assert titles[link["href"]].endswith(words_of(link)), word


def test_links_to_the_glossary_carry_its_words(entries, pages):
    said = {section["id"]: words_of(section.p) for section in entries.values()}
    for path, link in found_in(pages, "article a.k3-term"):
        assert link["title"] == said[link["href"].partition("#")[2]], path.name
    missed = found_in(pages, "article p a[href^='glossary.html#']:not(.k3-term)")
    assert not missed


# ---- numbers -------------------------------------------------------------------------------------


def test_chapters_have_the_numbers_of_their_files(pages):
    for path, page in pages.items():
        number = number_of(path)
        shown = [words_of(found) for found in page.select("article .section-number")]
        assert shown == ([] if number is None else [f"{number}."]), path.name
        for what, form in (("figcaption .caption-number", "Figure {}.{}"), (".eqno", "({}.{})")):
            found = [words_of(caption) for caption in page.select(what)]
            wanted = [form.format(number, k) for k in range(1, len(found) + 1)]
            assert number is None or found == wanted, path.name


def test_the_table_of_contents_shows_the_numbers(pages, site):
    listed = pages[site / "book/index.html"].select("nav.bd-links a")
    words = {link["href"]: words_of(link) for link in listed}
    for path in CHAPTERS:
        assert words[f"{path.stem}.html"].startswith(f"{number_of(path)}. ")
    assert words["glossary.html"] == "Glossary"


# ---- pictures ------------------------------------------------------------------------------------


def test_drawings_are_part_of_the_page(pages):
    assert not found_in(pages, "article img[src$='.svg']")
    for path, svg in found_in(pages, "article svg.k3-svg"):
        assert svg["role"] == "img" and svg["aria-label"].strip(), path.name
        assert not svg.select("metadata"), path.name


def test_ids_in_pictures_are_unique_on_their_page(pages):
    for path, page in pages.items():
        ids = [element["id"] for element in page.find_all(id=True)]
        in_pictures = [element["id"] for element in page.select("svg.k3-svg, svg.k3-svg [id]")]
        assert [i for i in in_pictures if ids.count(i) > 1] == [], path.name


# ---- colours -------------------------------------------------------------------------------------


def tokens(scheme):
    selector = {"light": "\nhtml", "dark": 'html[data-theme="dark"]'}[scheme]
    block = re.search(re.escape(selector) + r" \{([^}]*)\}", STYLE)[1]
    return dict(re.findall(r"--k3-(\w+): (#\w{6});", block))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_are_those_of_the_package_and_readable(scheme):
    package = runpy.run_path(str(ROOT / "k3_teach/notebook/palette.py"))[scheme.upper()]
    ours = tokens(scheme)
    assert {name: ours.get(name) for name in package} == package
    for name, colour in ours.items():
        assert name == "on" or contrast(colour, PAGES[scheme]) >= 4.5, name
        assert name in ("on", "strong") or contrast(colour, ours["on"]) >= 4.5, name


# ---- with a browser ------------------------------------------------------------------------------


def chapter(address):
    return f"{address}/book/02_moe.html"


def hexadecimal(colour):
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.browser
def test_pictures_follow_the_colours_of_the_page(browser, address):
    paint = "e => [...e.querySelectorAll('rect, text')].map(p => getComputedStyle(p).fill)"
    ground = "e => getComputedStyle(e.parentElement).backgroundColor"
    fills = {}
    for scheme in SCHEMES:
        with screen(browser, 1280, scheme) as context:
            page, _ = open_page(context, chapter(address))
            picture = page.locator("svg.k3-svg").first
            fills[scheme] = {hexadecimal(f) for f in picture.evaluate(paint) if f != "none"}
            assert fills[scheme] <= set(tokens(scheme).values())
            assert picture.evaluate(ground) == "rgba(0, 0, 0, 0)"
    assert len(fills["light"]) > 2 and not fills["light"] & fills["dark"]


@pytest.mark.browser
def test_code_of_88_columns_fits(browser, pages, site, address):
    unfold = "() => document.querySelectorAll('details').forEach(d => { d.open = true; })"
    wide = r"""() => [...document.querySelectorAll('article pre')]
        .filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)
        .filter(t => Math.max(...t.split('\n').map(line => line.length)) <= 88)"""
    with screen(browser, java_script_enabled=False) as context:     # no script changes a width
        for path, url in addresses(pages, site, address).items():
            if not pages[path].select("article pre"):
                continue
            page, _ = open_page(context, url, wait_until="load")
            page.evaluate(unfold)
            assert page.evaluate(wide) == [], path.name
            page.close()
