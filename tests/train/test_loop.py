"""The loop: one step by hand, whole steps only, and a run that is the same however often it is stopped."""

import math
import os
import signal

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.parts.balance import QuantileHistogram, margins
from k3_teach.train import loop
from k3_teach.train.loop import Recipe, Trainer, interrupt_waits
from k3_teach.train.optimiser import learning_rate
from k3_teach.train.text import BPE, Bytes, Data, corpus


@pytest.fixture(scope="module")
def data():
    return Data(corpus()[:60_000], Bytes())


def small(seed=0, **changes):
    """Three layers: KDA and dense, KDA and MoE, MLA and MoE."""
    torch.manual_seed(seed)
    config = k3.K3Config.toy(num_hidden_layers=3, kda_layers=(1, 2), full_attn_layers=(3,), hidden_size=32,
                             attn_res_block_size=2, num_experts=8, num_experts_per_token=2, **changes)
    return k3.K3Model(config)


def recipe(**changes):
    return Recipe(**dict(steps=6, rows=4, length=16, lr=0.01) | changes)


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_one_step_is_that_of_torch_by_hand(data):
    """In float64, against torch.optim.AdamW and the gradient clipped by its definition."""
    model, other = small().double(), small().double()
    r = recipe(optimiser="adamw", clip=0.05, weight_decay=0.1)
    row = Trainer(model, data, r).train_step()
    ids = data.batch(0, 4, 16)
    other.train()
    loss = torch.nn.functional.cross_entropy(other(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    trained = {n: p for n, p in other.named_parameters() if p.grad is not None}
    length = math.sqrt(sum(float(p.grad.square().sum()) for p in trained.values()))
    for p in trained.values():
        p.grad *= 0.05 / length
    assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-12) and row["grad_norm"] == pytest.approx(length)
    flat = lambda n, p: p.ndim < 2 or "conv1d" in n or "res_proj" in n
    torch.optim.AdamW(
        [{"params": [p for n, p in trained.items() if not flat(n, p)], "weight_decay": 0.1},
         {"params": [p for n, p in trained.items() if flat(n, p)], "weight_decay": 0.0}],
        lr=learning_rate(0, 6, 0.01), betas=(0.9, 0.95)).step()
    mine = dict(model.named_parameters())
    for name, p in trained.items():
        assert_close(mine[name], p, rtol=1e-6, atol=1e-7), name


def test_the_loss_goes_down(data):
    for optimiser in ("muon", "adamw"):
        trainer = Trainer(small(), data, recipe(steps=40, rows=8, length=32, optimiser=optimiser))
        before = trainer.validation_loss()
        rows = list(trainer.run())
        assert before == pytest.approx(math.log(256), abs=0.1)
        assert trainer.validation_loss() < before - 1.2
        assert [row["step"] for row in rows] == list(range(1, 41))


def test_the_biases_follow_the_quantiles_of_the_step(data):
    model = small()
    trainer = Trainer(model, data, recipe())
    router = model.layers[1].block_sparse_moe.gate
    seen = []
    router.register_forward_hook(lambda m, a, out: seen.append(out[2].detach()))
    trainer.train_step()
    histogram = QuantileHistogram(torch.zeros(8), 1000)
    histogram.add(margins(seen[0], torch.zeros(8), 2))
    assert_close(router.e_score_correction_bias.detach(), histogram.new_bias(2))
    assert router.e_score_correction_bias.abs().max() > 0


@pytest.mark.parametrize("method", ["sign", "none"])
def test_other_balancers(data, method):
    model = small()
    row = Trainer(model, data, recipe(balance=method)).train_step()
    bias = model.layers[2].block_sparse_moe.gate.e_score_correction_bias
    step = 0.0 if method == "none" else 1e-3
    assert row["max_vio"] > 0
    assert all(abs(b) < 1e-9 or abs(abs(b) - step) < 1e-9 for b in bias.tolist())
    assert bool(bias.any()) == (method == "sign")


def test_qk_clip_bounds_the_logits_of_the_next_step(data):
    model = small()
    mla = model.layers[2].self_attn
    with torch.no_grad():
        mla.q_b_proj.weight *= 3000
    trainer = Trainer(model, data, recipe(qk_clip=1.0, lr=1e-12))
    trainer.run(1).__next__()
    seen = {}
    mla.register_forward_pre_hook(lambda m, a: seen.update(x=a[0]))
    model(data.batch(0, 4, 16))
    after = loop.largest_logits(mla, seen["x"])
    assert after.max() == pytest.approx(1.0, rel=1e-3)
    unclipped = small()
    with torch.no_grad():
        unclipped.layers[2].self_attn.q_b_proj.weight *= 3000
    before = weights(unclipped)["layers.2.self_attn.kv_b_proj.weight"]
    Trainer(unclipped, data, recipe(qk_clip=None, lr=1e-12)).train_step()
    assert_close(weights(unclipped)["layers.2.self_attn.kv_b_proj.weight"], before)


def test_validation_loss_is_the_mean_over_the_pieces(data):
    trainer = Trainer(small(), data, recipe())
    model, pieces = trainer.model.eval(), data.pieces(16)
    with torch.no_grad():
        direct = k3.next_token_loss(model(pieces), pieces)
    model.train()
    assert trainer.validation_loss() == pytest.approx(float(direct), rel=1e-5)
    assert not model.training and not trainer.balancer.tallies


def test_validations_come_when_they_are_due(data):
    rows = list(Trainer(small(), data, recipe(steps=5, validate_every=2)).run())
    asked = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in asked] == [2, 4, 5]
    assert asked[0]["nats_per_byte"] == asked[0]["validation_loss"] / data.bytes_per_token


