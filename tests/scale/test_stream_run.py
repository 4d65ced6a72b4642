"""A streamed run: interrupted after any layer and taken up again, and the command line."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import k3_teach as k3
from k3_teach.scale.stream import Run, Stopped, StreamedModel, VirtualSource
from k3_teach.scale.stream.__main__ import main
from k3_teach.scale.stream.report import read_bandwidth
from k3_teach.scale.stream.run import FILE, Sampling
from tests.helpers import GOLDEN
from tests.scale.test_stream import PLAIN

PROMPT, NEW, SAMPLING = [5, 6, 7, 8, 9], 3, Sampling(temperature=1.0, top_k=50, seed=4, prefill_chunk=3)
SMALL = dict(num_hidden_layers=5, kda_layers=(1, 2, 3, 5), full_attn_layers=(4,), attn_res_block_size=2)


def streamed(seed=0, dtype=torch.float64, **changes):
    return StreamedModel(VirtualSource(k3.K3Config.toy(**SMALL | changes), seed, dtype), dtype)


def stop_after(run, layers):
    """Let it stop when so many layers have run; True if it did."""
    count = iter(range(1, 10 ** 6))
    run.after_layer = lambda layer: next(count) == layers and run.stop()
    try:
        list(run)
        return False
    except Stopped:
        return True


@pytest.mark.parametrize("changes", [{}, dict(PLAIN)], ids=["k3", "plain"])
def test_a_run_that_is_interrupted_gives_the_same_bits(tmp_path, changes):
    """Two pieces of prefill and two decoded tokens, of 5 layers: every 1, 3 or 7 layers, each time in a new model."""
    whole = Run(streamed(**changes), PROMPT, NEW, SAMPLING, tmp_path / "whole")
    assert len(list(whole)) == NEW
    wanted = load_file(tmp_path / "whole" / FILE)
    for layers in (1, 3, 7):
        folder = tmp_path / str(layers)
        stops, run = 0, Run(streamed(**changes), PROMPT, NEW, SAMPLING, folder)
        while stop_after(run, layers):
            stops += 1
            run = Run.resume(streamed(**changes), folder, NEW, SAMPLING)
        assert stops == 4 * 5 // layers
        assert run.tokens == whole.tokens and run.new == whole.new
        found = load_file(folder / FILE)
        assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
        assert [p.name for p in folder.iterdir()] == [FILE]


def test_a_finished_run_goes_on(tmp_path):
    long = list(Run(streamed(), PROMPT, 5, SAMPLING))
    list(Run(streamed(), PROMPT, 2, SAMPLING, tmp_path))
    more = Run.resume(streamed(), tmp_path, 5, SAMPLING)
    assert more.new == long[:2] and list(more) == long[2:]


def test_it_saves_in_between(tmp_path):
    run, seen = Run(streamed(), PROMPT, 1, SAMPLING, tmp_path, every=0.0), []
    run.after_layer = lambda layer: seen.append(len(list(tmp_path.glob(FILE))))
    list(run)
    assert seen == [0] + [1] * 9
    with safe_open(tmp_path / FILE, "pt") as f:
        assert json.loads(f.metadata()["run"])["layer"] == 0


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    run = Run(streamed(), PROMPT, 1, SAMPLING, tmp_path)
    list(run)
    before = (tmp_path / FILE).read_bytes()
    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")
    monkeypatch.setattr("k3_teach.scale.stream.run.save_file", half)
    with pytest.raises(k3.CheckpointError, match="no space left"):
        run.save(0, None)
    assert (tmp_path / FILE).read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("other, message", [
    (dict(seed=1), "a run with weights 'virtual, seed 0, pool in torch.float64'; this one has 'virtual, seed 1"), (dict(rms_norm_eps=1e-3), "config.rms_norm_eps 1e-05"),
    (dict(dtype=torch.float32), "a run with weights .*float64'; this one has .*float32"), (dict(num_hidden_layers=4, kda_layers=(1, 2, 3), full_attn_layers=(4,)), "a run with config.num_hidden_layers 5; this one has 4"),
    (dict(sampling=Sampling(temperature=0.5)), "a run with sampling.temperature 1.0; this one has 0.5")], ids=["seed", "config", "dtype", "layers", "sampling"])
def test_another_run_is_refused_by_name(tmp_path, other, message):
    stop_after(Run(streamed(), PROMPT, NEW, SAMPLING, tmp_path), 2)
    sampling = other.pop("sampling", SAMPLING)
    with pytest.raises(k3.CheckpointError, match=message):
        Run.resume(streamed(**other), tmp_path, NEW, sampling)


def test_files_that_are_no_run(tmp_path):
    bad = [b"", b"garbage" * 100, None]
    for i, content in enumerate(bad):
        folder = tmp_path / str(i)
        folder.mkdir()
        if content is None:
            save_file({"a": torch.zeros(1)}, folder / FILE)
        else:
            (folder / FILE).write_bytes(content)
        with pytest.raises(k3.CheckpointError, match="not the file of a streamed run"):
            Run.resume(streamed(), folder, NEW, SAMPLING)
    with pytest.raises(k3.CheckpointError, match="not the file of a streamed run"):
        Run.resume(streamed(), tmp_path / "nowhere", NEW, SAMPLING)


@pytest.mark.parametrize("alter", [
    lambda tensors, about: tensors.update({"cache.0.0": tensors["cache.0.0"] + 1e-12}), lambda tensors, about: tensors.update(mystery=torch.zeros(1)),
    lambda tensors, about: tensors.update({"stream.prefix": tensors["stream.prefix"].float()}), lambda tensors, about: tensors.pop("cache.3.0"),
    lambda tensors, about: about.update(run=about["run"].replace('"layer": 3', '"layer": 4'))], ids=["value", "extra", "dtype", "missing", "layer"])
def test_an_altered_file_is_refused(tmp_path, alter):
    """Most of these would go on, to other tokens."""
    stop_after(Run(streamed(), PROMPT, NEW, SAMPLING, tmp_path), 8)
    tensors = load_file(tmp_path / FILE)
    with safe_open(tmp_path / FILE, "pt") as f:
        about = f.metadata()
    alter(tensors, about)
    save_file(tensors, tmp_path / FILE, about)
    with pytest.raises(k3.CheckpointError, match="has been altered since it was written"):
        Run.resume(streamed(), tmp_path, NEW, SAMPLING)


def test_a_pass_that_is_taken_up_belongs_to_its_run(tmp_path):
    """Neither another pass of the model, nor an end before it, nor a second attempt changes what comes of it."""
    whole = Run(streamed(), PROMPT, NEW, SAMPLING)
    list(whole)
    stop_after(Run(streamed(), PROMPT, NEW, SAMPLING, tmp_path), 12)        # two layers into the first decoded token
    before = (tmp_path / FILE).read_bytes()
    model, ids = streamed(), torch.tensor([PROMPT])
    plain = model(ids)
    ended = Run.resume(model, tmp_path, 1, SAMPLING, every=0)
    assert torch.equal(model(ids), plain) and list(ended) == [] and (tmp_path / FILE).read_bytes() == before
    run = Run.resume(model, tmp_path, NEW, SAMPLING)
    assert stop_after(run, 1)
    run.asked_to_stop, run.after_layer, run.every = False, lambda layer: None, 0
    assert list(run) == whole.new[1:]
    for x, y in zip(run.cache.states, whole.cache.states):
        assert all(torch.equal(a, b) for a, b in zip(x.tensors(), y.tensors()))
    after = (tmp_path / FILE).read_bytes()
    assert torch.equal(model(ids), plain) and (tmp_path / FILE).read_bytes() == after


def test_an_error_loses_no_token(tmp_path, monkeypatch):
    whole, model = list(Run(streamed(), PROMPT, NEW, SAMPLING)), streamed()
    run = iter(Run(model, PROMPT, NEW, SAMPLING, tmp_path))
    first = [next(run), next(run)]
    model.ceiling = 10 ** 11
    monkeypatch.setattr("k3_teach.scale.stream.memory.resident", lambda: 10 ** 12)
    with pytest.raises(k3.InputError, match="after layer 0 the process holds"):
        next(run)
    eager = Run(model, PROMPT, NEW, SAMPLING, tmp_path / "eager", every=0)
    monkeypatch.setattr("k3_teach.scale.stream.memory.resident", lambda: 0 if len(model.clock.now.memory) < 2 else 10 ** 12)
    with pytest.raises(k3.InputError, match="after layer 2 the process holds"):
        next(iter(eager))
    monkeypatch.undo()
    assert Run.resume(streamed(), tmp_path / "eager", NEW, SAMPLING).under_way[0] == 2
    more = Run.resume(streamed(), tmp_path, NEW, SAMPLING)
    assert more.new == first == whole[:2] and list(more) == whole[2:]
    with pytest.raises(k3.InputError, match="new_tokens is 1; .* has 3 already"):
        Run.resume(streamed(), tmp_path, 1, SAMPLING)


@pytest.mark.parametrize("ids, new, message", [
    ([], 1, "ids"), ([256], 1, "from 0 to 255"), ([1], 4097, "at most 4096"), ([10 ** 30], 1, "ids is"), (5, 1, "ids is"), ([1], None, "new_tokens is None")])
def test_prompts_that_cannot_be(ids, new, message):
    with pytest.raises(k3.InputError, match=message):
        Run(streamed(), ids, new)


# --- the command line ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "config.json"
    k3.K3Config.toy().to_json(file)
    return str(file)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A small array tells the bandwidth of a cache, but as well that it is measured."""
    monkeypatch.setattr("k3_teach.scale.stream.__main__.read_bandwidth", lambda nbytes, device: read_bandwidth(1 << 16, device))


