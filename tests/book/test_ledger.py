"""The ledger: claims found in a small book that is made up, and rules that the real one keeps."""

import json
import re
import sys
from pathlib import Path

import pytest

from k3_teach.notebook import ledger, works
from k3_teach.notebook.ledger import LABELS, claims, digits, lines, plain, quotes, sections, slug
from k3_teach.numbers import Figure

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "book"
sys.path.insert(0, str(BOOK / "_ext"))

import k3_words  # noqa: E402

# ---- a small book --------------------------------------------------------------------------------

INTRO = "# A trial\n\nDeep networks train {cite}`one_2020` *[reported by the authors]*."
HAND = """## By hand

Three of four are 0.75 *[derived here]*.
The [router](glossary.md#router) gets 816 tokens, `top_k` being *2* *[measured here]*;
- **Bold**, by {eq}`eq-one`, and {numref}`fig-own` *[open]*
It is written `*[open]*`.

Once more, with $a$ small,

$$
a = b
$$ (eq-one)

is 1,024 long *[measured here]*, and two works say so {cite}`one_2020,two` *[reported by others]*.
| row | in {cite}`two` *[open]* |

```python
# no heading, *[measured here]*
```

```{figure} own.svg
:alt: *[measured here]*
:name: fig-own

A caption *[derived here]*.
```

### In *the* release

It is so, by `config.json` *[read from the released code]*.
"""
NONE = """## Nothing

No cell and no work *[measured here]*.
Nobody says who *[reported by others]*."""
WORKS = """@misc{one_2020,
  title  = {{One}},
  author = {Ada, A. and Bob, B. and Cy, C.},
  year   = {2020},
  keywords = {design}
}

@misc{two,
  author = {{A Team, of two}},
  year   = {2021}
}
"""


def code(source, printed="", **metadata):
    outputs = [{"output_type": "stream", "text": [printed]}] if printed else []
    return {"cell_type": "code", "source": source, "outputs": outputs, "metadata": metadata}


def text(source):
    return {"cell_type": "markdown", "source": [source], "metadata": {}}


