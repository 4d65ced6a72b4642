"""The extension of the pages, tried on a small book: what chapters may hold, and what fails."""

import subprocess
import sys

import nbformat
import pytest
from bs4 import BeautifulSoup

from k3_teach.notebook.form import KERNEL

from .browser import ROOT

EXTENSION = ROOT / "book/_ext"
sys.path.insert(0, str(EXTENSION))

from k3_links import is_to_come  # noqa: E402
from k3_svg import inline  # noqa: E402
from k3_words import LABELS, is_nearly_a_label, label_of  # noqa: E402

# ---- its functions -------------------------------------------------------------------------------


def test_what_is_a_label():
    assert all(label_of(f"[{name}]") == name for name in LABELS)
    assert label_of("measured here") == "measured here"
    assert label_of("open") is None and label_of("[measured]") is None


@pytest.mark.parametrize("text", [
    "Measured here", "[measured]", "measured", "measured here.", "derived", "open", "reported",
    "reported by author", "reported by the author", "read from released code", "[no label]",
])  # fmt: skip
def test_what_is_nearly_a_label(text):
    assert is_nearly_a_label(text) and label_of(text) is None


@pytest.mark.parametrize("text", ["router", "read", "mixture of experts", "opened", "here", "next"])
def test_what_is_no_label_at_all(text):
    assert not is_nearly_a_label(text) and label_of(text) is None


def test_a_chapter_to_come_has_a_free_number():
    assert is_to_come("book/06_balancing", {"book/02_moe"})
    assert not is_to_come("book/02_mo", {"book/02_moe"})
    assert not is_to_come("book/other", {"book/02_moe"})


DRAWING = """<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 80"
  xmlns:xlink="http://www.w3.org/1999/xlink" aria-labelledby="t"><title id="t">Two boxes</title>
  <metadata><x xmlns="http://other"/></metadata>
  <defs><clipPath id="c"><path d="M0 0"/></clipPath></defs>
  <style>/* words */ text, .a { fill: #fff } svg .b { stroke: #757c86; clip-path: url(#c) }</style>
  <rect fill="#2378fd" clip-path="url(#c)"/><use xlink:href="#c"/><text class="a">x</text></svg>"""


def test_a_picture_is_put_into_the_page():
    svg = inline(DRAWING, "n7", "two")
    root = BeautifulSoup(svg, "html.parser").svg
    assert root["id"] == "n7" and root["aria-label"] == "two" and "300px" in root["style"]
    for left_out in ("xmlns", "metadata", "Two boxes", "xlink"):
        assert left_out not in svg
    for kept in ('clip-path="url(#n7-c)"', 'id="n7-c"', 'href="#n7-c"'):
        assert kept in svg
    assert 'fill="var(--k3-blue,#2378fd)"' in svg
    rules = ["#n7 text,#n7 .a{fill: var(--k3-on,#fff)}",
             "#n7 .b{stroke: var(--k3-ink,#757c86); clip-path: url(#n7-c)}"]  # fmt: skip
    assert root.style.get_text() == "".join(rules)


def test_a_picture_without_alt_text_has_its_own_title_and_may_be_narrower():
    svg = inline(DRAWING, "n", "", "90px")
    assert 'aria-label="Two boxes"' in svg and "90px" in svg


def test_words_on_a_colour_that_stays_stay_as_well():
    svg = inline(DRAWING.replace("</style>", "rect { fill: #123456 }</style>"), "n", "")
    assert "fill: #fff" in svg and 'fill="#2378fd"' in svg and "var(--k3-ink,#757c86)" in svg


# ---- a small book --------------------------------------------------------------------------------

CONF = f"""
import sys
sys.path.insert(0, {str(EXTENSION)!r})
extensions = ["myst_nb", "sphinx_external_toc", "k3_page"]
root_doc, html_theme, nb_execution_mode = "index", "basic", "off"
numfig, numfig_format, myst_heading_anchors = True, {{"figure": "Figure %s"}}, 3
myst_enable_extensions = ["dollarmath"]
nb_mime_priority_overrides = [["html", "text/html", 0]]
"""
FIGURE = {"image": {"alt": "a line"}, "figure": {"name": "fig-cell", "caption": "A line."}}
MARKS = (r'{"marks":[["link","04_other.ipynb","w",[["dot",1]]],["link","09_none.ipynb","w",[]]],'
         r'"says":"\u003cb"}')  # fmt: skip
OUTPUT = f"""<a href="04_other.ipynb#a-trial">four</a> <a class="x" href='09_none.ipynb'>nine</a>
<a href="glossary.md#router">r</a> <a href="https://x.org/a.ipynb">away</a>
<div class="k3-live"><script type="application/json">{MARKS}</script></div>"""
TRIAL = """# A trial

The [router](glossary.md#router), {numref}`fig-cell`, {numref}`fig-own`, {eq}`eq-one`.
*[measured here]*

$$ a = b $$ (eq-one)

```{figure} own.svg
:alt: two boxes
:name: fig-own

Ours.
```
"""
MAP = """# The map

```{figure} own.svg
:alt: two
:name: fig-map

Zero.
```

$$ c $$ (eq-zero)
"""
LEGEND = "# Preface\n\n| label | says |\n|---|---|\n"
LEGEND += "\n".join(f"| *[{name}]* | It is {name}. |" for name in LABELS)
GLOSSARY = "# Glossary\n\n## router\n\nThe *one*\nwho picks.\n"
markdown = nbformat.v4.new_markdown_cell


def cell(source, output=None, tags=(), **mystnb):
    outputs = [nbformat.v4.new_output("display_data", output)] if output else []
    metadata = {"tags": list(tags), "mystnb": mystnb}
    return nbformat.v4.new_code_cell(source, outputs=outputs, metadata=metadata)