# --- stopping and going on ------------------------------------------------------------

@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_a_resumed_run_gives_the_same_bits(tmp_path, data, optimiser):
    r = recipe(optimiser=optimiser)
    whole = Trainer(small(), data, r)
    losses = [row["loss"] for row in whole.run()]
    first = Trainer(small(), data, r, tmp_path)
    parts = [row["loss"] for row in first.run(2)]
    for _ in range(2):
        trainer = Trainer.resume(tmp_path, data)
        parts += [row["loss"] for row in trainer.run(2)]
    assert parts == losses and trainer.step == 6
    assert_same_bits(weights(trainer.model), weights(whole.model))
    assert list(trainer.run()) == []        # it is at its end


def test_the_folder_is_a_checkpoint_in_the_released_format(tmp_path, data):
    trainer = Trainer(small(), data, recipe(), tmp_path)
    list(trainer.run(3))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]
    assert (tmp_path / "step-000003").stat().st_mode & 0o777 == 0o755
    loaded = k3.load_checkpoint(tmp_path / "step-000003")
    assert_same_bits(weights(loaded), weights(trainer.model))


def test_closing_the_loop_saves_the_last_whole_step(tmp_path, data):
    trainer = Trainer(small(), data, recipe(), tmp_path)
    for row in trainer.run():       # the generator is closed when nothing holds it any more
        if row["step"] == 4:
            break
    assert Trainer.resume(tmp_path, data).step == 4


def test_ctrl_c_waits_for_the_end_of_a_step(tmp_path, data, monkeypatch):
    """Sent between the two optimisers, where half of the weights are new."""
    trainer, before = Trainer(small(), data, recipe(), tmp_path), signal.getsignal(signal.SIGINT)
    adamw = trainer.optimisers["adamw"]
    step = adamw.step
    monkeypatch.setattr(adamw, "step", lambda: (os.kill(os.getpid(), signal.SIGINT), step()))
    with pytest.raises(KeyboardInterrupt):
        list(trainer.run())
    assert trainer.step == 1 and signal.getsignal(signal.SIGINT) is before
    resumed = Trainer.resume(tmp_path, data)
    assert resumed.step == 1
    straight = Trainer(small(), data, recipe())
    next(straight.run())
    assert_same_bits(weights(resumed.model), weights(straight.model))


def test_an_interrupt_is_not_lost_when_the_block_fails():
    with pytest.raises(KeyboardInterrupt) as raised:
        with interrupt_waits():
            os.kill(os.getpid(), signal.SIGINT)
            1 / 0
    assert isinstance(raised.value.__context__, ZeroDivisionError)
    with interrupt_waits(then_raise=False) as asked:
        assert not asked
        os.kill(os.getpid(), signal.SIGINT)
    assert asked


def test_the_row_of_an_interrupted_step_is_not_lost(tmp_path, data, monkeypatch):
    trainer, rows = Trainer(small(), data, recipe(validate_every=2, save_every=2), tmp_path), []
    real = trainer.validation_loss
    monkeypatch.setattr(trainer, "validation_loss", lambda: os.kill(os.getpid(), signal.SIGINT) or real())
    with pytest.raises(KeyboardInterrupt):
        for row in trainer.run():
            rows.append(row)
    assert [row["step"] for row in rows] == [1, 2] and "validation_loss" in rows[1]
    resumed = Trainer.resume(tmp_path, data)
    assert [row["step"] for row in resumed.run()] == [3, 4, 5, 6]


