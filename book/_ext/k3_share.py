"""What a link to a page shows elsewhere: title, description and a picture, the same for all pages.

The picture is the book's title over K3's 93 layers, one bar each.
"""

import json
import re
from html import escape
from pathlib import Path
from urllib.parse import urljoin

from docutils import nodes

CARD, WIDTH, HEIGHT = "_static/card.png", 1200, 630
BLUE, PINK, INK, PAPER = "#2378fd", "#d8489f", "#3a4048", "#ffffff"  # the logo's
STRAPLINE = "Every part of the architecture in PyTorch,\nevery number computed on the page"
LONGEST = 200
CITATION = re.compile(r"\s*\[[^\[\]]*\b\d{4}[a-z]?\]")
SENTENCE = re.compile(r"(?<=[.?!])\s+")
UNSAYABLE = "\0"


# ---- the words -----------------------------------------------------------------------------------


def add_tags(app, pagename, templatename, context, doctree):
    """Every page's own title and description, in the tags that other sites read."""
    book = app.config.html_title
    title = re.sub("<[^>]*>", "", context.get("title") or book)
    said = describe(doctree) or STRAPLINE.replace("\n", " ") + "."
    card = urljoin(app.config.html_baseurl, CARD)
    address = urljoin(app.config.html_baseurl, app.builder.get_target_uri(pagename))
    named = {"description": said, "twitter:card": "summary_large_image"}
    graph = {"title": title, "type": "article", "url": address, "site_name": book,
             "description": said, "image": card, "image:width": WIDTH, "image:height": HEIGHT,
             "image:alt": f"{book}: 93 bars, one for each layer of Kimi K3"}  # fmt: skip
    tags = [("name", name, text) for name, text in named.items()]
    tags += [("property", f"og:{name}", text) for name, text in graph.items()]
    context["metatags"] = context.get("metatags", "") + "".join(
        f'\n<meta {kind}="{name}" content="{_attribute(text)}">' for kind, name, text in tags
    )


def _attribute(text):
    return escape(str(text).replace("&#39;", "'"), quote=True)


def describe(doctree):
    """The first sentences of a page, as many as fit, up to one that holds a formula."""
    said = ""
    for paragraph in doctree.findall(nodes.paragraph) if doctree else []:
        if not isinstance(paragraph.parent, (nodes.section, nodes.document)):
            continue
        for sentence in SENTENCE.split(CITATION.sub("", _plain(paragraph))):
            if said and (UNSAYABLE in sentence or len(said) + len(sentence) > LONGEST):
                return said
            if UNSAYABLE not in sentence:
                said = f"{said} {sentence}".strip()[:LONGEST]
    return said


def _plain(node):
    if isinstance(node, (nodes.math, nodes.raw, nodes.image)):
        return UNSAYABLE
    if isinstance(node, nodes.Text):
        return " ".join(node.astext().split("\n"))
    return "".join(_plain(child) for child in node.children)


# ---- the picture ---------------------------------------------------------------------------------


def draw(app, exception):
    """Write the card; matplotlib with its own font gives the same file each time."""
    path = Path(app.outdir, CARD)
    if exception or app.builder.format != "html" or path.exists():
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    font = {"family": "DejaVu Sans", "color": INK, "va": "baseline"}
    axes.text(72, 440, app.config.html_title, fontdict={**font, "size": 50, "weight": "bold"})
    axes.text(72, 300, STRAPLINE, fontdict={**font, "size": 25}, linespacing=1.5)
    _layers(axes, Path(app.srcdir, "k3_teach/k3_config.json"))
    figure.savefig(path, metadata={"Software": None})


def _layers(axes, config):
    """A bar for every layer: pink where it has full attention."""
    config = json.loads(config.read_text(encoding="utf-8"))
    count, full = config["num_hidden_layers"], config["linear_attn_config"]["full_attn_layers"]
    step = (WIDTH - 2 * 72) / (count - 1)
    for layer in range(1, count + 1):
        x, colour = 72 + (layer - 1) * step, PINK if layer in full else BLUE
        axes.plot([x, x], [90, 190], color=colour, linewidth=5, solid_capstyle="round")


def setup(app):
    app.connect("html-page-context", add_tags)
    app.connect("build-finished", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
