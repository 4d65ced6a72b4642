"""The map of the model: what it says is what a model of the same configuration does, and its links lead to chapters."""

import re

import pytest
import torch

import k3_teach as k3
from k3_teach.notebook import here, live_map
from k3_teach.notebook.draw import WIDTH
from k3_teach.notebook.model_map import (
    CHAPTERS,
    KINDS,
    PICK,
    WHOLE,
    column,
    depth_sources,
    feed_forward,
    mixer,
    model_map,
    says,
    strip,
)
from k3_teach.notebook.walk import live_walk, rms, walk

from .browser import open_page, screen

K3 = k3.K3Config.k3()
TOY = k3.K3Config.toy()
BARE = TOY.replace(attn_res_block_size=None, routed_expert_hidden_size=None, latent_moe_use_norm=False,
                   num_shared_experts=0, mla_use_output_gate=False, mla_use_nope=False)
DENSE = TOY.replace(num_experts=0)
# Every chapter of the book, built or to come.
PLANNED = """00_map 01_layer 02_moe 03_attn_res 04_situ 05_latent_moe 06_balancing 07_attention_cache
    08_kda_hybrid 09_rope_nope 10_cost 11_design 12_sources 13_gated_mla 14_assemble 15_train 16_generate
    17_full_scale 18_porting""".split()
configurations = pytest.mark.parametrize("c", [K3, TOY, BARE, DENSE], ids=["k3", "toy", "bare", "dense"])


def thin(c, d=16):
    """The same layers, thin enough for a test."""
    return c.replace(
        vocab_size=32, hidden_size=d, intermediate_size=d, num_heads=2, head_dim=8, num_attention_heads=2,
        num_key_value_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        q_lora_rank=8, num_experts=4, num_experts_per_token=2, moe_intermediate_size=8,
        routed_expert_hidden_size=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        quantization_config=None)


def words(marks):
    """All texts of a drawing, those inside links too."""
    for kind, *v in marks:
        if kind == "text":
            yield v[2]
        elif kind == "link":
            yield from words(v[2])


def links(marks):
    return {mark[1]: mark[2] for mark in marks if mark[0] == "link"}


# ---- the map says what the model does ----------------------------------------------------------------


def test_a_run_through_93_layers_reads_what_the_map_says():
    torch.manual_seed(0)
    model = k3.K3Model(thin(K3))
    with torch.no_grad():
        _, trace = model(torch.tensor([[1, 2, 3]]), return_trace=True)
    assert len(model.layers) == 93
    for i, layer in enumerate(model.layers):
        reads = tuple(trace[f"L{i}.{name}_read"].shape[-1] for name in ("attn", "mlp"))
        assert reads == depth_sources(K3, i), i
        assert type(layer.self_attn).__name__ == mixer(K3, i), i
        assert {"LatentMoE": "MoE", "GatedMLP": "dense"}[type(layer.ffn).__name__] == feed_forward(K3, i), i
    assert trace["output_read"].shape[-1] == 9


@pytest.mark.parametrize("block, layers", [(4, 9), (2, 9), (1, 5), (9, 9), (20, 9), (None, 9)])
def test_sources_with_other_blocks(block, layers):
    c = TOY.replace(attn_res_block_size=block, num_hidden_layers=layers, kda_layers=tuple(range(1, layers + 1)),
                    full_attn_layers=())
    with torch.no_grad():
        _, trace = k3.K3Model(c)(torch.tensor([[1, 2]]), return_trace=True)
    for i in range(layers):
        found = tuple(trace[f"L{i}.{name}_read"].shape[-1] if block else 1 for name in ("attn", "mlp"))
        assert found == depth_sources(c, i), i