def notebook(*cells):
    return nbformat.writes(nbformat.v4.new_notebook(cells=list(cells), metadata=KERNEL))


def build(folder, files):
    """The pages made of these files, and the warnings."""
    names = [name.split(".")[0] for name in files if name.endswith((".md", ".ipynb"))]
    toc = "format: jb-book\nroot: index\nchapters:\n"
    toc += "".join(f"- file: {name}\n" for name in names if name != "index")
    for name, text in {"conf.py": CONF, "_toc.yml": toc, **files}.items():
        (folder / name).write_text(text, encoding="utf-8")
    sphinx = [sys.executable, "-m", "sphinx", "-n", "-q", "-b", "html"]
    done = subprocess.run([*sphinx, folder, folder / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parsed = lambda page: BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    return {page.stem: parsed(page) for page in folder.glob("out/*.html")}, done.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    verdict = {"text/html": '<div class="k3-check">Right</div>'}
    files = {
        "index.md": LEGEND,
        "00_map.md": MAP,
        "03_trial.ipynb": notebook(
            markdown(TRIAL), cell("plot()", {"image/svg+xml": DRAWING}, **FIGURE),
            cell("show()", {"text/html": OUTPUT}, figure={"name": "fig-live", "caption": "It."}),
            cell("x = ...", tags=["exercise"]),
            cell("check(x)", verdict, ["check"]), cell("x = 3", None, ["solution", "hide-cell"])),
        "04_other.ipynb": notebook(markdown("# Other\n\n## A trial\n")),
        "glossary.md": f"{GLOSSARY}\n→ [Other](04_other.ipynb)\n",
        "own.svg": DRAWING,
    }  # fmt: skip
    return build(tmp_path_factory.mktemp("small"), files)


def texts(page, what):
    return [found.get_text().strip() for found in page.select(what)]


def test_a_small_book_builds_without_a_warning(small):
    assert small[1].strip() == ""


def test_figures_and_equations_are_numbered_by_file(small):
    pages, _ = small
    numbers = {name: texts(page, ".body h1 .section-number") for name, page in pages.items()}
    assert numbers["00_map"] == ["0."] and numbers["03_trial"] == ["3."]
    assert numbers["index"] == numbers["glossary"] == texts(pages["04_other"], "h2 span") == []
    assert texts(pages["00_map"], ".caption-number") == ["Figure 0.1"]
    assert texts(pages["00_map"], ".eqno")[0].startswith("(0.1)")
    trial = pages["03_trial"]
    assert texts(trial, ".caption-number") == ["Figure 3.1", "Figure 3.2", "Figure 3.3"]
    assert texts(trial, "a.reference .std-numref") == ["Figure 3.2", "Figure 3.1"]
    assert "(3.1)" in texts(trial, "a[href='#equation-eq-one']")
    links = texts(pages["00_map"], "a")
    assert "3. A trial" in {" ".join(words.split()) for words in links}


def test_the_svg_of_a_cell_is_in_the_page(small):
    drawn = small[0]["03_trial"].select("svg.k3-svg")
    assert [svg["aria-label"] for svg in drawn] == ["two boxes", "a line"]
    assert len({svg["id"] for svg in drawn}) == 2 and not small[0]["03_trial"].select("img")


def test_outputs_link_to_pages(small):
    page = small[0]["03_trial"]
    link = {words: page.find("a", string=words).attrs for words in ("four", "r", "nine", "away")}
    assert link["four"]["href"] == "04_other.html#a-trial"
    assert link["r"]["href"] == "glossary.html#router"
    assert "href" not in link["nine"] and link["nine"]["title"] == "chapter to come"
    assert link["away"]["href"] == "https://x.org/a.ipynb"
    data = page.find("script", type="application/json").string
    assert data == MARKS.replace("04_other.ipynb", "04_other.html").replace("09_none.ipynb", "")


def test_the_fold_of_a_solution_says_so(small):
    (fold,) = small[0]["03_trial"].select(".tag_exercise + .tag_check + .tag_solution summary")
    assert set(texts(fold, "p")) == {"Solution"} and "aria-label" not in fold.attrs


def test_terms_and_labels_explain_themselves(small):
    term, label = small[0]["03_trial"].select("a.k3-term, a.k3-label")
    assert term["title"] == "The one who picks." and term["href"] == "glossary.html#router"
    assert label["title"] == "It is measured here." and label.get_text() == "measured here"
    assert label["href"] == "index.html#label-measured"


def test_mistakes_are_warnings_which_fail_the_book(tmp_path):
    output = {"text/html": '<a href="04_othr.ipynb">x</a> <a href="nowhere.md">x</a>'}
    text = markdown("# A\n\n*[guessed]* and *Measured here* and *[open]*\n")
    files = {
        "index.md": LEGEND.replace("| *[open]* | It is open. |", ""),
        "03_trial.ipynb": notebook(text, cell("show()", output)),
        "04_other.md": "# B\n\n![x](bad.svg) [r](glossary.md#rooter)\n",
        "glossary.md": GLOSSARY,
        "bad.svg": DRAWING.replace("/* words */", "@import 'x';"),
    }
    warnings = build(tmp_path, files)[1]
    for wanted in (
        "'[guessed]' is no evidence label", "'Measured here' is no evidence label",
        "does not explain *[open]*", "output links to 04_othr.ipynb", "links to nowhere.md",
        "bad.svg: its style sheet has an @-rule", "rooter",
    ):  # fmt: skip
        assert wanted in warnings, f"{wanted}\n{warnings}"
