"""Every claim of the book with its label and where it is checked, read from the chapters.

    claims(Path("book"))                 all of them, in the order of the pages
    claims(Path("book"), figures())      each also with the rows of k3_teach.numbers that it quotes

A claim is a line of Markdown with a label, `*[measured here]*`; a line is a sentence, the row of a
table, or a caption. Where it is checked follows from the label:

    measured, derived        the code cell of its section that has most of its numbers and names
    read from the code       the release, the files that it names, tests of what its section shows
    reported                 the works that it cites, else the nearest that its section cites
    open                     nothing
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import k3_teach

from .works import CITE, caption, keys, name_of, works

LABELS = ("derived here", "measured here", "read from the released code",
          "reported by the authors", "reported by others", "open")
BADGE = re.compile(r"\s*(?<![*`])\*\[(" + "|".join(LABELS) + r")\]\*(?!\*)")
FORMULA = re.compile(r"\n+\$\$\n[^$]*\n\$\$(?: \((eq-[\w-]+)\))?\n+")
CODE, NAME = re.compile(r"(?<!\})`[^`]+`"), re.compile(r"[a-zA-Z_]\w{3,}")
KEPT = re.compile(r"(\$[^$]+\$|`[^`]+`)")           # formulas and code in a sentence
RELEASE = "kimi_k3_release"                         # what was read, also where no file is named
GOLDEN = "tests/test_golden.py"                     # the test with numbers of the released code
FILES = re.compile(r"\bconfig\.json|\bmodeling_\w+\.py|\bindex\b")
HELD_BY = {r"config": "tests/test_config.py", r"\bmodeling_": GOLDEN,  # a file, the test of it
           r"\bindex\b": "tests/scale/test_cost.py"}
SHOWN = re.compile(r"\bshow_source\(([^)]*)\)")     # the package's code, on a page
NAMED_AFTER = re.compile(r"\b(in|by|of|from|with|and)$")    # after these a work is named
STATED_BY = re.compile(r"\b(is|are|was|were|or|column|second)$")  # after these a label is
NOT_OURS = re.compile(r"\b(image|vision)\b")        # which the package does not have


@dataclass(frozen=True)
class Claim:
    """One label of one sentence. `checks` are cells, named as the tests are, files and tests."""

    chapter: str                        # 02_moe
    heading: str                        # of the nearest section, as Markdown
    anchor: str                         # that section's address on the page
    label: str
    sentence: str                       # plain words; `code` and $formulas$ stay as they are
    cites: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    asserts: int = 0                    # how many the cell has
    figures: tuple[str, ...] = ()       # rows of k3_teach.numbers: as quoted, and of what
    borrows: bool = False               # reported, and the work is cited in another line only


@dataclass(frozen=True)
class Cell:
    number: int                         # among the code cells, from 0
    source: str
    printed: str
    shows: bool                         # no imports, no check of an exercise and no stub

    @property
    def asserts(self) -> int:
        return len(re.findall(r"^\s*assert\b", self.source, re.M))


is_cell = lambda part: isinstance(part, Cell)
first = lambda found: next(filter(None, found), ())     # that is not empty; else an empty one
shown = lambda parts: " ".join(sum((SHOWN.findall(p.source) for p in parts if is_cell(p)), []))


@dataclass
class Section:
    """A heading and what follows up to the next: lines of Markdown, and code cells."""

    heading: str
    level: int
    anchor: str
    parts: list[str | Cell] = field(default_factory=list)


# --- a notebook as sections ---------------------------------------------------------------------

def chapters(folder: Path) -> dict[str, dict]:
    """The name of each chapter -> its notebook, in the order of their numbers."""
    paths = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def sections(notebook: dict) -> list[Section]:
    found, number = [Section("", 1, "")], 0
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            found[-1].parts += [code_cell(cell, source, number), *caption(cell).splitlines()]
            number += 1
            continue
        for line in lines(source):
            if head := re.match(r"(#{1,3}) (.*)", line):
                anchor = slug(head[2], {section.anchor for section in found})
                found.append(Section(head[2], len(head[1]), anchor))
            else:
                found[-1].parts.append(line)
    return found


def code_cell(cell: dict, source: str, number: int) -> Cell:
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
    aside = {"check", "exercise"} & set(cell["metadata"].get("tags", ()))
    aside = aside or source.startswith("try:\n    import k3_teach")         # the imports
    return Cell(number, source, "\n".join(map("".join, texts)), not aside)


def lines(markdown: str) -> list[str]:
    """What a reader sees as text; a formula within a sentence becomes its number."""
    def inside(found):
        number = f" {{eq}}`{found[1]}` " if found[1] else " … "
        return number if markdown[found.end():found.end() + 1].islower() else found[0]
    markdown = FORMULA.sub(inside, markdown)
    markdown = re.sub(r"^```(?!\{).*?^```$", "", markdown, flags=re.M | re.S)
    return [line for line in markdown.splitlines() if line and not line.startswith(("```", ":"))]


def slug(heading: str, taken: Iterable[str] = ()) -> str:
    """The anchor of a heading, as MyST makes it; words in *emphasis* are not in it."""
    words = re.sub(r"\*[^*]*\*|\$[^$]*\$", "", heading).lower().replace(" ", "-")
    name, number = re.sub(r"[^\w\-]", "", words), 1
    while name in taken:
        name, number = f"{name}-{number}", number + 1
    return name


def numbers(notebooks: dict[str, dict]) -> dict[str, str]:
    """The names of equations and figures -> their numbers, as the pages have them."""
    found = {}
    for name, notebook in notebooks.items():
        equations, figures = [], []
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                source = "".join(cell["source"])
                equations += re.findall(r"^\$\$ \((eq-[\w-]+)\)", source, re.M)
                figures += re.findall(r"^:name: ([\w-]+)", source, re.M)
            figure = cell["metadata"].get("mystnb", {}).get("figure", {})
            figures += [figure["name"]] if "name" in figure else []
        for form, named in (("({}.{})", equations), ("Figure {}.{}", figures)):
            found |= {n: form.format(int(name[:2]), i) for i, n in enumerate(named, start=1)}
    return found


# --- the claims ---------------------------------------------------------------------------------

def claims(folder: Path, rows: Iterable = ()) -> list[Claim]:
    """All claims of the chapters in `folder`; tests and package lie beside it."""
    notebooks, entries, rows = chapters(folder), works(folder), list(rows)
    named, tests = numbers(notebooks), covers(Path(folder).resolve().parent)
    found = []
    for name, notebook in notebooks.items():
        parts = sections(notebook)
        origin = origins("\n".join(p.source for s in parts for p in s.parts if is_cell(p)))
        for at, section in enumerate(parts):
            for place, line in enumerate(section.parts):
                for badge in () if is_cell(line) else BADGE.finditer(line):
                    near, sentence = [*around(parts, at, place)], plain(line, named, entries)
                    checked = check(name, line, badge, near, origin, tests)
                    found.append(Claim(name, section.heading, section.anchor, badge[1], sentence,
                                       *checked, quotes(sentence, name, rows),
                                       badge[1].startswith("reported") and not keys(line)))
    return found


def check(name, line, badge, near, origin, tests) -> tuple[tuple, tuple, int]:
    """What a claim cites, what checks it, and how many asserts the cell has that does."""
    label, stretch = badge[1], stretch_of(line, badge)
    cites, files = keys(stretch), tuple(dict.fromkeys(FILES.findall(stretch)))
    if label.startswith("reported"):
        return cites or keys(line) or first(nearest_keys(*place) for place in near), (), 0
    cells = [cell for place in near for cell in by_nearness(*place, label)]
    if label.startswith("read"):
        found = tested(shown(near[0][0]), origin, tests)
        if not found and not files:
            used = first(tested(cell.source, origin, tests) for cell in cells)
            found = used if len(used) < 4 else {GOLDEN}     # a cell with much of the package
        found = {*found, *(test for word, test in HELD_BY.items() if re.search(word, stretch))}
        found = sorted(found or {GOLDEN}, key=lambda f: (f != GOLDEN, f))
        found = (*files, *(() if NOT_OURS.search(stretch) else found))
        return tuple(dict.fromkeys((RELEASE, *cites))), found, 0
    if label == "open" or not cells:
        return cites, (), 0
    return cites, (f"{name}.ipynb::Cell {cells[0].number}",), cells[0].asserts


def around(found: list[Section], at: int, place: int) -> Iterator[tuple[list, int]]:
    """The parts of a section and a place in them; then those of the whole `## section`."""
    yield found[at].parts, place
    heads = [i for i, section in enumerate([*found, found[0]]) if section.level < 3]
    start, end = max(i for i in heads if i <= at), min(i for i in heads if i > at)
    before = sum(len(section.parts) for section in found[start:at])
    yield [part for section in found[start:end] for part in section.parts], before + place


def stretch_of(line: str, badge: re.Match) -> str:
    """The part of a line that a label speaks of: between the labels beside it, up to a `;`."""
    ends = [(b.start(), b.end()) for b in BADGE.finditer(line)]
    start = max((end for _, end in ends if end <= badge.start()), default=0)
    end = min((start for start, _ in ends if start >= badge.end()), default=len(line))
    before = line[start:badge.start()].rpartition(";" if start else line + ";")[2]
    return before + line[badge.end():end].partition(";")[0]


def by_nearness(parts: list, place: int, label: str) -> list[Cell]:
    """The cells of a section; those first that have more of a sentence's numbers and names.

    Between equals: what is measured stands before its sentence, and code follows a derivation.
    """
    wanted = {*digits(parts[place]), *NAME.findall(" ".join(CODE.findall(parts[place])))}
    def order(i):
        said = parts[i].printed + parts[i].source
        shared = wanted & {*digits(said), *NAME.findall(said)}
        return -len(shared), (i < place) != label.startswith("measured"), abs(i - place)
    shown = [i for i, part in enumerate(parts) if is_cell(part) and part.shows]
    return [parts[i] for i in sorted(shown, key=order)]


def digits(text: str) -> set[str]:
    """The numbers of a text that tell something; those of a single digit do not."""
    text = re.sub(r"\{\w+\}`[^`]*`|\{,\}|(?<=\d),(?=\d{3})|(?<=\d)_(?=\d)", "", text)
    return {number for number in re.findall(r"\d+(?:\.\d+)?", text) if len(number) > 1}


def quotes(sentence: str, chapter: str, rows: list) -> tuple[str, ...]:
    """The rows of k3_teach.numbers whose digits stand in the sentence, the chapter's own first."""
    text, found = sentence.replace("{,}", ",").replace("−", "-"), {}
    for row in sorted(rows, key=lambda row: row.chapter != chapter):
        for quoted in filter(None, (row.page, row.quoted, row.computed)):
            tells = len(quoted) > (2 if row.chapter == chapter else 5) and (
                quoted == row.page or digits(quoted))
            if tells and re.search(rf"(?<![\d.,]){re.escape(quoted)}(?!\d|[.,]\d)", text):
                found.setdefault(quoted, f"{row.quoted} ({row.what})")
    return tuple(dict.fromkeys(found.values()))


