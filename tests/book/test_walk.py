"""One token's way through a model: what it shows is what the trace of a run holds."""

import pytest
import torch

import k3_teach as k3
from k3_teach.notebook.model_map import KINDS, column, depth_sources, feed_forward, mixer
from k3_teach.notebook.walk import live_walk, rms, walk

from .test_model_map import BARE, K3, TOY, thin, words


@pytest.fixture(scope="module", params=["k3", "toy"])
def run(request):
    c = {"k3": thin(K3), "toy": TOY}[request.param]
    torch.manual_seed(0)
    model, ids = k3.K3Model(c, dtype=torch.float64, init="released"), torch.tensor([[1, 2, 3, 30]])
    with torch.no_grad():
        return c, ids, *model(ids, return_trace=True)


def test_walk_is_what_the_trace_says(run):
    c, _, _, trace = run
    steps, L = walk(c, trace), c.num_hidden_layers
    assert [(s.layer, s.kind) for s in steps] == [(i, kind(c, i)) for i in range(L) for kind in (mixer, feed_forward)]
    size = c.attn_res_block_size
    assert [s.layer for s in steps if s.seals] == list(range(0, L, size))
    for i in range(L):
        first, second = steps[2 * i : 2 * i + 2]
        assert (len(first.weights), len(second.weights)) == depth_sources(c, i)
        for step in (first, second):
            assert sum(step.weights.values()) == pytest.approx(1)
            assert list(step.sizes) == [*(f"b{n}" for n in range(i // size + 1)), "live"]
        assert second.sizes["live"] == pytest.approx(rms(trace[f"L{i}.prefix"][0, -1]), rel=1e-9)
        assert second.added == rms(trace[f"L{i}.mlp_out"][0, -1]) and first.added == rms(trace[f"L{i}.attn_out"][0, -1])
        for n in range(1, i // size + 1):       # sealed when its block was done, and never changed
            assert second.sizes[f"b{n}"] == pytest.approx(rms(trace[f"L{n * size - 1}.prefix"][0, -1]), rel=1e-9)


def test_live_walk_has_a_stop_for_every_sub_layer(run):
    c, ids, logits, trace = run
    figure, L = live_walk(c, ids, logits, trace, start=3), c.num_hidden_layers
    names = figure.controls["at"]
    assert len(names) == 2 * L + 4 and names[:3] == ["ids", "embed", "layer 0, KDA"] and names[-1] == "head"
    assert figure.frame(at="ids").says == "4 token ids; the last one is 30."
    assert " It seals the embedding as b0. " in figure.frame(at="layer 0, KDA").says
    border = figure.frame(at=f"layer {c.attn_res_block_size}, KDA").says
    assert " It seals the live sum as b1. " in border and "seals" not in figure.frame(at="layer 1, KDA").says
    drawn = [list(words(figure.frame(at=name).marks)) for name in ("embed", "layer 0, KDA", "last read")]
    assert ["added" in texts for texts in drawn] == [False, True, False] and drawn[1].count("live") == 1
    assert figure.frame(at="last read").says.count(",") == trace["output_read"].shape[-1] - 1
    assert f"likeliest are {logits[0, -1].argmax()} with" in figure.frame(at="head").says
    # Pointing at the upper and lower half of a step's place chooses it.
    left, _, right, _ = figure.pick["at"]
    for i in range(L):
        for half in (0, 1):
            x = column(c, i + 0.25 + half / 2)
            assert int(len(names) * (x - left) / (right - left)) == 2 + 2 * i + half


def test_colours_of_the_walk_are_those_of_the_map(run):
    c, ids, logits, trace = run
    figure = live_walk(c, ids, logits, trace)
    for i in (0, 3):
        for kind in (mixer(c, i), feed_forward(c, i)):
            drawn = [m[5] for m in figure.frame(at=f"layer {i}, {kind}").marks if m[0] == "rect"]
            assert drawn == [*["pink"] * drawn.count("pink"), *["ink"] * drawn.count("ink"), "strong", KINDS[kind][0]]


def test_a_walk_needs_depth_reads():
    with pytest.raises(ValueError, match="attn_res_block_size is None"):
        walk(BARE, {})
