"""The measured speeds: a page asks for them with the directive `speed`, each build makes them.

    ```{speed} machine       what was measured on, and what it reaches at best
    ```{speed} overview      a picture: how many times as long the others take
    ```{speed} KDA, MLA      a fold with a table for every group whose name begins so

All come from benchmarks/stored, with one thread and with two. Tables have three columns, which a
phone has room for; what would be a wide table's row is a run of short ones under its name.
"""

import math
from html import escape

from docutils import nodes
from k3_svg import inline
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from k3_teach.notebook import draw
from k3_teach.notebook.benchmark import benchmark, digits, in_words, rivals
from k3_teach.notebook.files import REPOSITORY

THREADS = (1, 2)
HEAD = ("", "1 thread", "2 threads")
STORED = "benchmarks/stored/threads-{}"
COLOURS, NAMES = ("rust", "blue"), 158      # in the picture: of the threads; room for the names
GROUND = '<rect width="100%" height="100%" fill="#fff"/>'


class Speed(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        results = [stored(n) for n in THREADS]
        for n in THREADS:
            self.env.note_dependency(str(REPOSITORY / STORED.format(n) / "result.json"))
        wanted = self.arguments[0]
        views = {"machine": machine, "overview": overview}
        starts = tuple(start.strip() for start in wanted.split(","))
        found = views[wanted](results) if wanted in views else folds(results, starts)
        if not found:
            raise self.error(f"no group of the stored benchmarks begins with {wanted!r}")
        return [nodes.container("", *found, classes=["k3-speed"])]


def stored(threads, folder=REPOSITORY):
    """The stored result; without it no page can be made."""
    path = STORED.format(threads)
    if not (folder / path / "result.json").exists():
        raise ExtensionError(f"{path}/result.json is missing; to make it, run: .venv/bin/python "
                             f"-m benchmarks --threads {threads} --output {path}")
    return benchmark(threads)


# ---- the machine ---------------------------------------------------------------------------------


def machine(results):
    """Everything that a time depends on, and the floors."""
    facts = [{"date": r.date} | r.machine | floors(r) for r in results]
    names = list(dict.fromkeys(name for fact in facts for name in fact if name != "threads"))
    lines = []
    for name in names:
        values = [str(fact.get(name, "")) for fact in facts]
        same = values[:1] if values[0] == values[1] else values
        lines.append((name.replace("_GB", ", GB"), *same))
    return [table(lines)]


def floors(result):
    """Rates of a matrix product and of copies of several sizes, in words."""
    said = {"matrix product": f"{result.floors['matmul_flops'] / 1e9:.0f} GFLOP/s"}
    for size, rate in result.floors["copy_bytes_per_second"].items():
        said[f"copy of {size_of(int(size))}"] = f"{rate / 1e9:.0f} GB/s"
    return said


def size_of(nbytes):
    return f"{nbytes / 2 ** 20:.0f} MiB" if nbytes >= 2 ** 20 else f"{nbytes / 2 ** 10:.0f} KiB"


# ---- the picture ---------------------------------------------------------------------------------


def overview(results):
    """A line for every contender but ours, a dot for each size; memory is left out."""
    timed = {group: rows for group, rows in groups(results).items()
             if all(row["unit"] == "s" for pair in rows.values() for row in measured(pair))}
    found = {group: [ratios(rows, i) for i in range(len(THREADS))] for group, rows in timed.items()}
    place = scale([x for each in found.values() for one in each for all_ in one.values()
                   for x in all_])
    panels = [panel(group, each, place) for group, each in found.items() if any(each)]
    whole = draw.stack(legend(), axis(place), *panels, axis(place), gap=4)
    says = f"How many times as long as this package the others take, one thread. {whole.says}."
    svg = inline(whole.svg().replace(GROUND, ""), "k3-speed", says, f"{1.3 * draw.WIDTH:g}")
    return [nodes.raw("", svg, format="html")]


def measured(pair):
    return [row for row in pair if row and not row.get("failed")]


def scale(numbers):
    """Powers of ten and their places, right of the names; and the place of any ratio."""
    low, high = math.log10(min(numbers)), math.log10(max(numbers))
    to = lambda x: NAMES + 8 + (math.log10(x) - low) / (high - low) * (draw.WIDTH - NAMES - 20)
    return [(10.0 ** n, to(10.0 ** n)) for n in range(math.ceil(low), math.floor(high) + 1)], to


def legend():
    marks = [draw.text(4, 14, "a dot for each size", "start", size=11.5)]
    for x, words, colour in zip((NAMES, NAMES + 90), HEAD[1:], COLOURS):
        marks += [draw.dot(x, 10, 4, colour), draw.text(x + 9, 14, words, "start", size=11.5)]
    return draw.Drawing(18, marks, "")


def axis(place):
    marks = [draw.text(at, 12, f"{x:g}×", size=11) for x, at in place[0]]
    return draw.Drawing(16, marks, "")


def panel(group, each, place):
    """One group: a row for each contender, over a line at 1."""
    names = list(dict.fromkeys(name for one in each for name in one))
    bottom = 22 + 20 * len(names)
    marks = [draw.text(4, 14, group, "start", "strong", 12, True)]
    marks += [draw.line(at, 18, at, bottom, "ink", 1, "" if x == 1 else "1 3")
              for x, at in place[0]]
    for i, name in enumerate(names):
        y = 30 + 20 * i
        marks.append(draw.text(4, y + 4, name, "start", size=11.5))
        for one, colour, shift in zip(each, COLOURS, (-4, 4)):
            if xs := [place[1](x) for x in one.get(name, [])]:
                marks.append(draw.line(min(xs), y + shift, max(xs), y + shift, colour, 2))
                marks += [draw.dot(x, y + shift, 3, colour) for x in xs]
    said = "; ".join(f"{name} {range_of(all_)}" for name, all_ in each[0].items())
    return draw.Drawing(bottom, marks, f"{group}: {said}")


# ---- the tables ----------------------------------------------------------------------------------


def groups(results):
    """Group -> name of a row -> the row with one thread and that with two, or None."""
    found = {}
    for i, result in enumerate(results):
        for row in result.rows:
            pair = found.setdefault(row["group"], {}).setdefault(row["name"], [None, None])
            pair[i] = row
    return found


def folds(results, starts):
    """For every group a fold, closed: what the others take, then the table."""
    made = []
    for group, rows in groups(results).items():
        if group.startswith(starts):
            lines = [line for name, pair in rows.items() for line in row_lines(name, pair)]
            opening = (f"<details><summary><b>{escape(group)}</b> "
                       f"<span>{escape(in_short(rows))}</span></summary>")
            made += [nodes.raw("", opening, format="html"), table(lines),
                     nodes.raw("", "</details>", format="html")]
    return made


def in_short(rows):
    """The range of every other contender's ratio to ours, with one thread; "" without others."""
    ranges = ratios(rows, 0)
    if not ranges:
        return ""
    said = "; ".join(f"{name} {range_of(all_)}" for name, all_ in ranges.items())
    return f"Multiples of ours: {said}"


def range_of(numbers):
    """The least and the largest, as words; one number alone if they are equal."""
    least, most = (draw.number(x, 2) for x in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def ratios(rows, which):
    """Contender -> its ratios to ours in all rows, with one thread (0) or two (1)."""
    found = {}
    for pair in rows.values():
        for name, ratio in (rivals(pair[which]) if pair[which] else {}).items():
            found.setdefault(name, []).append(ratio["median"])
    return found


def row_lines(name, pair):
    """The name, ours in full, the others as multiples, then shares of what the machine can do."""
    first = next(row for row in pair if row)
    note = f" ({first['note']})" if first.get("note") else ""
    yield (name + note,)
    if any(row and row.get("failed") for row in pair):
        yield "", *(row.get("failed", "") if row else "" for row in pair)
        return
    others = dict.fromkeys([*first["contenders"], *first["not_run"]])
    for who in [first["ours"], *(o for o in others if o != first["ours"])]:
        yield who, *(cell(row, who) for row in pair)
    for key, (words, form) in SHARES.items():
        if key in first:
            yield words, *(form(row[key]) if row and key in row else "" for row in pair)


def percent(share):
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def cell(row, who):
    """Ours with its quartiles; another as a multiple of it; or why it was not run."""
    if row is None or who not in row["contenders"]:
        return (row or {}).get("not_run", {}).get(who, "")
    entry = row["contenders"][who]
    if who != row["ours"]:
        return f"{digits(entry['ratio']['median'])}×" if "ratio" in entry else "—"
    amount, quartiles = in_words(row, who)
    return f"{amount}\n{quartiles.replace('-', ' to ')}" if quartiles else amount


SHARES = {"of_matmul": ("of matmul rate", percent), "of_copy": ("of copy bandwidth", percent),
          "tokens_per_second": ("tokens/s", digits)}


def table(lines):
    """Three columns; a line of one cell is a heading across all, and the last of two is wide."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=w) for w in (44, 28, 28)), cols=3)
    group += nodes.thead("", nodes.row("", *map(entry, HEAD)))
    group += nodes.tbody("", *map(row_of, lines))
    return nodes.table("", group)


def row_of(line):
    *cells, last = line
    kind = ["k3-size"] if not cells else []
    return nodes.row("", *map(entry, cells), entry(last, 2 - len(cells)), classes=kind)


def entry(words, more=0):
    """A cell over `more` further columns; a second line is smaller."""
    first, _, second = words.partition("\n")
    text = [nodes.Text(first)]
    if second:
        text += [nodes.Text(" "), nodes.inline("", second, classes=["k3-quartiles"])]
    made = nodes.entry("", nodes.paragraph("", "", *text))
    if more:
        made["morecols"] = more
    return made


def setup(app):
    app.add_directive("speed", Speed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
