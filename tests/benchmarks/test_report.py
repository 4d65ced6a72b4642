"""The command and what it writes."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from benchmarks import command, report
from benchmarks.run import SMALLEST_COPY, Floors
from k3_teach.notebook.palette import INK, PALETTE


def entry(seconds, ratio):
    return {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds, "rounds": 5,
            "ratio": {"median": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}}


ROWS = [
    {"group": "Alpha", "name": "small", "ours": "fast", "unit": "s", "not_run": {}, "of_matmul": 0.25, "tokens_per_second": 12345.6,
     "contenders": {"fast": entry(2e-3, 1), "slow": entry(0.025, 12.5)}},
    {"group": "Alpha", "name": "large", "ours": "fast", "unit": "s", "not_run": {"slow": "minutes"}, "contenders": {"fast": entry(3.0, 1)}},
    {"group": "Beta", "name": "memory", "ours": "fast", "unit": "MB", "note": "beyond the weights", "not_run": {},
     "aside": ["its half"], "contenders": {"fast": {"median": 12.0, "ratio": {"median": 1.0}}, "its half": {"median": 6.0, "ratio": {"median": 0.5}},
                                           "other": {"median": 48.0, "ratio": {"median": 4.0}}}},
    {"group": "Beta", "name": "broken", "ours": "fast", "contenders": {}, "failed": "they differ"},
]
RESULT = {"date": "2030-01-02", "quick": True, "machine": {"processor": "P", "torch": "T"}, "rows": ROWS,
          "floors": {"matmul_flops": 1e11, "copy_bytes_per_second": {1 << 20: 5e10}}}


def test_the_table():
    text = report.table(RESULT)
    assert "Measured on 2030-01-02: processor P, torch T." in text
    assert "At best: 100 GFLOP/s in float32 products; 50 GB/s copying 1 MiB." in text
    assert "| small | 2 ms (1.8-2.2) | 12.5x | 25% | 12,346 |" in text
    assert "| large | 3 s (2.7-3.3) | not run: minutes |  |  |" in text
    assert "| memory (beyond the weights) | 12 MB | 0.5x | 4x |" in text
    assert "| broken | they differ |  |  |" in text
    for table in text.split("## ")[1:]:
        assert len({line.count("|") for line in table.splitlines() if "|" in line}) == 1


def test_a_table_of_nothing():
    empty = RESULT | {"rows": [], "floors": {"matmul_flops": None, "copy_bytes_per_second": {}}}
    assert report.table(empty) == "Measured on 2030-01-02: processor P, torch T.\n"


def test_files_and_their_contents(tmp_path):
    assert report.write(RESULT, tmp_path) == (tmp_path / "table.md").read_text(encoding="utf-8")
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["rows"] == ROWS and stored["machine"] == RESULT["machine"]


def test_the_plot_says_what_it_shows_and_stands_on_any_page(tmp_path):
    report.write(RESULT, tmp_path)
    svg = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    description = next(e.text for e in ET.fromstring(svg).iter() if e.tag.endswith("}description"))
    assert "Alpha: slow 12 to 12" in description and "Beta: other 4 to 4" in description
    assert "its half" not in svg and svg.count("<!-- 10 -->") == 2          # at the top and at the bottom
    for words in ("small", "slow", "Alpha", "memory", "other", "large"):
        assert (f"<!-- {words} -->" in svg) == (words != "large")       # it has nothing beside it
    allowed = {colour.lower() for colour in (*PALETTE.values(), INK)}
    assert set(re.findall("#[0-9a-f]{6}", svg.lower())) - {"#000000"} <= allowed
    assert "fill: #ffffff" not in svg and "<dc:date>" not in svg
    again = tmp_path / "again"
    again.mkdir()
    report.write(RESULT, again)
    assert (again / "plot.svg").read_text(encoding="utf-8") == svg


def test_a_plot_of_nothing(tmp_path):
    report.write(RESULT | {"rows": []}, tmp_path)
    assert (tmp_path / "plot.svg").stat().st_size > 0


# --- the command ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, said", [
    (["--only", "kda,nothing"], "'nothing' is none of"), (["--threads", "0"], "--threads is 0; it must be from 1 to"), (["--threads", "100000"], "--threads is 100000; it must be from 1 to"),
    (["--threads", "many"], "invalid int value"), (["--output", "{file}/x"], "the folder cannot be made")])
def test_a_mistake_gets_one_sentence(arguments, said, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = [part.format(file=tmp_path / "file") for part in arguments]
    with pytest.raises(SystemExit) as stopped:
        command.parse(["--output", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in last and last.startswith("python -m benchmarks: error:")


def test_what_is_unwritable_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command.os, "access", lambda *_: False)
    assert "not writable" in command.unwritable(tmp_path)


def test_a_missing_matplotlib_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.parse(["--output", str(tmp_path)])
    assert "matplotlib is not installed" in capsys.readouterr().err.splitlines()[-1]


def test_matplotlib_is_loaded_by_the_plot_only():
    code = "import sys, benchmarks.command; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_groups_may_be_spaced_and_repeated():
    assert command.group_names("mla, kda ,mla") == ["mla", "kda"]


def test_an_early_interruption_has_its_status_too():
    code = ("import builtins, runpy\nreal = builtins.__import__\n"
            "def stop(name, *rest, **more):\n    if name == 'benchmarks.command': raise KeyboardInterrupt\n    return real(name, *rest, **more)\n"
            "builtins.__import__ = stop\nrunpy.run_module('benchmarks', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 130 and not done.stderr


def run(monkeypatch, tmp_path, measure, *arguments):
    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command.torch, "set_num_threads", lambda n: None)
    return command.main(["--only", "kda", "--output", str(tmp_path / "new"), *arguments])


def test_a_run_writes_and_prints(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, lambda *_: iter(ROWS[:3])) == 0
    assert capsys.readouterr().out == (tmp_path / "new/table.md").read_text(encoding="utf-8") + "\n"
    stored = json.loads((tmp_path / "new/result.json").read_text())
    assert stored["rows"] == ROWS[:3] and stored["machine"]["torch"] and not stored["quick"]


def test_a_failed_row_is_the_exit_status(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path, lambda *_: iter(ROWS)) == 1


def test_an_interrupted_run_keeps_what_it_has(monkeypatch, tmp_path, capsys):
    def measure(*_):
        yield ROWS[0]
        raise KeyboardInterrupt

    assert run(monkeypatch, tmp_path, measure) == 130
    assert json.loads((tmp_path / "new/result.json").read_text())["rows"] == ROWS[:1]
    assert "Stopped; what has been measured is kept." in capsys.readouterr().err


def test_floors_are_measured_once_at_bounded_sizes(monkeypatch):
    measured = []
    monkeypatch.setattr("benchmarks.run.copy_bandwidth", lambda nbytes, threads: measured.append(nbytes) or 1.0)
    floors = Floors()
    for nbytes in (1, 100, 3 << 20, (3 << 20) + 1, 1 << 40):
        floors.copy(nbytes)
    assert measured == [SMALLEST_COPY, 1 << 20, 1 << 28]
