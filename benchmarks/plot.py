"""One picture of the result: how many times as long the others take, group by group."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from k3_teach.notebook.benchmark import rivals
from k3_teach.notebook.palette import INK, PALETTE

MARKS = list(zip((PALETTE[name] for name in ("rust", "blue", "green", "pink", "ochre")), "os^Dv"))


def plot(result: dict, path: Path) -> None:
    """Write an SVG that shows on light and dark pages; its description stands in the file."""
    panels = by_group(result["rows"])
    sizes = [len(rows) + 1.5 for rows in panels.values()] or [1]
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
             "ytick.color": INK, "font.size": 9, "svg.hashsalt": "k3", "axes.titlelocation": "left"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.5, 0.6 + 0.3 * sum(sizes)), layout="constrained")
        axes = figure.subplots(len(sizes), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
        for axis, (group, rows) in zip(axes, panels.items()):
            draw(axis, group, rows)
        axes[-1].xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes[0].tick_params(top=True, labeltop=True)        # it is longer than a screen
        axes[-1].set_xlabel("time or memory, as a multiple of this package's (logarithmic)")
        figure.savefig(path, transparent=True, format="svg", metadata={
            "Title": "Benchmarks", "Description": describe(panels), "Date": None})


def by_group(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows that have a ratio to show."""
    out: dict[str, list[dict]] = {}
    for row in rows:
        if rivals(row):
            out.setdefault(row["group"], []).append(row)
    return out


def draw(axis: Axes, group: str, rows: list[dict]) -> None:
    """One group: a line for each row, a mark for each contender, a bar for its quartiles."""
    names = list(dict.fromkeys(name for row in rows for name in rivals(row)))
    for name, (colour, mark) in zip(names, MARKS * len(names)):
        for y, row in enumerate(rows):
            ratio = rivals(row).get(name)
            if ratio is not None:
                low, high = ratio.get("low", ratio["median"]), ratio.get("high", ratio["median"])
                axis.plot([low, high], [y, y], color=colour, alpha=0.5, linewidth=3)
                axis.plot(ratio["median"], y, mark, color=colour)
        axis.plot([], [], mark, color=colour, label=name)
    axis.set_xscale("log")
    axis.axvline(1, color=INK, linewidth=1)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_title(group, fontsize=10)
    axis.grid(axis="x", color=INK, alpha=0.25)
    axis.patch.set_alpha(0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)


def describe(panels: dict[str, list[dict]]) -> str:
    """The picture in words: the range of ratios of every contender in every group."""
    sentences = ["How many times as long as this package the others take."]
    for group, rows in panels.items():
        ranges: dict[str, list[float]] = {}
        for row in rows:
            for name, ratio in rivals(row).items():
                ranges.setdefault(name, []).append(ratio["median"])
        said = (f"{name} {min(all_):.2g} to {max(all_):.2g}" for name, all_ in ranges.items())
        sentences.append(f"{group}: {', '.join(said)}.")
    return " ".join(sentences)
