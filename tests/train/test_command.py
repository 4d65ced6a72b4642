"""`python -m k3_teach.train`: a run, its log, going on, two processes, and what it refuses."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

import k3_teach as k3
from k3_teach.train.__main__ import keep_rows, main
from k3_teach.train.text import Bytes, Data, corpus

SMALL = ["--rows", "4", "--length", "16", "--threads", "1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "manual.txt"
    file.write_text(corpus()[:40_000], encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "config.json"
    k3.K3Config.toy(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,), hidden_size=32,
                    vocab_size=300).to_json(file)
    return str(file)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_that_is_stopped_and_resumed_and_shipped(tmp_path, text, config, capfd):
    options = [*SMALL, "--text", text, "--bpe", "300", "--config", config, "--validate-every", "2"]
    whole, parts, ship = tmp_path / "whole", tmp_path / "parts", tmp_path / "ship"
    assert main([str(whole), *options, "--steps", "4", "--ship", str(ship)]) == 0
    assert "validation loss" in capfd.readouterr().err
    rows = rows_of(whole)
    assert [r["step"] for r in rows] == [1, 2, 3, 4] and "validation_loss" in rows[3]
    assert {"loss", "lr", "grad_norm", "max_vio", "seconds"} <= rows[0].keys()
    model = k3.load_checkpoint(ship)
    assert model.embed_tokens.weight.dtype == torch.bfloat16 and (ship / "tokenizer.json").exists()
    assert rows_of(ship) == rows
    assert json.loads((ship / "config.json").read_text())["text_config"]["vocab_size"] == 300
    # The same run, stopped after two steps.
    from k3_teach.train import __main__ as command
    args = command.parser().parse_args([str(parts), *options, "--steps", "4"])
    trainer = command.make_trainer(args, command.read_data(args))
    list(trainer.run(2))
    assert main([str(parts), "--resume", "--text", text]) == 0
    a, b = (k3.load_checkpoint(f / "step-000004").state_dict() for f in (whole, parts))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_resumed_run_can_be_made_longer(tmp_path, text, config):
    options = [str(tmp_path), *SMALL, "--text", text, "--config", config]
    assert main([*options, "--steps", "2"]) == 0
    assert main([str(tmp_path), "--resume", "--text", text, "--steps", "3", "--lr", "0.001"]) == 0
    assert [r["step"] for r in rows_of(tmp_path)] == [1, 2, 3] and rows_of(tmp_path)[2]["lr"] < 0.001 + 1e-9


def test_what_is_said_when_nothing_could_be_saved(tmp_path, text, monkeypatch, capsys):
    from k3_teach.train import __main__ as command
    def interrupted(args):
        raise KeyboardInterrupt
    monkeypatch.setattr(command, "read_data", interrupted)
    assert main([str(tmp_path), "--text", text, "--steps", "2"]) == 130
    assert "stopped, nothing to save" in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_is_as_gentle_as_ctrl_c(tmp_path, text, config):
    run = subprocess.Popen([sys.executable, "-m", "k3_teach.train", str(tmp_path), *SMALL, "--text", text,
                            "--config", config, "--steps", "100000"], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "log.jsonl"
    while run.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.1)
    run.terminate()
    said = run.communicate()[1]
    assert run.returncode == 130 and "--resume goes on" in said
    kept = max(p.name for p in tmp_path.glob("step-*"))
    assert rows_of(tmp_path)[-1]["step"] == int(kept[5:])


def test_bytes_in_a_folder_that_had_another_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    Bytes().save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_log_never_has_more_than_the_checkpoint(tmp_path):
    log = tmp_path / "new" / "log.jsonl"
    keep_rows(log, 3)
    log.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(1, 6)))
    log.write_text(log.read_text() + '{"step": ')       # the disk was full
    keep_rows(log, 3)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("options, says", [
    (["--steps", "0"], "steps is 0; it must be an integer of at least 1"),
    ([], "--steps is needed for a new run"),
    (["--resume"], "holds no checkpoint of a run"),
    (["--steps", "2", "--text", "/no/such/file"], "not a text to learn from"),
    (["--steps", "2", "--config", "/no/such/file.json"], "file.json"),
    (["--steps", "2", "--bpe", "7"], "vocab_size is 7"),
    (["--steps", "2", "--threads", "0"], "--threads is 0; it must be at least 1"),
    (["--steps", "2", "--tokenizer", "/no/such"], "has no tokenizer.json"),
    (["--resume", "--bpe", "300"], "--bpe goes with a new run"),
    (["--steps", "2", "--ship", __file__], "is a file; it must be a folder"),
    (["--steps", "2", "--device", "abacus"], "--device is 'abacus'"),
])
def test_one_line_for_what_cannot_be_meant(tmp_path, text, options, says, capsys):
    base = [] if "--text" in options else ["--text", text]
    assert main([str(tmp_path / "run"), *base, *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_a_folder_with_a_run_is_not_overwritten(tmp_path, text, config, capsys):
    (tmp_path / "step-000001").mkdir()
    assert main([str(tmp_path), "--text", text, "--steps", "2"]) == 1
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path, text, config):
    options = ["-m", "k3_teach.train", *SMALL, "--text", text, "--config", config, "--steps", "3"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for start, name in ((torchrun, "two"), ([sys.executable], "one")):
        done = subprocess.run([*start, *options, str(tmp_path / name)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["max_vio"] == pytest.approx(b["max_vio"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    a, b = (k3.load_checkpoint(tmp_path / f / "step-000003").state_dict() for f in ("one", "two"))
    assert all(torch.allclose(a[n], b[n], atol=1e-3) for n in a)


def test_rows_that_the_processes_cannot_share(tmp_path, text, monkeypatch):
    from k3_teach.train import loop
    monkeypatch.setattr(loop, "_processes", lambda: (0, 3))
    data = Data(corpus(text), Bytes())
    with pytest.raises(k3.InputError, match="rows is 4; it must be a multiple of the 3 processes"):
        loop.Trainer(k3.K3Model(k3.K3Config.toy()), data, loop.Recipe(steps=1, rows=4))