def printed(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("token")]


def test_the_command(tmp_path, config, capsys):
    options = ["--virtual", "--config", config, "--layers", "4", "--threads", "1", "--seed", "2", "--ids", "1,2,3"]
    assert main([*options, "--new-tokens", "3", "--report", str(tmp_path / "new" / "report.json")]) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert report["layers"] == 4 and len(report["new_tokens"]) == 3 and [p["tokens"] for p in report["passes"]] == [3, 1, 1]
    assert out.splitlines()[0] == "prompt 1 2 3" and f"token {report['new_tokens'][0]}" in out.splitlines()
    assert report["active_bytes"] == report["passes"][1]["bytes"] and "routed experts" in out and "median of 2 new tokens" in out
    assert report["bandwidth"] == max(report["bandwidths"]) > 1e6 and report["passes"][1]["floor_seconds"] == report["active_bytes"] / report["bandwidth"]
    # The same in two parts, the second with the rest of the tokens.
    assert main([*options, "--new-tokens", "1", "--save", str(tmp_path / "run")]) == 0
    assert main([*options[:-2], "--new-tokens", "3", "--resume", str(tmp_path / "run")]) == 0
    last = printed(capsys)[-2:]
    assert [line.split()[1] for line in last] == [str(t) for t in report["new_tokens"][1:]]