@pytest.fixture
def small(tmp_path):
    """A book of one chapter, with a package and tests beside it."""
    figure = {"mystnb": {"figure": {"name": "fig-cell", "caption": "It falls *[measured here]*."}}}
    cells = [text(INTRO), code("try:\n    import k3_teach\nexcept ImportError:\n    pass\n"
                               "from k3_teach.scale import cost\nimport k3_teach as k3\n"),
             text(HAND), code("cost.x()\nassert 3 / 4 == 0.75\n  assert 1", "816 of 1024"),
             code("grade = k3.route", tags=["check"]), code("k3.route()", **figure), text(NONE)]
    for name, content in {"book/07_trial.ipynb": json.dumps({"cells": cells}),
                          "book/references.bib": WORKS, "book/page.md": "{cite}`two`",
                          "k3_teach/scale/cost.py": "", "k3_teach/parts/moe.py": "",
                          "k3_teach/config.py": "", "k3_teach/lonely.py": "",
                          "tests/scale/test_cost.py": "", "tests/parts/test_moe.py": "",
                          "tests/test_config.py": "import k3_teach.lonely"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return tmp_path / "book"


def found(folder, words, label):
    claim, = [c for c in claims(folder) if words in c.sentence and c.label == label]
    return claim


def test_a_derivation_and_a_measurement_have_a_cell_of_their_section(small):
    derived = found(small, "Three of four", "derived here")
    assert derived.sentence == "Three of four are 0.75."
    assert derived.checks == ("07_trial.ipynb::Cell 1",) and derived.asserts == 2
    measured = found(small, "router", "measured here")
    assert measured.sentence == "The router gets 816 tokens, `top_k` being 2;"
    assert measured.checks == ("07_trial.ipynb::Cell 1",)   # it printed 816
    assert (measured.heading, measured.anchor) == ("By hand", "by-hand")


def test_a_cell_that_only_checks_an_exercise_shows_nothing(small):
    assert found(small, "It falls", "measured here").checks == ("07_trial.ipynb::Cell 3",)
    assert all("Cell 2" not in check and "Cell 0" not in check
               for claim in claims(small) for check in claim.checks)


def test_a_cell_with_the_numbers_is_chosen_before_the_nearest():
    cells = [ledger.Cell(i, source, printed, True) for i, (source, printed) in enumerate(
        [("by_hand()", "81.6 of 1024"), ("", "816"), ("", ""), ("", "")])]
    chosen = lambda sentence, label: [cell.number for cell in ledger.by_nearness(
        [*cells[:3], sentence, cells[3]], 3, label)]
    assert chosen("It has 816 rows.", "measured here") == [1, 2, 0, 3]
    assert chosen("It has 816 rows.", "derived here") == [1, 3, 2, 0]
    assert chosen("It is what `by_hand` makes.", "measured here") == [0, 2, 1, 3]


def test_what_was_read_has_its_file_and_the_test_of_that(small):
    claim = found(small, "It is so", "read from the released code")
    assert claim.anchor == "in--release"
    assert claim.checks == ("config.json", "tests/test_config.py")  # not that of cost, unshown
    assert claim.cites == (ledger.RELEASE,)


def read(sentence, *sources):
    """What checks a sentence that was read, in a section with cells."""
    origin = ledger.origins("from k3_teach.scale import cost as money\nimport k3_teach as k3\n"
                            "from k3_teach.parts import moe, mla\nfrom k3_teach import cache\n"
                            "k3.route")
    tests = {f"k3_teach.{name}": (f"tests/{name.replace('.', '/test_')}.py",)
             for name in ("scale.cost", "parts.moe", "parts.mla", "parts.norm", "cache")}
    line = f"{sentence} *[read from the released code]*"
    badge, = ledger.BADGE.finditer(line)
    parts = [*(ledger.Cell(i, source, "", True) for i, source in enumerate(sources)), line]
    near = [(parts, len(sources))]
    return ledger.check("07_trial", line, badge, near, origin, tests)[1]


def test_tests_of_the_source_that_a_section_shows():
    shown = "show_source(k3.route,\n    money.x)"
    assert read("So it is.", shown, "mla.y()") == read("So it is.", "mla.y()", shown)
    moe, golden = "tests/parts/test_moe.py", ledger.GOLDEN
    assert read("So it is.", shown, "mla.y()") == (golden, moe, "tests/scale/test_cost.py")
    file = "modeling_kimi_linear.py"
    assert read(f"So says `{file}`.", "mla.y()") == (file, golden)
    assert read(f"So says `{file}`.", "show_source(k3.route)", "mla.y()") == (file, golden, moe)
    assert read("It is in the index.") == ("index", "tests/scale/test_cost.py")
    assert read("An image is so.") == ()


def test_without_a_file_or_source_a_cell_tells_unless_it_uses_much():
    assert read("So it is.", "mla.y()") == (ledger.GOLDEN, "tests/parts/test_mla.py")
    assert read("So it is.", "mla.y(moe.z(), cache, money)") == (ledger.GOLDEN,)
    assert read("So it is.") == (ledger.GOLDEN,)


def test_a_report_may_borrow_its_work(small):
    borrowed = [claim.sentence for claim in claims(small) if claim.borrows]
    assert borrowed == ["Nobody says who."]


def test_what_is_reported_has_its_works(small):
    assert found(small, "Deep", "reported by the authors").cites == ("one_2020",)
    both = found(small, "Once more", "reported by others")
    assert both.cites == ("one_2020", "two") and both.checks == ()
    assert found(small, "Nobody", "reported by others").cites == ()


def test_what_is_open_has_nothing(small):
    assert found(small, "Bold", "open").checks == found(small, "Bold", "open").cites == ()
    assert found(small, "Bold", "open").sentence == "Bold, by (7.1), and Figure 7.1"
    assert found(small, "row", "open").sentence == "row: in A Team, of two, 2021"


def test_a_formula_within_a_sentence_becomes_its_number(small):
    claim = found(small, "Once more", "measured here")
    wanted = "Once more, with $a$ small, (7.1) is 1,024 long, and two works say so."
    assert claim.sentence == wanted
    apart = "It is:\n\n$$\na\n$$ (eq-a)\n\nA new one.\n\n$$\nb\n$$\n\nwhere b."
    assert "A new one. … where b." in lines(apart)


def test_captions_are_read_and_code_is_not(small):
    assert found(small, "A caption", "derived here")
    assert len(claims(small)) == 12     # of 15 in brackets: two in code, one in alt text


def test_a_claim_without_a_check_is_seen(small):
    assert found(small, "No cell", "measured here").checks == ()


def test_every_page_that_cites(small):
    assert works.cited(small) == {"one_2020": {"07_trial"}, "two": {"07_trial", "page"}}
    one, two = works.works(small).values()
    assert works.name_of(one) == "Ada and others, 2020"
    assert works.name_of(two) == "A Team, of two, 2021"
    assert works.purpose(one) == works.PURPOSES["design"]
    assert works.purpose(two) == works.PURPOSES[""]


# ---- its functions -------------------------------------------------------------------------------


def test_anchors_are_made_as_on_the_pages():
    assert slug("At K3's size") == "at-k3s-size" and slug("Exercise 1: a, b") == "exercise-1-a-b"
    assert slug("Blocks", {"blocks"}) == "blocks-1"
    assert slug("Blocks", {"blocks", "blocks-1"}) == "blocks-1-2"


def test_numbers_that_tell_something():
    assert digits("1{,}024 of 2_048, or 3,072; 0.5, 7 and {eq}`eq-12`") == {
        "1024", "2048", "3072", "0.5"}


def test_quoted_figures_are_found_in_a_sentence():
    row = Figure("05_latent_moe", "weights", "9.72%", "9.72%")
    assert quotes("it is 9.72% of them", "05_latent_moe", [row]) == ("9.72% (weights)",)
    assert quotes("it is 19.72% of them", "05_latent_moe", [row]) == ()
    assert quotes("it is 9.72% of them", "06_balancing", [row]) == ()
    long = Figure("01_layer", "", "82,432", "82,432", page="82,432 experts")
    assert quotes("all $82{,}432$ of them", "06_balancing", [long]) == ("82,432 ()",)
    own = Figure("06_balancing", "biases", "82,432", "82,432")
    assert quotes("82,432 of them", "06_balancing", [long, own]) == ("82,432 (biases)",)
    assert quotes("1 and 2", "01_layer", [Figure("01_layer", "", "1 and 2", "1 and 2")]) == ()


def test_labels_stay_where_the_sentence_is_about_them():
    assert plain("All sizes are *[measured here]*.", {}, {}) == "All sizes are measured here."
    assert plain("It is 3 *[measured here]*.", {}, {}) == "It is 3."
    assert plain("A quoted `*[open]*` is *[open]*.", {}, {}) == "A quoted `*[open]*` is open."
    assert plain("Seen by {cite}`x` (table 4) *[open]*", {}, {}) == "Seen by x (table 4)"
    assert lines("a\n\n:name: x\n```{figure} y\nb\n```") == ["a", "b"]


def test_a_clause_has_its_own_works():
    line = ("A {cite}`one` *[reported by others]*; "
            "the code *[read from the released code]* {cite}`b`")
    ours, code = ledger.BADGE.finditer(line)
    assert works.keys(ledger.stretch_of(line, ours)) == ("one",)
    assert works.keys(ledger.stretch_of(line, code)) == ("b",)


# ---- the real book -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def book():
    return claims(BOOK)


def test_every_chapter_has_claims_with_labels_that_exist(book):
    names = {claim.chapter for claim in book}
    assert names == set(ledger.chapters(BOOK)) and len(book) > 500
    assert set(LABELS) == set(k3_words.LABELS) == {claim.label for claim in book}
    labelled = re.compile(r"(?<!\*)\*\[([a-z ]+)\]\*(?!\*)")
    for name in names:
        marked = labelled.findall(re.sub(r"`[^`\n]*`", "", works.markdown(BOOK / f"{name}.ipynb")))
        assert sorted(marked) == sorted(c.label for c in book if c.chapter == name), name


def test_every_cell_and_file_that_is_named_exists(book):
    code = {name: sum(c["cell_type"] == "code" for c in notebook["cells"])
            for name, notebook in ledger.chapters(BOOK).items()}
    for claim in book:
        for check in claim.checks:
            file, _, cell = check.partition("::Cell ")
            if cell:
                assert file == f"{claim.chapter}.ipynb" and int(cell) < code[claim.chapter]
            elif check.startswith("tests/"):
                assert (ROOT / check).exists(), check


def test_every_claim_has_its_check(book):
    bare = [c for c in book if c.label.startswith("measured") and not c.checks
            or c.label.startswith("reported") and not c.cites
            or c.label.startswith("read") and ledger.RELEASE not in c.cites]
    assert not bare, [(c.chapter, c.label, c.sentence) for c in bare]


def test_sentences_are_plain_words(book):
    for claim in book:
        words = re.sub(r"\$[^$]*\$|`[^`]*`", "x", claim.sentence)
        assert not re.search(r"\]\(|\{\w+\}|\*|\$|`|  ", words), claim.sentence
        assert words.strip() and claim.heading, claim


def test_every_work_is_cited_and_every_citation_leads_to_a_work():
    entries, where = works.works(BOOK), works.cited(BOOK)
    assert len(entries) > 50 and all("author" in e and "title" in e for e in entries.values())
    assert set(where) <= set(entries), set(where) - set(entries)
    assert set(entries) <= set(where), set(entries) - set(where)
    assert {entry.get("keywords", "") for entry in entries.values()} <= set(works.PURPOSES)


def test_the_bibliography_has_every_work_once(pages, site):
    page = pages[site / "book/bibliography.html"]
    assert len(page.select(".citation")) == len(works.works(BOOK))
    heads = [" ".join(h.get_text().split()).rstrip("#") for h in page.select("article h2")]
    assert heads == list(works.PURPOSES.values())


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_has_every_claim(pages, site, book):
    path = site / "book/ledger.html"
    badges = pages[path].select(".k3-ledger .k3-kind")
    assert len(badges) == len(book) and path.stat().st_size < 600_000
    folds = pages[path].select(".k3-ledger details")
    assert len(folds) == len({claim.chapter for claim in book})
    assert not any(fold.has_attr("open") for fold in folds)


def test_the_chapters_show_a_badge_for_every_claim(pages, site, book):
    for name in ledger.chapters(BOOK):
        badges = pages[site / f"book/{name}.html"].select("article .k3-label")
        assert len(badges) == sum(claim.chapter == name for claim in book), name


@pytest.mark.browser
def test_choosing_a_label_shows_its_rows_alone(browser, address, book):
    from .browser import open_page, screen

    seen = "() => [...document.querySelectorAll('tr.k3-claims')].filter(e => e.checkVisibility())"
    seen += ".length"
    with screen(browser, 375) as context:
        page, wrong = open_page(context, f"{address}/book/ledger.html")
        assert page.evaluate(seen) == 0
        page.check("input[value=open]")
        wanted = {(c.anchor, c.sentence, c.chapter) for c in book if c.label == "open"}
        assert page.evaluate(seen) == len(wanted) and not wrong
        page.check("input[value=all]")
        assert page.evaluate(seen) == 0