# --- words --------------------------------------------------------------------------------------

def plain(line: str, named: dict[str, str], entries: dict[str, dict]) -> str:
    """A line of Markdown as plain words; labels and works stay where the sentence needs them."""
    label = lambda found: f" {found[1]}" if STATED_BY.search(line[:found.start()]) else ""
    def work(found):
        names = [name_of(entries.get(key, {"author": key})) for key in keys(found[0])]
        return " " + "; ".join(names) if NAMED_AFTER.search(line[:found.start()]) else ""
    line = BADGE.sub(label, line)
    line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", CITE.sub(work, line))
    line = re.sub(r"\{(?:eq|numref)\}`([\w-]+)`", lambda m: named.get(m[1], m[1]), line)
    line = re.sub(r"^\s*(?:[-*]|\d+\.) |^\| ?| ?\|$", "", line).replace(" | ", ": ")
    parts = KEPT.split(line)
    parts[::2] = [part.replace("*", "") for part in parts[::2]]
    line = " ".join("".join(parts).split())
    return re.sub(r"\s+([.,;:)])(?!\d)", r"\1", line).replace(",)", ")")


def nearest_keys(parts: list, place: int) -> tuple[str, ...]:
    """What the lines before cite, the nearest first; else what those after do."""
    return first(keys(line) for line in (*parts[place::-1], *parts[place:]) if not is_cell(line))