def test_k3_in_numbers():
    layers = range(K3.num_hidden_layers)
    kinds = [(mixer(K3, i), feed_forward(K3, i)) for i in layers]
    assert [sum(kind in both for both in kinds) for kind in KINDS] == [69, 24, 92, 1]
    assert [i for i in layers if kinds[i][0] == "MLA"] == [*range(3, 92, 4), 92] and kinds[0] == ("KDA", "dense")
    assert [depth_sources(K3, i) for i in (0, 1, 12, 13, 84, 92)] == [(1, 2), (2, 2), (2, 3), (3, 3), (8, 9), (9, 9)]


def test_a_layer_in_words():
    assert says(K3, 0) == ("Layer 0, in block 1: KDA, then a dense feed-forward. Its depth reads have 1 source and 2. "
                           "Between its two reads the embedding is sealed.")
    assert says(K3, 92) == ("Layer 92, in block 8: MLA, then a mixture of 896 experts, 16 for each token. "
                            "Its depth reads have 9 sources and 9.")
    assert says(K3, 84).endswith("Between its two reads block 7 is sealed.")
    assert says(BARE, 1) == "Layer 1: KDA, then a mixture of 16 experts, 4 for each token."


# ---- the large map -----------------------------------------------------------------------------------


@configurations
def test_every_layer_is_a_column_of_its_kinds(c):
    drawn = {mark[2]: mark[1].count("M") for mark in strip(c, 0, 20) if mark[0] == "path" and mark[3] > 1}
    kinds = [kind for i in range(c.num_hidden_layers) for kind in (mixer(c, i), feed_forward(c, i))]
    assert drawn == {KINDS[kind][0]: kinds.count(kind) for kind in set(kinds)}


@configurations
def test_live_map_has_a_stop_for_every_layer(c):
    figure = live_map(c, start=1)
    assert figure.controls == {"layer": list(range(c.num_hidden_layers))} and figure.start == {"layer": 1}
    for i in range(c.num_hidden_layers):
        assert figure.frame(layer=i).says == says(c, i)
        # Pointing at the middle of a column chooses its layer.
        (left, _, right, _), middle = PICK, (column(c, i) + column(c, i + 1)) / 2
        assert int(c.num_hidden_layers * (middle - left) / (right - left)) == i
    heights = {figure.frame(layer=i).height for i in range(c.num_hidden_layers)}
    assert len(heights) == 1        # the page does not jump


def test_the_opened_layer_has_its_parts():
    first, border, last = ([str(w) for w in words(model_map(K3, i).marks)] for i in (0, 84, 92))
    assert {"KDA", "dense, 33792 wide", "seal"} <= {*first} and "router" not in first
    assert first.count("embedding") == 2 and first.count("live sum") == 1
    assert border.count("live sum") == 2 and "the sum is block 7" in border and border.count("block 7") == 2
    assert {"latent 576", "NoPE", "MLA", "16 of 896 experts", "896", "3584", "7168"} <= {*last} and "seal" not in last
    assert last.count("embedding") == 2 and last.count("live sum") == 2


def test_a_plain_residual_has_no_depth_read_and_bare_parts_are_left_out():
    shown = [str(w) for w in words(model_map(BARE, 3).marks)]
    assert shown.count("the sum so far") == 2 and "RoPE" in shown
    assert not {"depth read", "read", "seal", "embedding", "down", "norm, up", "shared", "gate", "block 1"} & {*shown}


@configurations
def test_nothing_leaves_the_picture(c):
    for i in range(c.num_hidden_layers):
        drawing = model_map(c, i)
        flat = [m for mark in drawing.marks for m in (mark[3] if mark[0] == "link" else [mark])]
        for kind, *v in flat:
            if kind == "rect":
                assert v[0] >= 0 and v[0] + v[2] <= WIDTH and v[1] + v[3] <= drawing.height, (i, v)
            elif kind == "path":
                numbers = [float(x) for x in re.findall(r"[\d.]+", v[0])]
                assert max(numbers[::2]) <= WIDTH and max(numbers[1::2]) <= drawing.height, (i, v)
        assert drawing.svg().startswith("<svg")


# ---- links -------------------------------------------------------------------------------------------


