"""The page of measured speeds: from a small result that is made up, and the real one."""

import json
import sys

import pytest
from docutils import nodes
from sphinx.errors import ExtensionError

from k3_teach.notebook.benchmark import Benchmark, benchmark

from .browser import ROOT, open_page, screen

sys.path.insert(0, str(ROOT / "book/_ext"))

import k3_speed  # noqa: E402
from k3_speed import THREADS, cell, folds, machine, overview, percent, row_lines  # noqa: E402

# ---- a small result ------------------------------------------------------------------------------


def entry(seconds, ratio):
    return {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds,
            "ratio": {"median": ratio, "low": ratio, "high": ratio}}


def timed(name, ours=2e-3, ratio=12.5, **more):
    return {"group": "KDA forward", "name": name, "ours": "fast", "unit": "s", "not_run": {},
            "contenders": {"slow": entry(ratio * ours, ratio), "fast": entry(ours, 1)}} | more


MEMORY = {"group": "KDA, memory", "name": "all", "ours": "fast", "unit": "MB", "not_run": {},
          "note": "beyond the inputs", "contenders": {
              "fast": {"median": 12.0, "ratio": {"median": 1.0}},
              "slow": {"median": 48.0, "ratio": {"median": 4.0}}}}
REFUSED = {"group": "KDA forward", "name": "small", "ours": "fast", "contenders": {},
           "failed": "they differ"}


def result(*rows, matmul=1e11):
    rates = {"matmul_flops": matmul, "copy_bytes_per_second": {"65536": 9e10, "1048576": 5e10}}
    return Benchmark({"processor": "P", "threads": 1, "memory_GB": 8}, rates, "2030-01-02", [*rows])


SMALL = timed("small", of_matmul=0.25, of_copy=0.0123, tokens_per_second=12345.6)
LARGE = timed("large", ratio=20.0)
BOTH = [result(SMALL, LARGE, MEMORY), result(timed("small", 1e-3, 30.0), MEMORY, matmul=2e11)]


def lines_of(table):
    """The words of each line of a table, its head left out."""
    return [tuple(cell.astext() for cell in row.children)
            for row in table.findall(nodes.row) if not isinstance(row.parent, nodes.thead)]


def test_a_row_is_a_run_of_short_lines():
    assert list(row_lines("small", [SMALL, timed("small", 1e-3, 30.0)])) == [
        ("small",), ("fast", "2 ms\n1.8 to 2.2", "1 ms\n0.9 to 1.1"), ("slow", "12.5×", "30×"),
        ("of matmul rate", "25 %", ""), ("of copy bandwidth", "1.2 %", ""),
        ("tokens/s", "12,346", "")]


def test_what_was_not_measured_says_why():
    quick = SMALL | {"not_run": {"slow": "too slow"}, "contenders": {"fast": entry(3e-6, 1)}}
    assert cell(quick, "slow") == "too slow" and cell(None, "slow") == ""
    assert cell(quick, "fast") == "3 µs\n2.7 to 3.3"
    assert list(row_lines("small", [REFUSED, SMALL])) == [("small",), ("", "they differ", "")]
    assert cell(MEMORY, "fast") == "12 MB" and percent(0.3) == "30 %"


def test_a_fold_has_the_rows_of_both():
    first, table, _, second, memory, _ = folds(BOTH, ("KDA",))
    assert "<b>KDA forward</b>" in first.astext() and "slow 12 to 20" in first.astext()
    assert "slow 4" in second.astext() and ("all (beyond the inputs)",) in lines_of(memory)
    assert ("slow", "20×", "") in lines_of(table) and ("slow", "12.5×", "30×") in lines_of(table)
    assert not folds(BOTH, ("MLA",))


def test_the_machine_says_once_what_is_the_same():
    table, = machine(BOTH)
    assert ("processor", "P") in lines_of(table) and ("memory, GB", "8") in lines_of(table)
    assert ("matrix product", "100 GFLOP/s", "200 GFLOP/s") in lines_of(table)
    assert ("copy of 64 KiB", "90 GB/s") in lines_of(table)
    assert not any(line[0] == "threads" for line in lines_of(table))


def test_the_picture_says_what_it_shows_and_has_a_dot_for_each_size():
    svg = overview(BOTH)[0].astext()
    assert "KDA forward: slow 12 to 20" in svg and "memory" not in svg
    legend, dots = 2, 2 + 1             # with one thread, and with two
    assert svg.count("<circle") == legend + dots
    assert "var(--k3-rust" in svg and "#fff" not in svg


def test_a_missing_result_is_one_clear_sentence(tmp_path):
    with pytest.raises(ExtensionError, match=r"threads-2/result\.json is missing; to make it, run"):
        k3_speed.stored(2, tmp_path)


# ---- the stored one ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_what_is_stored_is_whole(threads):
    path = ROOT / k3_speed.STORED.format(threads) / "result.json"
    assert not json.loads(path.read_text(encoding="utf-8"))["quick"]
    found = benchmark(threads)
    assert found.machine["threads"] == threads
    assert not [(r["group"], r["name"], r["failed"]) for r in found.rows if "failed" in r]


def test_the_page_has_every_row(pages, site):
    page = pages[site / "book/speed.html"]
    shown = [" ".join(b.get_text().split()) for b in page.select(".k3-speed summary b")]
    tables = [row for n in THREADS for row in benchmark(n).rows]
    assert sorted(shown) == sorted({row["group"] for row in tables})
    sizes = {words.get_text().strip() for words in page.select(".k3-speed .k3-size")}
    assert not [r["name"] for r in tables if not any(s.startswith(r["name"]) for s in sizes)]


@pytest.mark.browser
def test_tables_fit_a_phone(browser, address):
    unfold = "() => document.querySelectorAll('details').forEach(d => { d.open = true; })"
    wide = "() => [...document.querySelectorAll('.k3-speed :is(table, td)')]" \
           ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    with screen(browser, 375) as context:
        page, wrong = open_page(context, f"{address}/book/speed.html")
        page.evaluate(unfold)
        assert page.evaluate(wide) == [] and not wrong