def test_the_command_on_a_folder(capsys):
    assert main([str(GOLDEN / "k3_official_format"), "--ids", "1,2", "--dtype", "float64", "--layers", "2"]) == 0
    assert len(printed(capsys)) == 1


def test_sigterm_stops_after_a_layer_and_saves(tmp_path, config):
    """A process of its own: long enough that the signal finds it at work."""
    command = [sys.executable, "-m", "k3_teach.scale.stream", "--virtual", "--config", config, "--threads", "1", "--prompt-tokens", "4", "--ceiling", "700MB"]
    p = subprocess.Popen([*command, "--new-tokens", "2000", "--save", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline().startswith("prompt") and p.stdout.readline().startswith("token")
        p.send_signal(signal.SIGTERM)
        out, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert p.returncode == 130 and f"stopped, saved in {tmp_path}; --resume goes on" in err
    assert [f.name for f in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("options, message", [
    ([], "give either a folder or --virtual"), (["nowhere", "--virtual"], "give either a folder or --virtual"), (["nowhere"], "there is no such file"),
    (["nowhere", "--config", "x"], "--config goes with --virtual"), (["--virtual", "--layers", "94"], "it must be from 1 to 93"), (["--virtual", "--layers", "0"], "it must be from 1 to 93"),
    (["--virtual", "--ids", "1", "--prompt-tokens", "2"], "either --ids or --prompt-tokens"), (["--virtual", "--ids", "1,x", "--layers", "1"], "it must be token ids: 1,2,3"),
    (["--virtual", "--prompt-tokens", "0"], "prompt_tokens is 0; it must be an integer from 1"), (["--virtual", "--new-tokens", "-1"], "new_tokens is -1"), (["--virtual", "--threads", "0"], "threads is 0"),
    (["--virtual", "--layers", "1", "--ceiling", "lots"], "the ceiling is 'lots'"), (["--virtual", "--layers", "1", "--ceiling", "1GB"], "the ceiling is 1.00 GB; this needs"),
    (["--virtual", "--layers", "1", "--ids", "163840"], "token ids must be from 0 to 163839"), (["--virtual", "--layers", "1", "--temperature", "-1"], "temperature is -1.0"),
    (["--virtual", "--device", "nonsense"], "device is 'nonsense'"), (["--virtual", "--layers", "1", "--resume", "nowhere"], "not the file of a streamed run"),
    (["--virtual", "--resume", "nowhere", "--ids", "1"], "a prompt goes with a new run"), (["--virtual", "--seed", "-1"], "seed is -1"), (["--virtual", "--config", "nowhere.json"], "there is no such file"),
    (["--virtual", "--layers", "1", "--ids", "9" * 30], "ids is [9"), (["--virtual", "--threads", str(10 ** 12)], "threads is 10"), (["--virtual", "--layers", "1", "--device", "meta"], "a device that holds numbers"),
    (["--virtual", "--layers", "1", "--ceiling", "9" * 400], "the ceiling is '9"), (["--virtual", "--every", "nan"], "every is nan"), (["--virtual", "--report", "."], "it must be a file"),
    (["--virtual", "--layers", "1", "--report", "/proc/nowhere/report.json"], "/proc/nowhere can't be written to"), (["--virtual", "--layers", "1", "--save", __file__], "can't be written to"),
])
def test_wrong_options_are_one_line(options, message, capsys):
    assert main(options) == 1
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ") and message in err and "\n" not in err
