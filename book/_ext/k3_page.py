"""What the pages of the book add to plain Markdown.

Evidence labels and terms that explain themselves (k3_words), pictures in the page's colours
(k3_svg), links between chapters in outputs (k3_links); and here chapter numbers and folds.
"""

import re

from docutils import nodes
from k3_links import LinkPages
from k3_svg import InlineSvg
from k3_words import Badges, ExplainTerms, FindLabels, read_again
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_external_toc.collectors import TocTreeCollectorWithStyles

CHAPTER = re.compile(r"(?:.*/)?(\d+)_[^/]*")


# ---- chapter numbers -----------------------------------------------------------------------------


def number_chapters(collector, env):
    """Give each page `NN_name` the number NN, its headings none; return the pages that changed.

    Sphinx counts its pages from 1, in each part of the book or throughout. Here the name of the
    file says the number, so that chapters may still be missing and the map can be number 0.
    """
    before, env.toc_secnumbers = env.toc_secnumbers, {}
    for docname, toc in env.tocs.items():
        chapter = CHAPTER.fullmatch(docname)
        number = [int(chapter[1])] if chapter else None
        numbers = env.toc_secnumbers[docname] = {}
        for link in toc.findall(nodes.reference):
            anchor = link["anchorname"]
            link["secnumber"] = None if anchor else number
            numbers[anchor] = () if anchor or not number else tuple(number)
        env.titles[docname]["secnumber"] = number
    return [name for name, numbers in env.toc_secnumbers.items() if numbers != before.get(name)]


# ---- folds ---------------------------------------------------------------------------------------


class NameFolds(SphinxPostTransform):
    """The fold of a cell with the tag `solution` says "Solution", not "Show code cell content"."""

    default_priority = 190  # before myst-nb makes the folds
    formats = ("html",)

    def run(self, **kwargs):
        for cell in self.document.findall(nodes.container):
            if "tag_solution" in cell["classes"] and "hide_mode" in cell:
                cell["prompt_show"] = cell["prompt_hide"] = "Solution"


def open_fold(writer, node):
    """As in myst-nb, but without the name that hides these words from a reader who listens."""
    classes = " ".join(["admonition", "hide", *node["classes"]])
    writer.body.append(f'<details class="{classes}">\n<summary>\n')
    for state, verb in (("collapsed", "show"), ("expanded", "hide")):
        words = writer.encode(node[f"prompt_{verb}"])
        writer.body.append(f'<p class="{state} admonition-title">{words}</p>\n')
    writer.body.append("</summary>\n")


def close_fold(writer, node):
    writer.body.append("</details>\n")


def setup(app):
    TocTreeCollectorWithStyles.assign_section_numbers = number_chapters  # it numbers by counting
    app.setup_extension("myst_nb")
    app.add_node(HideCodeCellNode, override=True, html=(open_fold, close_fold))
    app.add_transform(FindLabels)
    for transform in (Badges, ExplainTerms, InlineSvg, LinkPages, NameFolds):
        app.add_post_transform(transform)
    app.connect("env-get-outdated", read_again)
    app.add_js_file("k3_hover.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
