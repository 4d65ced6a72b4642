"""`make pdf`: the whole book on paper, with outline, page numbers and working links."""

import subprocess
import sys

import pytest
from pypdf import PdfReader

from .browser import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def book(browser, site, tmp_path_factory):
    path = tmp_path_factory.mktemp("pdf") / "book.pdf"
    command = [sys.executable, "-m", "tools.pdf", str(site), str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return PdfReader(path)


@pytest.fixture(scope="module")
def texts(book):
    """Of every page, what is on it, and the number at its foot."""
    lines = [page.extract_text().strip().splitlines() for page in book.pages]
    return ["\n".join(page[:-1]) for page in lines], [page[-1].split()[-1] for page in lines]


def flat(outline, level=0):
    for item in outline:
        if isinstance(item, list):
            yield from flat(item, level + 1)
        else:
            yield level, item


def plain(words):
    """Without spaces, which a PDF does not keep."""
    return "".join(words.split())


def heading(page):
    return plain(page.select_one("article h1").text).rstrip("#¶")


def test_every_page_of_the_book_is_in_it(book, texts, site, pages):
    marks = {plain(item.title): book.get_destination_page_number(item)
             for _, item in flat(book.outline)}  # fmt: skip
    for path, page in pages.items():
        if path.parent == site / "book":
            title = heading(page)
            assert title in marks, f"{path.name}: {title}"
            assert title in plain(texts[0][marks[title]]), path.name


def test_no_page_is_blank_and_all_are_numbered(book, texts):
    bare = [number for number, (text, page) in enumerate(zip(texts[0], book.pages), 1)
            if len(plain(text)) < 40 and not page.images]  # fmt: skip
    assert not [number for number in bare if number > 1]
    front = book.get_destination_page_number(book.outline[0])
    assert texts[1][front:] == [str(n) for n in range(front + 1, len(book.pages) + 1)]


def test_links_lead_into_the_pdf_or_to_published_pages(book):
    links = [link.get_object() for page in book.pages for link in page.get("/Annots") or []]
    inner = [link["/Dest"] for link in links if "/Dest" in link]
    outer = [link["/A"]["/URI"] for link in links if "/A" in link]
    numbers = [book.get_page_number(place[0].get_object()) for place in inner]
    assert len(set(numbers)) > 5 and all(number is not None for number in numbers)
    assert not [address for address in outer if "127.0.0.1" in address]


def test_outline_and_metadata(book):
    assert book.metadata.title and book.metadata.author
    levels = {level for level, _ in flat(book.outline)}
    assert levels == {0, 1, 2}


def test_what_is_folded_on_the_screen_is_open_on_paper(texts, site, pages):
    folded = [line.strip() for path, page in pages.items() if path.parent == site / "book"
              for code in page.select("article details pre") for line in code.text.splitlines()]
    told = plain("".join(texts[0]))
    missing = [line for line in folded if len(line) > 30 and plain(line) not in told]
    assert len(missing) <= 0.05 * len(folded), missing[:5]
