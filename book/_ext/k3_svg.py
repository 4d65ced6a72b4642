"""Puts drawings and vector figures into the page itself, so that they follow its colours.

An image in SVG, a file of `_assets` or the output of a cell, becomes an `<svg>` element. The book's
colours in it become variables (`--k3-blue`, ...), whose values k3.css holds for light and for dark
pages. Elsewhere, in JupyterLab or on GitHub, the same file is shown as it is.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
SHADES = {
    "blue": "#2378fd #1b66d6",
    "rust": "#a54b01",
    "green": "#2b8060",
    "pink": "#d8489f #b83280",
    "ochre": "#b38b10 #856800",
    "purple": "#8a3f86",
    "ink": "#757c86 #5f6670",
    "strong": "#000 #000000 #1a1d21 black",
    "on": "#fff #ffffff white",
}
TOKENS = {shade: token for token, shades in SHADES.items() for shade in shades.split()}
PAINT = re.compile(r"(fill|stroke|stop-color)(\s*[:=]\s*\"?)(#[0-9a-fA-F]{3,8}\b|white\b|black\b)")
REFERENCE = re.compile(r"url\(\s*['\"]?#([^)'\"]+)['\"]?\s*\)")
RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
PIXELS = {"": 1, "px": 1, "pt": 4 / 3, "in": 96, "cm": 96 / 2.54, "mm": 96 / 25.4}
LENGTH = re.compile(rf"\s*([\d.]+)\s*({'|'.join(PIXELS)})\s*")

logger = logging.getLogger(__name__)


class InlineSvg(SphinxPostTransform):
    """In pages, an SVG is part of the page; a linked image stays an image."""

    default_priority = 200
    formats = ("html",)

    def run(self, **kwargs):
        images = [image for image in self.document.findall(nodes.image) if self._is_svg(image)]
        for number, image in enumerate(images, start=1):
            text = Path(self.app.srcdir, image["uri"]).read_text(encoding="utf-8")
            try:
                page = inline(text, f"k3-svg-{number}", image.get("alt", ""), image.get("width"))
            except ValueError as error:
                says = "%s: %s", image["uri"], error
                logger.warning(*says, location=image, type="k3", subtype="svg")
                continue
            image.replace_self(nodes.raw("", page, format="html"))

    @staticmethod
    def _is_svg(image):
        linked = isinstance(image.parent, nodes.reference)
        return image["uri"].endswith(".svg") and "://" not in image["uri"] and not linked


def inline(text, name, alt, width=None):
    """The SVG `text` as an element of a page, called `name`; no other element needs to know it."""
    root = ElementTree.fromstring(text)
    if root.tag != f"{SVG}svg":
        raise ValueError("is not an SVG")
    alt = alt.strip() or _own_words(root)
    widest = _width(root, width)
    _plain(root)
    _rename(root, name)
    for style in root.iter("style"):
        style.text = _scoped(style.text or "", name)
        style.attrib.clear()
    for left_out in ("width", "height", "version", "aria-labelledby", "aria-describedby"):
        root.attrib.pop(left_out, None)
    root.attrib |= {"id": name, "class": "k3-svg", "role": "img", "aria-label": alt}
    root.set("style", f"max-width:{widest:g}px")
    return _coloured(ElementTree.tostring(root, encoding="unicode"))


def _own_words(root):
    found = root.find(f"{SVG}desc"), root.find(f"{SVG}title")
    return next((e.text.strip() for e in found if e is not None and e.text), "")


def _width(root, asked):
    """How wide the picture may become, in pixels: what the text asks for, or its own width."""
    for length in (asked, root.get("width")):
        found = LENGTH.fullmatch(length or "")
        if found:
            return round(float(found[1]) * PIXELS[found[2]], 1)
    box = (root.get("viewBox") or "").replace(",", " ").split()
    if len(box) != 4:
        raise ValueError("has neither a width nor a viewBox")
    return float(box[2])


def _plain(root):
    """Without name spaces, and without what only an editor or a stand-alone file needs."""
    for parent in list(root.iter()):
        for child in list(parent):
            named = parent is root and child.tag in (f"{SVG}title", f"{SVG}desc")
            if named or child.tag == f"{SVG}metadata" or not child.tag.startswith(SVG):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        attributes = {key.removeprefix(XLINK): value for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({k: v for k, v in attributes.items() if not k.startswith("{")})


def _rename(root, name):
    """Ids that no other picture of the page has, in the elements and wherever they are used."""
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                value = f"{name}-{value}"
            elif key == "href" and value.startswith("#"):
                value = f"#{name}-{value[1:]}"
            element.set(key, REFERENCE.sub(rf"url(#{name}-\1)", value))


def _scoped(css, name):
    """A style sheet that reaches into the picture called `name` only."""
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    if "@" in css:
        raise ValueError("its style sheet has an @-rule; only plain rules are understood")

    def scoped(selector):
        selector = re.sub(r"#([\w-]+)", rf"#{name}-\1", selector.strip())
        whole = re.match(r"(svg|:root)(?![\w-])", selector)
        return f"#{name}{selector[whole.end():]}" if whole else f"#{name} {selector}"

    rules = [
        f"{','.join(map(scoped, selectors.split(',')))}{{{body.strip()}}}"
        for selectors, body in RULE.findall(css)
    ]
    return REFERENCE.sub(rf"url(#{name}-\1)", "".join(rules))


def _coloured(text):
    """Colours of the book as variables.

    A fill that is no colour of the book stays the same on both pages, and so must the words on it:
    then only lines and ink change.
    """
    fills = {paint[3].lower() for paint in PAINT.finditer(text) if paint[1] == "fill"}
    ours = fills <= TOKENS.keys() and "<image" not in text

    def variable(paint):
        what, between, colour = paint.groups()
        token = TOKENS.get(colour.lower())
        changes = token and (ours or what == "stroke" or token == "ink")
        return f"{what}{between}var(--k3-{token},{colour})" if changes else paint[0]

    return PAINT.sub(variable, text)
