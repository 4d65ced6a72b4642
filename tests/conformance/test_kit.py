"""The conformance kit: its data come from outside the package, both models that are right pass, and a port that is not
gets an answer. That each mistake is caught is test_mistakes.py."""

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from k3_teach.conformance import PITFALLS, Result, describe, k3_teach, k3_teach_float32, reference, run, written_out
from k3_teach.conformance.__main__ import main
from k3_teach.conformance.folder import read_folder, read_tensors, write_tensors
from k3_teach.conformance.make import BASES, expected_values, golden_values
from k3_teach.conformance.models import DATA, MODELS, build, expected, golden, text
from k3_teach.conformance.report import likely
from k3_teach.conformance.trace import END, LAYER
from k3_teach.errors import InputError
from tests.helpers import GOLDEN


# --- the data -----------------------------------------------------------------------------------

@pytest.mark.parametrize("folder", ["k3_tiny", "k3_odd", "k3_official_format", "kimi_linear_tiny"])
def test_the_reference_computes_what_the_release_does(folder):
    config, weights = read_folder(GOLDEN / folder)
    io = read_tensors(GOLDEN / folder / "io.safetensors")
    for row, ids in enumerate(io["input_ids"]):
        logits, trace = reference.forward(config, weights, ids)
        np.testing.assert_allclose(logits, io["logits"][row], rtol=0, atol=1e-9)
        for name in ("L0.attn_out", "L3.attn_in", "L3.mlp_out", "pre_norm"):
            np.testing.assert_allclose(trace[name], io[f"trace.{name}"][row], rtol=0, atol=1e-9)


def test_the_stored_data_is_what_the_maker_makes():
    for base, folder in BASES.items():
        for name in "config.json", "model.safetensors":
            assert (DATA / base / name).read_bytes() == (GOLDEN / folder / name).read_bytes()
    for stored, made in ((golden(), golden_values(GOLDEN)), (expected(), expected_values())):
        assert stored.keys() == made.keys()
        for name, x in made.items():
            np.testing.assert_allclose(stored[name], x, rtol=0, atol=1e-10 * max(1, np.abs(x).max()), err_msg=name)


def test_every_change_of_a_model_changes_something():
    for name, model in MODELS.items():
        _, base = read_folder(DATA / model.base)
        config, tensors, _ = build(name)
        for pattern in model.changes:
            assert any(fnmatchcase(n, pattern) for n in tensors), (name, pattern)
        changed = [n for n in base if n not in tensors or not np.array_equal(tensors[n], base[n])]
        assert changed or model.config or name in BASES or model == MODELS["mixed"], name
        assert text(name).max() < 58 or model.base != "odd", "58 is the padding token"


def test_bfloat16_is_written_and_read(tmp_path):
    x = np.array([[1.0, -2.5, 3.140625]], np.float32)
    write_tensors({"a": x, "b": x}, tmp_path / "t", bfloat16=("a",))
    assert all(np.array_equal(y, x) for y in read_tensors(tmp_path / "t").values())
    assert (tmp_path / "t").read_bytes().count(b'"BF16"') == 1


# --- models that are right ----------------------------------------------------------------------

@pytest.fixture(scope="module")
def ours():
    return run(k3_teach)


def test_our_model_passes(ours):
    assert [r.number for r in ours] == list(range(41))
    wrong = [r for r in ours if r.status not in ("passed", "by reading")]
    assert not wrong, describe(wrong)
    assert {r.number for r in ours if r.status == "by reading"} == {p.number for p in PITFALLS if p.by_reading}
    assert all(r.error < 1e-2 * r.tolerance for r in ours if r.error and r.tolerance)  # room for other machines


def test_a_second_implementation_passes():
    """The kit holds a port to the mathematics, not to our code."""
    results = run(written_out)
    assert {r.number: r.message[:30] for r in results if r.status == "not checked"} == {5: "the adapter has no save(model, "[:30]}
    assert not [r for r in results if r.status == "failed"]


def test_float32_passes_a_few():
    numbers = [0, 6, 8, 10, 12, 27, 29, 31]
    assert {r.status for r in run(k3_teach_float32, numbers, "float32")} == {"passed"}
    assert run(k3_teach_float32, [0])[0].status == "failed"     # held to float64