# --- the package --------------------------------------------------------------------------------

def origins(code: str) -> dict[str, str]:
    """A name that a chapter uses -> where it stands in the package, dotted."""
    taken = re.findall(r"^from (k3_teach[\w.]*) import (\([^)]*\)|[^\n]*)", code, re.M)
    found = {alias or name: f"{module}.{name}" for module, names in taken
             for name, alias in re.findall(r"(\w+)(?: as (\w+))?", names)}
    for name in re.findall(r"\bk3\.(\w+)", code):
        thing = getattr(k3_teach, name, None)
        found[f"k3.{name}"] = f"{getattr(thing, '__module__', f'k3_teach.{name}')}.{name}"
    return found


def tested(code: str, origin: dict[str, str], tests: dict[str, tuple]) -> set[str]:
    """The tests of the modules whose names stand in some code."""
    used = [dotted for name, dotted in origin.items() if re.search(rf"\b{re.escape(name)}\b", code)]
    of = lambda dotted: tests.get(dotted) or tests.get(dotted.rpartition(".")[0], ())
    found = {test for dotted in used if ".notebook." not in dotted for test in of(dotted)}
    return found | ({GOLDEN} if any(".parts." in dotted for dotted in used) else set())


def covers(root: Path) -> dict[str, tuple[str, ...]]:
    """A module -> its tests: the file in the same place, else the first that imports it."""
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
             for path in sorted(root.glob("tests/**/test_*.py"))}
    found = {}
    for path in sorted(root.glob("k3_teach/**/*.py")):
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        own = "/".join(["tests", *module.split(".")[1:-1], f"test_{path.stem}.py"])
        tests = [own] if own in texts else [t for t in texts if module in texts[t]][:1]
        found[module] = (*tests, *[GOLDEN] * (module == "k3_teach.model" or not tests))
    return found
