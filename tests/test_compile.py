"""torch.compile: a layer is one graph, in training and in decoding, and computes what it computes without."""

import shutil

import pytest
import torch
from torch.testing import assert_close

import k3_teach as k3
from k3_teach.model import DecoderLayer
from k3_teach.parts.attn_res import BlockStream
from tests.helpers import randomize, tokens, toy

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05}
KINDS = {"KDA, dense": (0, "kda"), "KDA, experts": (1, "kda"), "MLA, dense": (0, "mla"), "MLA, experts": (1, "mla")}
TWO_LAYERS = dict(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,), attn_res_block_size=1)


@pytest.fixture(autouse=True)
def fresh():
    """A compiler that remembers no earlier test: it gives up after eight versions of a function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layer(kind, dtype):
    number, mixer = KINDS[kind]
    kda, mla = ((1, 2), ()) if mixer == "kda" else ((), (1, 2))
    config = k3.K3Config.toy(num_hidden_layers=2, kda_layers=kda, full_attn_layers=mla)
    torch.manual_seed(0)
    return randomize(DecoderLayer(config, number), scale=0.1).to(dtype)


def outputs(layer, x, other):
    """A layer reads from a stream with a sealed source and a live sum."""
    stream = BlockStream(x)
    stream.seal()
    stream.add(other)
    layer(stream)
    return stream.prefix


def training_step(run, layer, x):
    layer.zero_grad()
    y = run(layer, x, x.flip(1))
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_graph(kind, dtype):
    """fullgraph=True raises at a break. In float32 the backward pass is traced, too; no machine code is made."""
    layer, x = make_layer(kind, dtype), torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    backend = "aot_eager" if dtype == torch.float32 else "eager"
    compiled = torch.compile(outputs, backend=backend, fullgraph=True)
    for ours, expected in zip(training_step(compiled, layer, x), training_step(outputs, layer, x), strict=True):
        assert_close(ours, expected, atol=TOLERANCE[dtype] * expected.abs().max().item(), rtol=0)


def test_training_step_of_a_model():
    model, ids = toy(dtype=torch.float32, **TWO_LAYERS), tokens(2, 20)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = []
    for logits in (run(ids), model(ids)):
        model.zero_grad()
        k3.next_token_loss(logits, ids).backward()
        losses.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for ours, expected in zip(*losses, strict=True):
        assert_close(ours, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


def test_decoding():
    """A prompt, then token by token: from the third call on nothing is compiled again, however long the cache is."""
    model, ids = toy(dtype=torch.float32, **TWO_LAYERS), tokens(1, 12)
    run, expected, cache = torch.compile(model, backend="eager", fullgraph=True), model(ids), model.new_cache()
    for start, end in ((0, 8), (8, 9), (9, 10)):
        assert_close(run(ids[:, start:end], cache=cache), expected[:, start:end], atol=1e-4, rtol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        for i in (10, 11):
            assert_close(run(ids[:, i:i + 1], cache=cache), expected[:, i:i + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_machine_code():
    """The default backend, which writes C++ and needs a compiler for it."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler (g++ or clang++), which torch.compile needs for its code on a CPU")
    layer, x = make_layer("KDA, experts", torch.float32), torch.randn(2, 40, 64)
    compiled = torch.compile(outputs, fullgraph=True)
    for ours, expected in zip(training_step(compiled, layer, x), training_step(outputs, layer, x), strict=True):
        assert_close(ours, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
