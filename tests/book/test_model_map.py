"""The map of the model: what it says is what a model of the same configuration does, and its links lead to chapters."""

import re
from pathlib import Path

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
                           "Between its two reads the embedding is sealed as b0.")
    assert says(K3, 92) == ("Layer 92, in block 8: MLA, then a mixture of 896 experts, 16 for each token. "
                            "Its depth reads have 9 sources and 9.")
    assert says(K3, 84).endswith("Between its two reads the live sum is sealed as b7.")
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
    assert border.count("live sum") == 2 and "is now b7" in border and border.count("b7") == 1
    assert {"latent 576", "NoPE", "MLA", "16 of 896 experts", "top 16", "3584", "7168"} <= {*last} and "seal" not in last
    assert last.count("embedding") == 2 and last.count("live sum") == 2


def test_a_plain_residual_has_no_depth_read_and_bare_parts_are_left_out():
    shown = [str(w) for w in words(model_map(BARE, 3).marks)]
    assert shown.count("the sum so far") == 2 and "RoPE" in shown
    assert not {"depth read", "read", "seal", "embedding", "down", "norm, up", "shared", "gate", "b1"} & {*shown}


@pytest.mark.parametrize("layer", range(0, 93, 12))
def test_what_is_sealed_is_the_last_source_of_the_first_read(layer):
    marks = [m for m in model_map(K3, layer).marks if m[0] != "link"]
    name = "live sum" if layer else "embedding"
    place = next(i for i, m in enumerate(marks) if m[0] == "text" and m[3] == name)
    kind, left, top, width, tall, *_ = marks[place - 1]
    below = f"M{left + width / 2:g} {top + tall:g}L{left + width / 2:g} "
    assert kind == "rect" and any(m[0] == "path" and m[1].startswith(below) for m in marks)


def test_colours_are_for_kinds_and_reads():
    """The row of the whole model has none of them but the read's."""
    boxes = {m[3][1][3]: m[3][0][5] for m in model_map(K3).marks if m[0] == "link" and m[3][0][2] < 20}
    assert boxes == {"embed": "ink", "read": "pink", "norm": "ink", "head": "ink"}
    assert len({colour for colour, _ in KINDS.values()} | {"pink", "ink", "strong"}) == len(KINDS) + 3


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


def test_every_chapter_of_the_map_is_written():
    folder = Path(__file__).parents[2] / "book"
    assert sorted(path.stem for path in folder.glob("[0-9][0-9]_*.ipynb")) == PLANNED
    assert f"map of all {len(PLANNED)}" in (folder / "index.md").read_text(encoding="utf-8")


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
        boxes = {marks[i + 1][3] for i, m in enumerate(marks) if m[0] == "rect" and m[5:] == ["strong", 1]}
        return boxes | {m[2] for m in marks if m[0] == "path" and m[3] > 1.5}

    assert bright("02_moe") == {"93 layers", "router", "expert", "green"}
    assert bright("03_attn_res") == {"93 layers", "read", "strong"}
    assert bright("08_kda_hybrid") == {"93 layers", "mixer", "blue", "rust"}
    assert bright("12_sources") == set()
    assert bright("14_assemble") >= {"embed", "head", "latent", "blue", "rust", "green", "ochre", "strong"}


def test_on_the_small_map_the_latent_does_not_wait_for_the_router():
    marks = here("05_latent_moe").first.marks[0][3]
    left = {m[3]: marks[i - 1][1] for i, m in enumerate(marks) if m[0] == "text" and marks[i - 1][0] == "rect"}
    assert left["mixer"] < left["router"] == left["latent"] < left["expert"]


def test_an_unknown_chapter_is_named():
    with pytest.raises(ValueError, match="chapter is '2_moe'; it must be one of 00_map"):
        here("2_moe")


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
