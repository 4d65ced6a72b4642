"""The result as a file to read by machines, a table, and a plot."""

import json
from pathlib import Path

from k3_teach.notebook.benchmark import digits, in_words


def write(result: dict, folder: Path) -> str:
    """Write result.json, table.md and plot.svg into `folder`; give the table."""
    from benchmarks.plot import plot        # takes matplotlib, which `command` looks for first
    text = table(result)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(text, encoding="utf-8")
    plot(result, folder / "plot.svg")
    return text


def groups(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by their group, both in the order in which they came."""
    out: dict[str, list[dict]] = {}
    for row in rows:
        out.setdefault(row["group"], []).append(row)
    return out


def line(row: dict) -> str:
    """One row as it is measured, for a person who waits."""
    cells = [f"{name} {_cell(row, name)}" for name in row["contenders"]]
    return f"{row['group']}, {row['name']}: {row.get('failed') or '; '.join(cells)}"


def table(result: dict) -> str:
    """Markdown: the machine, then one table for each group."""
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    rates = [f"{(result['floors']['matmul_flops'] or 0) / 1e9:.0f} GFLOP/s in float32 products"] \
        if result["floors"]["matmul_flops"] else []
    rates += [f"{rate / 1e9:.0f} GB/s copying {int(size) / 2 ** 20:.3g} MiB"
              for size, rate in result["floors"]["copy_bytes_per_second"].items()]
    parts = [f"Measured on {result['date']}: {machine}.",
             f"At best: {'; '.join(rates)}." if rates else ""]
    for group, rows in groups(result["rows"]).items():
        parts.append(f"## {group}\n\n{_group_table(rows)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _group_table(rows: list[dict]) -> str:
    """Ours in full, the others as ratios, then shares of what the machine can do."""
    ours = {row["ours"] for row in rows}
    others = list(dict.fromkeys(name for row in rows
                                for name in (*row["contenders"], *row.get("not_run", ()))
                                if name not in ours))
    extras = [key for key in ("of_matmul", "of_copy", "tokens_per_second")
              if any(key in row for row in rows)]
    titles = {"of_matmul": "of matmul rate", "of_copy": "of copy bandwidth",
              "tokens_per_second": "tokens/s"}
    head = ["", " or ".join(sorted(ours)), *others, *(titles[key] for key in extras)]
    lines = [head, ["---"] + ["--:"] * (len(head) - 1)]
    for row in rows:
        note = f" ({row['note']})" if row.get("note") else ""
        cells = [row["name"] + note, row.get("failed") or _cell(row, row["ours"])]
        cells += [_cell(row, name) for name in others]
        lines.append(cells + [_extra(row, key) for key in extras])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(row: dict, name: str) -> str:
    """Ours with its quartiles; another as how many times ours; or why it was not run."""
    if name not in row["contenders"]:
        reason = row.get("not_run", {}).get(name)
        return "" if "failed" in row else f"not run: {reason}" if reason else "not run"
    entry = row["contenders"][name]
    if name != row["ours"] and "ratio" in entry:
        return f"{digits(entry['ratio']['median'])}x"
    amount, quartiles = in_words(row, name)
    return f"{amount} ({quartiles})" if quartiles else amount


def _extra(row: dict, key: str) -> str:
    if key not in row:
        return ""
    return f"{row[key]:,.0f}" if key == "tokens_per_second" else f"{row[key]:.0%}"
