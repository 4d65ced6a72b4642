"""Evidence labels as badges, and links to the glossary that explain themselves.

Both are plain Markdown, `*[measured here]*` and `[router](glossary.md#router)`, and read well where
this extension is not at work. On a page both are links with the explanation as their title; with
scripts, k3_hover.js shows it in a box of its own.
"""

import difflib
import posixpath
import re

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

# A label -> its name in ids and classes, and its words: those in braces are for those who listen.
LABELS = {
    "derived here": ("derived", "derived{ here}"),
    "measured here": ("measured", "measured{ here}"),
    "read from the released code": ("code", "{read }from the{ released} code"),
    "reported by the authors": ("authors", "{reported }by the authors"),
    "reported by others": ("others", "{reported }by others"),
    "open": ("open", "open"),
}
WORD_JOINER = "\u2060"
HALVES = ("derived", "measured", "reported", "open")  # emphasised alone, these look like labels

logger = logging.getLogger(__name__)


# ---- labels --------------------------------------------------------------------------------------


class FindLabels(SphinxTransform):
    """Mark each emphasis that is a label, and complain about one that almost is."""

    default_priority = 500

    def apply(self, **kwargs):
        for node in self.document.findall(nodes.emphasis):
            text = " ".join(node.astext().split())
            label = label_of(text)
            if label:
                self._mark(node, label)
            elif is_nearly_a_label(text):
                problem = "%r is no evidence label; they are %s"
                known = ", ".join(f"*[{name}]*" for name in LABELS)
                logger.warning(problem, text, known, location=node, type="k3", subtype="label")

    def _mark(self, node, label):
        name, _ = LABELS[label]
        node["k3_label"] = label
        node["classes"] += ["k3-label", f"k3-{name}"]
        row = legend_row(node)
        if row is not None and self.env.docname == self.config.root_doc:
            row["ids"].append(f"label-{name}")


def label_of(text):
    """The label that `text` is, or None. "open", a word of every day, is one in brackets only."""
    bracketed = text.startswith("[") and text.endswith("]")
    name = text[1:-1] if bracketed else text
    return name if name in LABELS and (bracketed or name != "open") else None


def is_nearly_a_label(text):
    """Whether an emphasis looks like a label and is none: in brackets, or almost its words."""
    if "[" in text or "]" in text:
        return True
    words = " ".join(re.findall("[a-z]+", text.lower()))
    known = [name for name in LABELS if " " in name]
    return words in HALVES or bool(difflib.get_close_matches(words, known, cutoff=0.7))


def legend_row(node):
    """The row of the table that explains the labels, if `node` is alone in its first cell."""
    entry = node.parent.parent
    alone = isinstance(entry, nodes.entry) and entry.astext() == node.astext()
    return entry.parent if alone and entry.parent[0] is entry else None


class Badges(SphinxPostTransform):
    """A label becomes a link to its explanation in the preface; there it is a badge only."""

    default_priority = 200
    formats = ("html",)

    def run(self, **kwargs):
        labels = [node for node in self.document.findall(nodes.emphasis) if "k3_label" in node]
        legend = self._legend() if labels else {}
        for node in labels:
            follows = node.next_node(descend=False, siblings=True)
            if isinstance(follows, nodes.Text) and follows[:1] in tuple(".,;:)"):
                joined = nodes.Text(WORD_JOINER + follows)  # no line begins with a full stop
                follows.parent.replace(follows, joined)
            node.replace_self(self._badge(node, legend))

    def _badge(self, node, legend):
        label, here, root = node["k3_label"], self.env.docname, self.config.root_doc
        name, words = LABELS[label]
        if here == root and legend_row(node) is not None:
            return nodes.inline("", label, classes=node["classes"])
        if name not in legend:
            problem = "the preface does not explain *[%s]*"
            logger.warning(problem, label, location=node, type="k3", subtype="label")
        badge = nodes.reference("", "", *_spoken(words), classes=node["classes"], internal=True)
        badge["refuri"] = f"{self.app.builder.get_relative_uri(here, root)}#label-{name}"
        badge["reftitle"] = legend.get(name, "")
        return badge

    def _legend(self):
        """The name of each label -> its explanation in the preface."""
        preface = self.env.get_doctree(self.config.root_doc)
        found = {}
        for node in preface.findall(nodes.emphasis):
            if "k3_label" in node and (row := legend_row(node)) is not None:
                found[LABELS[node["k3_label"]][0]] = " ".join(row[1].astext().split())
        return found


def _spoken(words):
    """Text nodes; what is in braces is there for those who listen, search or copy."""
    for part in re.findall(r"\{[^}]*\}|[^{}]+", words):
        if part.startswith("{"):
            yield nodes.inline("", part[1:-1], classes=["k3-unseen"])
        else:
            yield nodes.Text(part)


# ---- terms ---------------------------------------------------------------------------------------


class ExplainTerms(SphinxPostTransform):
    """A link to a heading of the glossary gets that entry's first paragraph as its title."""

    default_priority = 210
    formats = ("html",)

    def run(self, **kwargs):
        glossary = glossary_of(self.config)
        if glossary not in self.env.found_docs:
            return
        start = f"{self.app.builder.get_relative_uri(self.env.docname, glossary)}#"
        terms = definitions(self.env.get_doctree(glossary))
        for link in self.document.findall(nodes.reference):
            address = link.get("refuri") or f"#{link.get('refid', '')}"
            said = terms.get(address.removeprefix(start)) if address.startswith(start) else None
            if said:
                link["reftitle"] = said
                link["classes"].append("k3-term")


def glossary_of(config):
    return posixpath.join(posixpath.dirname(config.root_doc), "glossary")


def definitions(glossary):
    """The id of each section of the glossary -> its first paragraph, as plain text."""
    found = {}
    for section in glossary.findall(nodes.section):
        if len(section) > 1 and isinstance(section[1], nodes.paragraph):
            said = " ".join(section[1].astext().split())
            found |= dict.fromkeys(section["ids"], said)
    return found


def read_again(app, env, added, changed, removed):
    """Every page repeats the explanations, so one change there changes all of them."""
    sources = {app.config.root_doc, glossary_of(app.config)}
    return env.found_docs if sources & set(changed) else []
