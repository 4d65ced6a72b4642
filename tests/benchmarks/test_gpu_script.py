"""The script for a GPU, run at toy size on the CPU: every row is there, and what fails is a row that says so."""

import time

import pytest
import torch

from benchmarks import gpu, gpu_layers, gpu_rows, gpu_work

MISSING = ("it runs on CUDA only", "the compiler is tried on a GPU only")


def cells(line):
    return [c.strip() for c in line.strip("|").split("|")]


def test_every_row_runs(capsys):
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    out = capsys.readouterr().out
    head, rule, *lines = (line for line in out.splitlines() if line.startswith("|"))
    assert cells(head) == list(gpu.HEAD)
    names = [cells(line)[0] for line in lines]
    assert len(set(names)) == len(names) > 25
    for part in ("KDA forward and backward", "KDA, one token", "MLA prefill", "MLA, one token", "experts", "AttnRes",
                 "KDA layer, prefill", "KDA layer, one token", "MLA layer, prefill", "MLA layer, one token"):
        assert any(n.startswith(part) for n in names), part
    for row in map(cells, lines):
        if row[1] == "-":
            assert row[-1].endswith(MISSING), row
            continue
        assert float(row[1]) > 0 and float(row[2]) > 0, row
        if row[8] == "-":
            assert row[0].endswith("keys and values cached")
        else:
            assert 0 <= float(row[8]) < 0.03, row


def test_an_error_is_seen_in_the_table(monkeypatch, capsys):
    """The column would show a kernel that computes something else."""
    monkeypatch.setattr(gpu_rows, "ours", lambda *args: [2 * x for x in gpu_rows.k3.chunk_kda(*args)])
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    row = next(cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("| KDA forward, T 24, ours"))
    assert float(row[8]) == pytest.approx(1, abs=0.1)


def test_depth_reads_are_held_against_the_definition(monkeypatch):
    monkeypatch.setattr(gpu_layers, "stream_reads", lambda *args: [2 * h for h in gpu_layers.direct_reads(*args, gpu.k3.attn_res)])
    (_, two), (_, direct) = gpu_layers.depth(gpu.k3.K3Config.toy(), torch.device("cpu"), 3)
    assert two().error() == pytest.approx(1, abs=0.1) and direct().error() < 0.03


@pytest.mark.parametrize("T", [1, 24])
def test_bytes_of_kda_are_those_of_its_tensors(T):
    c = gpu.k3.K3Config.toy()
    q, k, v, g, beta = gpu_rows.kda_inputs(c, torch.device("cpu"), T)
    o, S = gpu_rows.ours(q, k, v, g, beta)
    assert (v.dtype, S.dtype) == (torch.bfloat16, torch.float32)
    moved = sum(x.nbytes for x in (q, k, v, g, beta, o.to(v.dtype), S, S))
    assert gpu_rows.kda_moved(T, *S.shape[1:]) == moved


def test_a_cache_of_keys_and_values_is_the_same_attention(monkeypatch):
    """The operands are drawn once and kept."""
    c, drawn = gpu.k3.K3Config.toy(), []
    real = gpu_rows.mla_inputs
    monkeypatch.setattr(gpu_rows, "mla_inputs", lambda *args: drawn.append(real(*args)) or drawn[0])
    actual = gpu_rows.over_expanded_cache(c, torch.device("cpu"), 20).call()
    exact = gpu.k3.mla_expanded(*(x.double() for x in drawn[0]), c.v_head_dim, c.qk_head_dim ** -0.5)
    assert gpu_work.off(actual, exact) < 0.03


@pytest.mark.parametrize("error, reason", [
    (torch.cuda.OutOfMemoryError("tried to allocate 59 GB"), "out of memory"), (gpu_work.Refused("too old"), "too old"),
    (RuntimeError("no kernel image\nlong story"), "RuntimeError: no kernel image"), (ValueError(), "ValueError: ")])
def test_a_row_that_fails_says_why(error, reason):
    def build():
        raise error
    clock = gpu.Clock(torch.device("cpu"))
    row = gpu.run(("a row", build), clock, gpu.Floors(1.0, 1.0))
    assert row == ["a row", *["-"] * 8, reason] and len(row) == len(gpu.HEAD)


def test_a_row_that_hangs_is_left(monkeypatch):
    monkeypatch.setattr(gpu, "ROW", 1)
    row = gpu.run(("a row", lambda: time.sleep(30)), gpu.Clock(torch.device("cpu")), gpu.Floors(1.0, 1.0))
    assert row[-1] == "not done in 1 s"


def test_rows_that_come_too_late_are_not_run(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "TOTAL", -1)
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert len(lines) > 25 and all(cells(line)[-1] == "not run: the time is over" for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so nothing is refused")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 2
    assert "torch sees none" in capsys.readouterr().err


def test_large_sizes_are_not_for_the_cpu(capsys):
    assert gpu.main(["--device", "cpu"]) == 2
    assert "--quick" in capsys.readouterr().err


def test_experts_that_fit(monkeypatch):
    """59 GB for all of K3's experts of a layer; a smaller card gets fewer, a very small one none."""
    config, cuda = gpu.k3.K3Config.k3(), torch.device("cuda")
    for free, expected in ((80e9, 896), (40e9, 484)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (int(free), int(free)))
        assert gpu_rows.experts_that_fit(config, cuda) == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 ** 9, 10 ** 9))
    with pytest.raises(gpu_work.Refused, match="room for 12 experts; a token uses 16"):
        gpu_rows.experts_that_fit(config, cuda)
