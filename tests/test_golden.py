"""Our model against what the released model computed (tests/golden), in float64."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import k3_teach as k3
from tests.helpers import GOLDEN

FOLDERS = ["k3_tiny", "k3_odd", "k3_official_format", "kimi_linear_tiny"]
EXPERT_TRACES = ("topk_idx", "topk_w", "latent")


@pytest.fixture(scope="module", params=FOLDERS)
def case(request):
    folder = GOLDEN / request.param
    return k3.load_checkpoint(folder, dtype=torch.float64), load_file(folder / "io.safetensors")


def close(actual, expected, atol=1e-9):
    assert_close(actual, expected, atol=atol, rtol=0)


def test_logits_and_every_trace(case):
    model, io = case
    logits, trace = model(io["input_ids"], return_trace=True)
    close(logits, io["logits"])
    names = [n.removeprefix("trace.") for n in io if n.startswith("trace.")]
    assert len(names) > 5 * len(model.layers)
    for name in names:
        if name.endswith(EXPERT_TRACES) or (name.endswith("nblocks") and model.config.attn_res_block_size is None):
            continue                                  # a plain residual has no blocks; the file holds the width there
        expected = io[f"trace.{name}"]
        actual = trace[name].detach().to(expected.dtype)
        close(actual[0] if actual.ndim > expected.ndim else actual, expected)   # Kimi Linear: row 0 of the live sum


def test_routing(case):
    """The chosen experts as sets with their weights, and the sum over experts before the latent norm."""
    model, io = case
    _, trace = model(io["input_ids"], return_trace=True)
    layers = [n for n in io if n.endswith(".topk_idx")]
    assert layers
    for name in layers:
        ours, layer = name.removeprefix("trace."), name.removesuffix("topk_idx")
        n = model.layers[1].block_sparse_moe.gate.weight.shape[0]
        dense = lambda idx, w: torch.zeros(len(idx), n, dtype=torch.float64).scatter(1, idx, w)
        close(dense(trace[ours], trace[ours.replace("idx", "w")].detach()), dense(io[name], io[layer + "topk_w"]))
        if layer + "latent" in io:
            close(trace[ours.replace("topk_idx", "latent")].detach(), io[layer + "latent"])


def test_padding_and_the_step_after_it(case):
    model, io = case
    mask = io["padded.attention_mask"]
    cache = model.new_cache(len(mask))
    logits = model(io["padded.input_ids"], attention_mask=mask, cache=cache)
    close(logits[mask.bool()], io["padded.logits"][mask.bool()])
    close(model(io["padded.next_ids"], cache=cache), io["padded.next_logits"])


def test_loss_and_gradients(case):
    model, io = case
    loss = k3.next_token_loss(model(io["input_ids"]), io["input_ids"])
    if "loss" not in io:
        pytest.skip("this case has no gradients")
    close(loss.detach(), io["loss"])
    loss.backward()
    places = k3.checkpoint.released_names(model)
    grads = {n.removeprefix("grad."): g for n, g in io.items() if n.startswith("grad.")}
    assert len(grads) > 100
    for name, expected in grads.items():
        p, e = places[name]
        actual = (p.grad if e is None else p.grad[e]).float()
        assert_close(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=0, msg=lambda m: f"{name}: {m}")


def test_float32_agrees_to_its_own_precision(case):
    """Nothing is computed in less than float32. (The median: a near-tie of the router may send a token elsewhere.)"""
    model, io = case
    logits = copy.deepcopy(model).float()(io["input_ids"]).double()
    assert (logits - io["logits"]).abs().median() < 2e-5