# --- ports that are not -------------------------------------------------------------------------

def port(**functions):
    """Our adapter with other functions."""
    own = {name: getattr(k3_teach, name) for name in ("load", "forward", "trace")}
    return SimpleNamespace(**own | functions)


def spoilt(change):
    """Our adapter, whose answer goes through `change`."""
    return port(forward=lambda *a: change(*k3_teach.forward(*a)))


def broken(*_):
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("adapter, said", [
    (spoilt(lambda logits, state: (logits[:, -1], state)), "must be [B, T, vocab]"),
    (spoilt(lambda logits, state: (logits.tolist(), state)), "NumPy array"),
    (spoilt(lambda logits, state: (logits.astype(int), state)), "NumPy array"),
    (spoilt(lambda logits, state: logits), "must be (logits, state)"),
    (spoilt(lambda logits, state: (logits * np.nan, state)), "logits of the model small_keys: NaN"),
    (spoilt(lambda logits, state: (logits[..., :5], state)), "small_keys: shape [24, 5], right is [24, 59]"),
    (port(forward=broken), "forward raised RuntimeError: out of luck (test_kit.py, line"),
    (port(load=broken), "load raised RuntimeError: out of luck"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_a_bad_answer_fails_the_probe_and_the_run_goes_on(adapter, said):
    results = run(adapter, [6, 35])
    assert [(r.number, r.status, r.error) for r in results] == [(6, "failed", np.inf), (35, "failed", np.inf)]
    assert said in results[0].message


def test_a_port_without_a_trace_is_not_checked_where_it_needs_one():
    results = run(port(trace=lambda *_: {}), [3, 5, 23, 25, 37])
    assert [r.status for r in results] == ["passed", "not checked", "not checked", "passed", "not checked"]
    assert "no prefix" in results[2].message


def test_a_trace_that_is_off_is_found_where_it_begins():
    def trace(model, ids):
        found = k3_teach.trace(model, ids)
        return found | {"L2.beta": found["L2.beta"] * 1.001, "L5.attn_in": found["L5.attn_in"] * 2}
    [result] = run(port(trace=trace), [0])
    assert (result.status, result.message) == ("failed", "L2.beta of the model odd")
    assert result.first == pytest.approx(1e-3, rel=0.1) and result.error > 0.1
    assert "layer 2, counted from 0 (KDA and experts): sigmoid(b_proj x)" in describe([result])


@pytest.mark.parametrize("trace, said", [
    ({"L0_beta": np.zeros(3), "pre_norm": np.zeros(3)}, "L0_beta, pre_norm and no entry of a layer"),
    ({"L0.beta": [0.0]}, "something else than a dictionary of NumPy arrays"),
    ({"L1.topk_idx": np.ones((8, 2)), "L1.topk_w": np.ones((8, 3)), "L1.scores": np.ones((8, 10))}, "do not fit together"),
    ({"L0.beta": np.zeros((8, 4))}, "L0.beta of the model odd: shape [8, 4], right is [8, 3]"),
], ids=["names", "lists", "experts", "shape"])
def test_a_trace_that_cannot_be_compared(trace, said):
    [result] = run(port(trace=lambda *_: trace), [0])
    assert result.status == "failed" and said in result.message


def test_a_port_that_keeps_no_state_is_not_checked_where_it_is_continued():
    results = run(spoilt(lambda logits, state: (logits, None)), [14, 19, 35])
    assert [r.status for r in results] == ["not checked", "not checked", "passed"]


@pytest.mark.parametrize("adapter, probes, dtype, said", [
    (SimpleNamespace(load=broken), None, "float64", "lacks forward, trace"),
    (k3_teach, [41], "float64", "from 0 to 40"), (k3_teach, [1], "bfloat16", "float64 or float32"),
])
def test_what_cannot_be_run_is_refused(adapter, probes, dtype, said):
    with pytest.raises(InputError, match=said):
        run(adapter, probes, dtype)


# --- the diagnosis and the command --------------------------------------------------------------

def failed(number, error):
    return Result(number, "failed", error, 1e-9, "logits of something", error)


def test_the_most_telling_failure_comes_first():
    found = [failed(0, 0.5), failed(35, 1e-3), Result(3, "passed", 0.0, 1e-9, "")]
    assert [r.number for r in likely(found)] == [35]
    assert "FAILED 35: one eps for all norms\n    found: logits of something; error 1.0e-03" in describe(found)
    assert describe(found).endswith("1 passed, 2 failed")
    gates = [failed(n, 1.0) for n in (0, *PITFALLS[1].implies, 2)]
    assert likely(gates)[0].number == 2             # the others would make more probes fail than these
    both = [failed(0, 0.5), failed(35, 1e-3), failed(12, 1.0)]
    assert likely(both) == [] and "there are several" in describe(both)
    assert describe(both).index("12 decays counted") < describe(both).index("35 one eps")


def lost(entry, first):
    return Result(0, "failed", 1.0, 1e-9, f"{entry} of the model odd", first)


def test_only_mistakes_that_begin_where_the_release_is_lost_are_named():
    def named(entry, first=1.0):
        return {r.number for r in likely([lost(entry, first), failed(6, 1.0), failed(33, 1.0)])}
    assert named("L0.g") == {33} and named("L0.state", 1e-4) == {6}
    assert named("L0.state") == set()               # eps is a matter of rounding
    assert named("L0.beta") == set()
    assert "layer 0, counted from 0 (KDA and dense MLP): sigmoid(b_proj x)" in describe([lost("L0.beta", 1.0)])
    assert "--dtype float32" in describe([lost("L0.beta", 1e-7)])
    assert "how this folder is stored" in describe([Result(0, "failed", 1.0, 1e-9, "released logits of official, row 0", 1.0)])


def test_a_tensor_that_is_not_read_is_the_cause():
    unread = Result(26, "failed", np.inf, 1e-9, "a.weight: other numbers give the same logits", np.inf)
    assert [r.number for r in likely([lost("L1.mlp_out", 1.0), unread, failed(25, 1.0), failed(30, 1.0)])] == [26]


def test_a_port_that_stops_says_so_at_once():
    for stopped in port(load=broken), port(forward=broken):
        said = describe(run(stopped, [0, 6, 35]))
        assert said.startswith("STOPS with the released model: ") and "out of luck (test_kit.py, line" in " ".join(said.split())
        assert "FAILED" not in said and "stop, too: 6 eps of the l2 norm on the mean, 35 one eps" in said


def test_the_table_of_pitfalls():
    assert [p.number for p in PITFALLS] == list(range(1, 41))
    assert all(p.report.startswith("https://") and p.symptom and p.cause and p.look_at and p.probe for p in PITFALLS)
    assert all(set(p.implies) <= set(range(41)) - {p.number} for p in PITFALLS)
    assert all(set(p.begins) <= LAYER.keys() | END.keys() for p in PITFALLS)


def test_the_command(tmp_path, capsys, monkeypatch):
    assert main(["--probe", "6", "--probe", "36", "--json", str(tmp_path / "r.json")]) == 0
    assert "1 passed, 1 by reading" in capsys.readouterr().out
    assert [row["status"] for row in json.loads((tmp_path / "r.json").read_text())] == ["passed", "by reading"]
    assert main(["--list"]) == 0 and "40 buffers" in capsys.readouterr().out
    (tmp_path / "my_port.py").write_text("def load(folder): raise OSError('no such thing')\nforward = trace = load\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["my_port", "--probe", "35", "--json", str(tmp_path / "r.json")]) == 1
    assert "load raised OSError: no such thing" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())[0]["error"] == "inf"
    for wrong in ["no_such_module:adapter"], ["my_port:nothing"], ["json"], ["my_port", "--probe", "77"]:
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2


def test_a_port_is_found_beside_the_caller(tmp_path):
    (tmp_path / "beside.py").write_text("from k3_teach.conformance import written_out as adapter\n")
    command = [sys.executable, "-m", "k3_teach.conformance", "beside:adapter", "--probe", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(Path.cwd())})
    assert (done.returncode, done.stdout) == (0, "1 passed\n")