def test_the_book_s_chapters_are_planned():
    assert list(CHAPTERS) == PLANNED


@configurations
def test_every_link_of_the_map_leads_to_a_planned_chapter(c):
    for i in range(c.num_hidden_layers):
        for address, label in links(model_map(c, i).marks).items():
            name = address.removesuffix(".ipynb")
            assert name in PLANNED and f": chapter {int(name[:2])}, {CHAPTERS[name][0]}" in label
    found = {a for i in (0, 3) for a in links(model_map(K3, i).marks)}
    mechanisms = PLANNED[1:10] + ["13_gated_mla", "14_assemble"]
    assert found == {f"{name}.ipynb" for name in mechanisms}


# ---- the small map -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", PLANNED)
def test_small_map_of_every_chapter(chapter):
    assert set(CHAPTERS[chapter][1]) <= set(WHOLE)
    for c in (None, TOY, BARE, DENSE):
        drawing = here(chapter, c).first
        (mark,) = drawing.marks
        assert mark[0] == "link" and mark[1] == "00_map.ipynb" and drawing.says.startswith("Lit: ")
        assert f"{(c or K3).num_hidden_layers} layers" in list(words(drawing.marks))


def test_small_map_lights_the_chapter_s_part():
    def bright(chapter):
        marks = here(chapter).first.marks[0][3]
        boxes = {marks[i + 1][3] for i, m in enumerate(marks) if m[0] == "rect" and m[5:] == ["blue", 1]}
        return boxes | {m[2] for m in marks if m[0] == "path" and m[3] > 1.5}

    assert bright("02_moe") == {"93 layers", "router", "expert", "green"}
    assert bright("03_attn_res") == {"93 layers", "read", "pink"}
    assert bright("08_kda_hybrid") == {"93 layers", "mixer", "blue", "rust"}
    assert bright("12_sources") == set()
    assert bright("14_assemble") >= {"embed", "head", "latent", "blue", "rust", "green", "ochre", "pink"}


def test_an_unknown_chapter_is_named():
    with pytest.raises(ValueError, match="chapter is '2_moe'; it must be one of 00_map"):
        here("2_moe")


# ---- one token's way through the model ---------------------------------------------------------------


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
            assert list(step.sizes) == ["emb", *(f"b{n}" for n in range(1, i // size + 1)), "live"]
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
    assert " It seals the embedding. " in figure.frame(at="layer 0, KDA").says
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


def test_a_walk_needs_depth_reads():
    with pytest.raises(ValueError, match="attn_res_block_size is None"):
        walk(BARE, {})


# ---- on the page -------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 375])
def test_the_map_on_its_page(browser, address, width):
    """Pointing, tapping and the keyboard choose a layer; a box leads to its chapter."""
    with screen(browser, width, has_touch=width == 375) as context:
        page, wrong = open_page(context, f"{address}/book/00_map.html")
        root = page.locator("div.k3-live").first
        root.scroll_into_view_if_needed()
        assert root.locator(".k3-words").text_content() == says(K3, 40)

        def point(layer):
            box = root.locator("svg").bounding_box()
            scale = box["width"] / WIDTH
            x = box["x"] + scale * (column(K3, layer) + column(K3, layer + 1)) / 2
            y = box["y"] + scale * (PICK[1] + PICK[3]) / 2
            page.touchscreen.tap(x, y) if width == 375 else page.mouse.move(x, y)

        for layer in (92, 0, 84):
            point(layer)
            assert root.locator(".k3-words").text_content() == says(K3, layer)
        root.locator("input").focus()
        page.keyboard.press("ArrowRight")
        assert root.locator(".k3-words").text_content() == says(K3, 85)
        router = root.locator("a", has_text="router")
        router.focus()
        assert "chapter 2" in router.get_attribute("aria-label")
        page.keyboard.press("Enter")
        page.wait_for_url("**/02_moe.html")
        assert not wrong
