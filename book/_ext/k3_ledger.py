"""The ledger of all claims: a page asks for it with the directive `ledger`, each build makes it.

For every chapter a fold with a table: the sentence, its labels, and where it is checked. Radio
buttons above show the rows of one label only; that is style alone (k3.css), and a few lines of
k3_hover.js unfold the chapters then.
"""

import re
from html import escape
from itertools import groupby
from pathlib import Path

from docutils import nodes
from k3_words import LABELS, WORD_JOINER, _spoken
from sphinx.util.docutils import SphinxDirective

from k3_teach.notebook import ledger
from k3_teach.notebook.model_map import CHAPTERS
from k3_teach.numbers import figures

HEAD = ("claim", "label", "checked by")


class Ledger(SphinxDirective):
    def run(self):
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for path in [*folder.glob("*.ipynb"), folder / "references.bib"]:
            self.env.note_dependency(str(path))
        pages = {Path(name).name for name in self.env.found_docs}
        found = [c for c in ledger.claims(folder, figures()) if c.chapter in pages]
        whole = nodes.container(classes=["k3-ledger"])
        whole += nodes.raw("", buttons(), format="html")
        for chapter, claims in groupby(found, key=lambda claim: claim.chapter):
            claims = list(claims)
            whole += nodes.raw("", opening(chapter, claims), format="html")
            whole += self._table(chapter, claims)
            whole += nodes.raw("", "</details>", format="html")
        return [whole]

    def _table(self, chapter, claims):
        """One row for a sentence, even if it has several labels."""
        same = lambda claim: (claim.anchor, claim.sentence)
        rows = [self._row(chapter, list(group)) for _, group in groupby(claims, key=same)]
        group = nodes.tgroup("", *(nodes.colspec(colwidth=w) for w in (60, 15, 25)), cols=3)
        head = nodes.row("", *(entry(nodes.Text(words)) for words in HEAD))
        group += [nodes.thead("", head), nodes.tbody("", *rows)]
        return nodes.table("", group)

    def _row(self, chapter, claims):
        names = [LABELS[claim.label][0] for claim in claims]
        badges = [nodes.inline("", "", *_spoken(LABELS[claim.label][1]),
                               classes=["k3-kind", f"k3-{name}"])
                  for claim, name in zip(claims, names)]
        first = claims[0]
        link = f"[{first.heading}]({chapter}.ipynb#{first.anchor})"
        shown = [self._markdown(link), *map(self._check, claims)]
        if first.figures:
            shown.append([nodes.Text("recomputed: " + ", ".join(first.figures))])
        parts = list(parted([part for part in shown if part], nodes.Text(" · ")))
        return nodes.row("", entry(*words(first.sentence)), entry(*parted([[b] for b in badges],
                         nodes.Text(" "))), entry(*parts),
                         classes=["k3-claims", *(f"k3-has-{name}" for name in names)])

    def _check(self, claim):
        """What checks a claim, as nodes: cell, files and tests, works."""
        cells = [re.sub(r".*::", "", check) for check in claim.checks if "::" in check]
        asserts = f", {claim.asserts} asserts" if claim.asserts > 1 else ", 1 assert"
        found = [[nodes.Text(cell + asserts * bool(claim.asserts))] for cell in cells]
        others = [check for check in claim.checks if "::" not in check]
        if claim.label.startswith(("reported", "read")) and claim.cites:
            found.append(self._markdown(f"{{cite}}`{','.join(claim.cites)}`"))
        found += [[nodes.literal("", check)] for check in others if check[:6] != "tests/"]
        if claim.label.startswith("read") and len(found) == 1:
            found.append([nodes.Text("no file named")])
        tests = [[nodes.literal("", check)] for check in others if check[:6] == "tests/"]
        shown = list(parted(found, nodes.Text(", ")))
        ours = [nodes.Text(" · ours: "), *parted(tests, nodes.Text(", "))] if tests else []
        return shown + ours

    def _markdown(self, text):
        return self.parse_inline(text)[0]


def entry(*content):
    return nodes.entry("", nodes.paragraph("", "", *content))


def parted(lists, between):
    """The nodes of all lists, with `between` between them."""
    for number, found in enumerate(lists):
        if number:
            yield between.deepcopy()
        yield from found


def words(sentence):
    """A sentence as nodes: text, formulas and code; no line begins with a full stop."""
    for part in filter(None, ledger.KEPT.split(sentence)):
        kind = {"$": nodes.math, "`": nodes.literal}.get(part[0] if len(part) > 2 else "")
        joined = WORD_JOINER if part[0] in ".,;:)" else ""
        yield kind("", part[1:-1]) if kind else nodes.Text(joined + part)


def opening(chapter, claims):
    """The fold of a chapter, closed: its title, and how many claims of each label."""
    counts = [(sum(claim.label == label for claim in claims), label) for label in LABELS]
    said = ", ".join(f"{number} {label}" for number, label in counts if number)
    title = f"{int(chapter[:2])}. {CHAPTERS[chapter][0]}"
    has = " ".join(f"k3-has-{LABELS[label][0]}" for number, label in counts if number)
    return (f'<details class="k3-claims {has}"><summary><b>{escape(title)}</b> '
            f"<span>{escape(said)}</span></summary>")


def buttons():
    """Which rows are shown: all, or those of one label."""
    choices = [("all", "all"), *((name, label) for label, (name, _) in LABELS.items())]
    made = [f'<label><input type="radio" name="k3-show" value="{name}"'
            f'{" checked" * (name == "all")}> {label}</label>' for name, label in choices]
    return f'<fieldset class="k3-show"><legend>Show</legend>{"".join(made)}</fieldset>'


def setup(app):
    app.add_directive("ledger", Ledger)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