def test_a_run_that_diverges_can_be_taken_up_with_a_smaller_rate(tmp_path, data):
    """The weights that gave NaN are not kept, and the message says what is."""
    trainer = Trainer(small(), data, recipe(steps=8, lr=0.01, save_every=1), tmp_path)
    list(trainer.run(3))
    trainer = Trainer.resume(tmp_path, data, lr=1e30)
    with pytest.raises(k3.TrainingError, match=r"the model is that of step \d; .* holds that of step \d[.] .*smaller lr than 1e.30"):
        list(trainer.run())
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert "step-000003" in kept and len(kept) <= 2
    for name in kept:
        if name != "step-000003":
            (tmp_path / name).rename(tmp_path / "away")
    resumed = Trainer.resume(tmp_path, data, lr=0.005)
    assert resumed.recipe.lr == 0.005 and [row["step"] for row in resumed.run()][0] == 4
    assert resumed.model.norm.weight.isfinite().all()


def test_an_error_in_the_middle_of_an_update_saves_nothing(tmp_path, data, monkeypatch):
    """When the weights are new and the biases are not."""
    trainer = Trainer(small(), data, recipe(save_every=2), tmp_path)
    real, calls = trainer.balancer.step, []
    monkeypatch.setattr(trainer.balancer, "step", lambda: calls.append(1) or (real() if len(calls) < 4 else 1 / 0))
    with pytest.raises(ZeroDivisionError):
        list(trainer.run())
    assert trainer.step == 3 and [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    straight = Trainer(small(), data, recipe())
    list(straight.run(2))
    assert_same_bits(weights(Trainer.resume(tmp_path, data).model), weights(straight.model))


def test_two_checkpoints_are_kept_and_no_leftovers(tmp_path, data):
    (tmp_path / ".saving-killed").mkdir()
    list(Trainer(small(), data, recipe(save_every=1), tmp_path).run())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000005", "step-000006"]
    before = (tmp_path / "step-000006").stat().st_ino
    list(Trainer.resume(tmp_path, data).run())          # at its end: nothing is written again
    assert (tmp_path / "step-000006").stat().st_ino == before


def test_checkpoints_that_are_due_without_a_folder(data):
    assert len(list(Trainer(small(), data, recipe(save_every=2)).run())) == 6


def test_remove_leaves_the_model_alone(data):
    model = small()
    trainer = Trainer(model, data, recipe())
    trainer.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nan_stops_before_anything_is_changed(tmp_path, data, monkeypatch):
    trainer = Trainer(small(), data, recipe(), tmp_path)
    list(trainer.run(2))
    before = weights(trainer.model)
    real = loop.next_token_loss
    monkeypatch.setattr(loop, "next_token_loss", lambda *a: real(*a) * math.nan)
    with pytest.raises(k3.TrainingError, match=r"step 3: the loss is nan .* the model is that of step 2; .* holds that of step 2[.] .*lr"):
        list(trainer.run())
    assert_same_bits(weights(trainer.model), before)
    assert all(p.grad is None for p in trainer.model.parameters())
    monkeypatch.undo()
    resumed = Trainer.resume(tmp_path, data)
    assert resumed.step == 2 and [row["step"] for row in resumed.run()] == [3, 4, 5, 6]


def test_a_router_that_meets_nan_stops_as_well(data):
    trainer = Trainer(small(), data, recipe(lr=1e30, warmup=0.0))
    with pytest.raises(k3.TrainingError, match=r"step \d: .*gate: router scores hold NaN.* the model is that of step"):
        list(trainer.run())
    assert not trainer.balancer.tallies and not trainer.seen


def test_weights_that_are_not_finite_are_never_saved(tmp_path, data):
    trainer = Trainer(small(), data, recipe(), tmp_path)
    list(trainer.run(1))
    with torch.no_grad():
        trainer.model.norm.weight[0] = math.inf
    with pytest.raises(k3.InputError, match="step 1 is not saved: norm.weight holds NaN or infinity"):
        trainer.save()
    assert Trainer.resume(tmp_path, data).model.norm.weight.isfinite().all()


def test_a_run_is_resumed_with_its_text(tmp_path, data):
    list(Trainer(small(), data, recipe(), tmp_path).run(1))
    for other in (Data(corpus()[:60_000], Bytes(), seed=1), Data(corpus()[:70_000], Bytes())):
        with pytest.raises(k3.InputError, match="trained on another text"):
            Trainer.resume(tmp_path, other)


def test_a_folder_without_a_run(tmp_path, data):
    with pytest.raises(k3.CheckpointError, match="holds no checkpoint of a run"):
        Trainer.resume(tmp_path, data)
    list(Trainer(small(), data, recipe(), tmp_path).run(1))
    (tmp_path / "step-000001" / "training.json").write_text("{}")
    with pytest.raises(k3.CheckpointError, match="must be JSON with step, recipe and text"):
        Trainer.resume(tmp_path, data)


def test_a_checkpoint_with_a_foreign_optimiser(tmp_path, data):
    list(Trainer(small(), data, recipe(), tmp_path).run(1))
    file = tmp_path / "step-000001" / "optimiser.safetensors"
    about = tmp_path / "step-000001" / "training.json"
    about.write_text(about.read_text().replace('"muon"', '"adamw"'))
    with pytest.raises(k3.CheckpointError, match="muon:momentum_buffer:.* belongs to no optimiser"):
        Trainer.resume(tmp_path, data)
    file.write_bytes(b"no")
    with pytest.raises(k3.CheckpointError, match="not a readable safetensors file"):
        Trainer.resume(tmp_path, data)


def test_only_a_k3_is_kept_in_a_folder(tmp_path, data):
    model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
    trainer = Trainer(model, data, recipe())
    assert trainer.train_step()["max_vio"] == 0.0           # any model that maps ids to logits
    with pytest.raises(k3.InputError, match="a Sequential has no released format"):
        Trainer(model, data, recipe(), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(k3.InputError, match="file is a file; a run needs a folder"):
        Trainer(small(), data, recipe(), tmp_path / "file")


def test_a_text_that_is_shorter_than_a_piece():
    data = Data(corpus()[:8_001], Bytes())
    with pytest.raises(k3.InputError, match="length is 9000; it must be from 2 to"):
        Trainer(small(), data, recipe(length=9000))
    with pytest.raises(k3.InputError, match="length is"):
        Trainer(small(), data, recipe(length=len(data.validation) + 1, validate_every=1))


# --- what cannot be meant -------------------------------------------------------------

@pytest.mark.parametrize("field, value, allowed", [
    ("steps", 0, "an integer of at least 1"), ("rows", 1.5, "an integer"), ("length", 1, "at least 2"),
    ("steps", True, "an integer"), ("seed", -1, "at least 0"), ("lr", 0, "above 0"), ("lr", math.nan, "above 0"),
    ("clip", math.inf, "finite"), ("qk_clip", -1.0, "above 0"), ("qk_clip", 0, "above 0"), ("lr", "x", "above 0"), ("warmup", 1.1, "from 0 to 1"),
    ("weight_decay", -0.1, "from 0 to 1")])
def test_a_recipe_that_describes_no_run(field, value, allowed):
    with pytest.raises(k3.InputError, match=f"{field} is .*must be {allowed}|{field} is .*{allowed}"):
        recipe(**{field: value})


def test_a_tokenizer_that_the_model_does_not_know():
    text = corpus()[:60_000]
    data = Data(text, BPE.train(text, 300))
    with pytest.raises(k3.InputError, match="the tokenizer has 300 tokens; the model knows 256"):
        Trainer(small(), data, recipe())


def test_unknown_methods(data):
    with pytest.raises(k3.InputError, match="method is 'even'"):
        Trainer(small(), data, recipe(balance="even"))
    with pytest.raises(k3.InputError, match="optimiser is 'adam'"):
        Trainer(small(), data, recipe(optimiser="adam"))


def test_autocast_trains_about_as_well(data):
    plain = Trainer(small(), data, recipe(steps=20, rows=8))
    mixed = Trainer(small(), data, recipe(steps=20, rows=8, autocast=True))
    a, b = ([row["loss"] for row in t.run()] for t in (plain, mixed))
    assert a != b and b[-1] == pytest.approx(a[-1], abs=0.1) and b[-1] < b[0] - 1
    assert all(p.dtype == torch.float32 for p in mixed.model.parameters())
