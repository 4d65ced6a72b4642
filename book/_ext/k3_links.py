"""Links between chapters inside the outputs of cells, which no Markdown parser has seen.

In JupyterLab an output links to a notebook, on a page to the page made from it. A chapter that the
book does not have yet has no page: such a link loses its address.
"""

import json
import posixpath
import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

LINK = re.compile(r"(<a\b[^>]*?)\shref=([\"'])([^\"']*)\2")
DATA = re.compile(r"(<script type=[\"']application/json[\"']>)(.*?)(</script>)", re.S)
ADDRESS = re.compile(r"([^:?#]+)\.(?:ipynb|md)(#.*)?")
CHAPTER = re.compile(r"(.*/)?(\d\d)_\w+")

logger = logging.getLogger(__name__)


class LinkPages(SphinxPostTransform):
    """`href="02_moe.ipynb"` becomes `href="02_moe.html"`, also in the data of live figures."""

    default_priority = 220
    formats = ("html",)

    def run(self, **kwargs):
        for raw in self.document.findall(nodes.raw):
            html = raw.astext()
            if "text_html" in raw["classes"] and re.search(r"\.(ipynb|md)\b", html):
                self.raw = raw
                html = LINK.sub(self._anchor, html)
                if "k3-live" in html:
                    html = DATA.sub(self._data, html)
                raw[:] = [nodes.Text(html)]

    def _anchor(self, link):
        start, quote, address = link.groups()
        page = self._page(address)
        return f"{start} href={quote}{page}{quote}" if page else f'{start} title="chapter to come"'

    def _data(self, script):
        marks = self._marks(json.loads(script[2]))
        compact = {"separators": (",", ":"), "sort_keys": True, "ensure_ascii": False}
        return script[1] + json.dumps(marks, **compact).replace("<", "\\u003c") + script[3]

    def _marks(self, node):
        """The same data, but each mark ["link", address, words, [marks]] leads to a page."""
        if isinstance(node, dict):
            return {key: self._marks(value) for key, value in node.items()}
        if not isinstance(node, list):
            return node
        if node[:1] == ["link"] and len(node) > 1 and isinstance(node[1], str):
            node = ["link", self._page(node[1]), *node[2:]]
        return [self._marks(value) for value in node]

    def _page(self, address):
        """Where `address` leads from this page; "" if it is a chapter to come."""
        found = ADDRESS.fullmatch(address)
        if not found:
            return address
        here = self.env.docname
        name = posixpath.normpath(posixpath.join(posixpath.dirname(here), found[1]))
        if name in self.env.found_docs:
            return self.app.builder.get_relative_uri(here, name) + (found[2] or "")
        if not is_to_come(name, self.env.found_docs):
            problem = "an output links to %s, and the book has no such page"
            logger.warning(problem, address, location=self.raw, type="k3", subtype="link")
        return ""


def is_to_come(name, pages):
    """Whether `name` is a chapter whose number no page has yet; any other is a mistake."""
    chapter = CHAPTER.fullmatch(name)
    numbers = [CHAPTER.fullmatch(page) for page in pages]
    return bool(chapter) and chapter[2] not in {n[2] for n in numbers if n}
