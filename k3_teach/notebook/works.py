"""The works that the book cites: references.bib, and where its pages cite which of them.

    works(Path("book"))["kimi_k3"]["year"]          "2026"
    cited(Path("book"))["kimi_k3"]                  the names of the pages that cite it

What the book takes from a work is its field `keywords`, one of PURPOSES; the bibliography is in
this order. A work without one is background.
"""

import json
import re
from pathlib import Path

PURPOSES = {
    "design": "Design, and effects reported by its authors",
    "release": "Sizes, switches, order of computation",
    "ports": "Measurements and mistakes reported by others",
    "hardware": "Hardware",
    "": "Background",
}
CITE = re.compile(r"\s*\{cite\}`([\w, ]+)`")


def works(folder: Path) -> dict[str, dict[str, str]]:
    """The key of each entry -> its fields."""
    path = Path(folder) / "references.bib"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    entries = re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", text, re.M | re.S)
    fields = re.compile(r"^\s*(\w+)\s*= \{(.*)\},?$", re.M)
    return {key: dict(fields.findall(body)) for key, body in entries}


def purpose(work: dict[str, str]) -> str:
    return PURPOSES.get(work.get("keywords", ""), PURPOSES[""])


def name_of(work: dict[str, str]) -> str:
    """A work within a sentence: its authors and year."""
    authors = work.get("author", "")
    people = [re.sub(r"[{}]", "", who) for who in authors.split(" and ")]
    if not authors.startswith("{"):
        people = [who.split(",")[0] for who in people]
    said = " and ".join(people) if len(people) < 3 else f"{people[0]} and others"
    return f"{said}, {work['year']}" if "year" in work else said


def keys(text: str) -> tuple[str, ...]:
    """The works that a text cites, each once, in its order."""
    found = [key.strip() for names in CITE.findall(text) for key in names.split(",")]
    return tuple(dict.fromkeys(found))


def cited(folder: Path) -> dict[str, set[str]]:
    """The key of each work that is cited -> the names of the pages that do."""
    found: dict[str, set[str]] = {}
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".ipynb", ".md"):
            for key in keys(markdown(path)):
                found.setdefault(key, set()).add(path.stem)
    return found


def markdown(path: Path) -> str:
    """The text of a page; of a notebook, its Markdown and the captions of its figures."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    shown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return "\n".join(shown + [caption(cell) for cell in cells])


def caption(cell: dict) -> str:
    return cell["metadata"].get("mystnb", {}).get("figure", {}).get("caption", "")
