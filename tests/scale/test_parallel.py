"""Many processes compute what one does. Expected values come from K3Model and Trainer in this process; what the
others do with them stands in parallel_worker.py. Two launches, since each process takes seconds to start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import k3_teach as k3
from k3_teach.model import next_token_loss
from k3_teach.scale import cost
from k3_teach.scale.parallel import __main__ as command
from k3_teach.scale.parallel import make_mesh, recompute
from k3_teach.train.loop import Trainer
from k3_teach.train.recipe import Recipe
from k3_teach.train.text import Bytes, Data, corpus
from tests.helpers import tokens, toy
from tests.scale.parallel_worker import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")]
WORKER = Path(__file__).with_name("parallel_worker.py")
SMALL = dict(num_hidden_layers=3, kda_layers=(1, 2), full_attn_layers=(3,), attn_res_block_size=2, num_experts=8,
             num_experts_per_token=2, hidden_size=32, intermediate_size=64)
OTHER = SMALL | dict(tie_word_embeddings=True, attn_res_block_size=None, routed_expert_hidden_size=None, q_lora_rank=None,
                     pad_token_id=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What one process computes: logits, loss, gradients, and parameters after two steps."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "text.txt").write_text(corpus()[:40_000], encoding="utf-8")
    for case, changes in (("small", SMALL), ("other", OTHER)):
        model, ids = toy(**changes).train(), tokens(8, 20)
        k3.save_checkpoint(model, folder / case)
        logits = model(ids)
        loss = next_token_loss(logits, ids)
        loss.backward()
        out = {"ids": ids, "logits": logits.detach(), "loss": loss.detach()}
        out |= {f"grad:{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        rows = list(Trainer(model, Data(corpus(folder / "text.txt"), Bytes()), Recipe(**RECIPE)).run())
        out |= {f"rows:{k}": torch.tensor([r[k] for r in rows], dtype=torch.float64) for k in ("loss", "grad_norm", "max_vio")}
        out |= {f"after:{n}": p.detach().clone() for n, p in model.named_parameters()}
        save_file(out, folder / f"{case}.safetensors")
    (folder / "six").mkdir()
    k3.K3Config.from_json(folder / "small").replace(num_experts=6).to_json(folder / "six" / "config.json")
    k3.save_checkpoint(toy(**SMALL, dtype=torch.bfloat16), folder / "released", released_layout=True, mxfp4_experts=True)
    with torch.no_grad():
        logits, half = (k3.load_checkpoint(folder / "released", dtype)(ids) for dtype in (torch.float64, torch.bfloat16))
    save_file({"ids": ids, "logits": logits, "half": half.double()}, folder / "released.safetensors")
    return folder


def launch(processes, what, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               str(WORKER), what, str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def errors(done):
    return re.findall(r"^error: (.*)$", done.stderr, re.MULTILINE)


@pytest.fixture(scope="module")
def four(folder):
    return launch(4, "four", folder)


def test_four_processes_and_one_that_is_killed(folder, four):
    said = errors(four)
    assert "AssertionError" not in four.stderr, four.stderr[-3000:]
    assert said == [f"worker 1 of 4 was lost in step 3; {folder / 'killed'} holds step 2: start again with --resume"]
    assert four.returncode != 0 and re.findall(r"^step (\d+)", four.stdout, re.MULTILINE) == ["1", "2"]
    # What the four have written is the model that one has trained.
    one, model = load_file(folder / "small.safetensors"), k3.load_checkpoint(folder / "exported")
    assert len(list((folder / "exported").glob("model-*.safetensors"))) > 4
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), one[f"after:{name}"], rtol=0, atol=1e-9)


def test_two_processes_go_on_and_refuse(folder, four):
    two = launch(2, "two", folder)
    assert two.returncode == 0, two.stderr[-3000:]
    said = errors(two)
    wanted = ["dp is 3 and ep is 1; their product must be the number of processes, 2", "dp is 2 and ep is 0",
              "num_experts is 7; it must be a multiple of ep, 2", "holds no checkpoint of a run",
              "holds no model.safetensors.index.json", "text.txt is a file", "rows is 3; it must be a multiple of the 2",
              "--steps is needed for a new run", "--config goes with a new run", "--timeout is 0.0",
              "has no bytes; it must have", "does not hold this model"]
    assert len(said) == len(wanted) and all(w in s for w, s in zip(wanted, said)), said
    # Initial weights do not depend on the number of processes.
    a, b = (k3.load_checkpoint(folder / f"filled-{n}").state_dict() for n in (2, 4))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert a["layers.1.block_sparse_moe.experts.w1"].std() == pytest.approx(0.02, rel=0.05)


def kept_of_a_token(width):
    """Bytes that a model of 12 layers keeps of a token for its gradient, with --autocast and --recompute."""
    model, kept = toy(num_hidden_layers=12, kda_layers=(1, 2, 3, 5, 6, 7, 9, 10, 11), full_attn_layers=(4, 8, 12),
                      attn_res_block_size=12, hidden_size=width, dtype=torch.float32).train(), {}
    recompute(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    def keep(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        model(tokens(1, 64))
    return sum(x.untyped_storage().nbytes() for x in kept.values()) / 64


def test_the_line_for_nodes_of_eight_fits_into_their_memory():
    line = re.search(r"--nnodes (\d+) --nproc-per-node 8 .*?k3_teach.scale.parallel (.*?)\n\n", command.__doc__, re.DOTALL)
    args, ranks, c = command.parser().parse_args(line[2].replace("\\", "").split()), 8 * int(line[1]), k3.K3Config.k3()
    assert args.rows % ranks == 0 == ranks % args.ep
    state = cost.training_bytes(c, 4, 4, 0, 4)["total"] / ranks + 2 * cost.gathered_bytes(c, ranks // args.ep, args.ep, 4)
    each = (kept_of_a_token(128) - kept_of_a_token(64)) / 64        # bytes, for 12 layers and each unit of width
    activations = args.rows // ranks * args.length * each * c.hidden_size * c.num_hidden_layers / 12
    assert (round(state / 1e9), round(activations / 1e9)) == (84, 29) and args.recompute and state + activations < 141e9


def test_it_says_how_it_is_started(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert command.main(["--folder", "nowhere"]) == 1
    assert "started without torchrun" in capsys.readouterr().err
    with pytest.raises(k3.InputError, match="there is no process group; start with torchrun"):
        make_mesh(1, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(k3.InputError, match="--device is cuda; torch finds no such device"):
        command.check(command.parser().parse_args("--folder nowhere --steps 1 --device cuda".split()))
