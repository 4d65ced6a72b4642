"""Live figures: the data they store, their still picture, and what happens in a browser when a control moves."""

import json
import re
from html import unescape

import pytest

from k3_teach.notebook import draw, palette, setup
from k3_teach.notebook.live import live, picture

from .browser import open_page, screen, too_wide
from .colours import PAGES, contrast


def example(**options):
    picture = lambda a, kind: draw.stack(draw.bars([a, a * a], "xy", limits=(0, 4)), draw.lines([0, 1, 2], {kind: [0, a, 2 * a]}, "t", "v", y_limits=(0, 4)))
    return live(picture, alt="A test.", a=[0.5, 1, 2], kind=["slow", "fast"], **options)


def stored(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.S)[1])


def test_every_stop_is_stored_and_can_be_drawn():
    figure = example()
    data = stored(figure.to_html())
    assert len(data["frames"]) == 6 and [c["values"] for c in data["controls"]] == [["0.5", "1", "2"], ["slow", "fast"]]
    for frame, drawing in zip(data["frames"], figure.drawings.values()):
        assert [data["marks"][i] for i in frame["marks"]] == [list(m) for m in drawing.marks]
        assert frame["says"] == drawing.says


def test_common_marks_are_stored_once():
    data = stored(example().to_html())
    used = sum(len(f["marks"]) for f in data["frames"])
    assert len(data["marks"]) < used / 2


def test_two_runs_give_the_same_bytes():
    assert example().to_html() == example().to_html()


def test_still_picture_and_words():
    html = example(start={"a": 2}).to_html()
    alt = unescape(re.search(r'<img alt="(.*?)"', html)[1])
    assert alt.startswith("A test. x 2, y 4") and "data:image/svg+xml;base64," in html


def test_text_in_data_cannot_end_the_script():
    figure = live(lambda a: draw.bars([a], ["</script><b>"]), alt="A <test>.", a=[1, 2])
    html = figure.to_html()
    assert html.count("</script>") == 2 and stored(html)["frames"][0]["says"] == "</script><b> 1"


@pytest.mark.parametrize("options, message", [
    (dict(pick={"z": (0, 0, 1, 1)}), "pick is"), (dict(pick={"a": (0, 0, 1, 1), "kind": (0, 0, 1, 1)}), "pick is"),
    (dict(alt=""), "text alternative"), (dict(start={"a": 9}), r"start\['a'\] is 9"), (dict(start={"z": 0}), "one of a, kind"), (dict(steps="z"), "steps is 'z'")])
def test_mistakes(options, message):
    arguments = dict(alt="x", a=[1, 2], kind=["s", "t"]) | options
    with pytest.raises(ValueError, match=message):
        live(lambda a, kind: draw.bars([a]), **arguments)


def test_more_mistakes():
    with pytest.raises(ValueError, match="at least two"):
        live(lambda a: draw.bars([a]), alt="x", a=[1])
    with pytest.raises(ValueError, match="at most 2000"):
        live(lambda a, b: draw.bars([a]), alt="x", a=range(100), b=range(100))
    with pytest.raises(ValueError, match="must return a Drawing, not list"):
        live(lambda a: [a], alt="x", a=[1, 2])


def test_kernel_view_is_offered_and_computes_between_stops():
    figure = example(kernel=True)
    assert "application/vnd.jupyter.widget-view+json" in figure._repr_mimebundle_()
    box = figure._widget()
    box.children[0].value = 1.5
    assert "1.5" in box.children[-1].value and "2.25" in box.children[-1].value
    assert "application/vnd.jupyter.widget-view+json" not in example()._repr_mimebundle_()


@pytest.mark.parametrize("drawing, says", [
    (draw.bars([1, -2.5], "ab"), "a 1, b −2.5"), (draw.bars([0.5, 1], "ab", lit={1}, unit="s"), "a 0.5 s, b 1 s. Marked: b"),
    (draw.heat([[1, 2], [3, 4]], rows="pq"), "row p: 1, 2; row q: 3, 4"), (draw.scatter({"dots": [(0, 0), (1, 2)]}), "2 of dots"),
    (draw.lines([0, 1], {"f": [2, 3]}, marks_at=1), "at 1: f 3"), (draw.flow({"a": draw.Box(40, 20, "in"), "b": draw.Box(200, 20, "out")}, [("a", "b")]), "in, out"),
    (draw.blocks([["in"], ["left", None, "right"], ["+"]], [("in", "left", "[T, d]"), ("in", "right"), ("left", "+"), ("right", "+")]), "in, left, right, +")])
def test_builders_say_what_they_show(drawing, says):
    assert drawing.says == says
    assert drawing.svg().startswith("<svg") and says.split(",")[0] in unescape(drawing.svg())
    for kind, *values in drawing.marks:
        numbers = [v for v in values if isinstance(v, (int, float))]
        assert all(-5 <= v <= 400 for v in numbers), (kind, values)


def test_numbers_are_short():
    short = {0: "0", -0.0: "0", 1.23456: "1.23", -12345.6: "−12300", 1200: "1200", 999.6: "1000",
             1e5: "1.00e5", 1e-9: "1.00e−9", 3e10: "3.00e10", 1e-4: "1.00e−4", float("inf"): "∞"}
    assert [draw.number(x) for x in short] == list(short.values())


def test_ticks_are_round():
    assert draw.ticks(0, 1) == [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert draw.ticks(-60, 60) == [-50, -25, 0, 25, 50] and draw.ticks(2, 2) == [2]


def test_drawings_move_as_one():
    one = draw.lines([0, 1], {"f": [0, 1]})
    two = draw.stack(one, one, gap=0)
    assert two.height == 2 * one.height
    assert sorted(str(m) for m in two.marks[:len(one.marks)]) != sorted(str(m) for m in two.marks[len(one.marks):])


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_moving_a_control_by_keyboard_changes_picture_and_words(browser, tmp_path, width, scheme):
    figures = [example(), example(steps="kind", start={"a": 1})]
    (tmp_path / "page.html").write_text("<!doctype html><meta charset='utf-8'><body>" + "".join(f.to_html() for f in figures), encoding="utf-8")
    with screen(browser, width, scheme) as context:
        page, wrong = open_page(context, (tmp_path / "page.html").as_uri())
        for number, figure in enumerate(figures):
            root = page.locator(".k3-live").nth(number)
            words = lambda: root.locator(".k3-words").text_content()
            assert words() == figure.first.says
            root.locator("input").first.focus()
            page.keyboard.press("End")
            assert words() == figure.frame(a=2, kind="slow").says
            assert figure.frame(a=2, kind="slow").says in root.locator("svg").get_attribute("aria-label")
            if number:
                root.locator("button", has_text="next").focus()
                page.keyboard.press("Enter")
            else:
                root.locator("input").nth(1).focus()
                page.keyboard.press("ArrowRight")
            assert words() == figure.frame(a=2, kind="fast").says
        assert not wrong + too_wide(page)


@pytest.mark.parametrize("page, colours", [(PAGES["light"], palette.LIGHT), (PAGES["dark"], palette.DARK)])
def test_colours_have_contrast_on_their_page(page, colours):
    """4.5:1, WCAG's bound for small words: of every colour with its page, and of words in a box."""
    assert set(palette.LIGHT) == set(palette.DARK) == {*palette.PALETTE, "purple", "ink", "strong", "on"}
    for name, colour in colours.items():
        if name != "on":
            assert contrast(colour, page) > 4.5, name
            assert name == "strong" or contrast(colour, colours["on"]) > 4.5, name
    shade = blend(colours["blue"], page, 0.62)  # the darkest cell of a heat map
    assert contrast(colours["strong"], shade) > 4.5


def blend(colour: str, page: str, share: float) -> str:
    part = lambda c, i: int(c[i:i + 2], 16)
    return "#" + "".join(f"{round(share * part(colour, i) + (1 - share) * part(page, i)):02x}" for i in (1, 3, 5))


def test_the_still_stands_on_a_light_card():
    html = example().to_html()
    assert ".k3-live img{background:#fff!important" in html
    svg = example().first.svg()
    assert palette.LIGHT["blue"] in svg and palette.PALETTE["blue"] not in svg


def test_a_picture_is_drawn_like_a_live_figure():
    figure = picture(draw.blocks([["a"], ["b"]], [("a", "b")]), alt="Two boxes.")
    data = stored(figure.to_html())
    assert data["controls"] == [] and len(data["frames"]) == 1 and repr(figure) == "<picture>"
    assert "A still picture" not in figure.to_html()
    with pytest.raises(ValueError, match="needs alt"):
        picture(figure.first, alt=" ")


def test_links_and_picking_are_stored():
    drawing = lambda a: draw.Drawing(40, [draw.link("other.ipynb", "the other", [draw.rect(0, 0, 9, 9)])], f"a is {a}")
    figure = live(lambda a, b: drawing(a), alt="x", a=[1, 2, 3], b=[1, 2], pick={"b": (0, 0, 360, 40)})
    data = stored(figure.to_html())
    assert data["pick"] == {"control": 1, "box": [0, 0, 360, 40]}
    assert data["marks"][0][:3] == ["link", "other.ipynb", "the other"]
    moved = draw.stack(draw.title("words"), drawing(1)).marks[1]
    assert moved[3][0][2] == 26 and drawing(1).marks[0][3][0][2] == 0


def test_arrows_of_a_diagram():
    """Down, across, level and round what lies between; each ends at the box it leads to."""
    marks = draw.blocks([["a", "b"], ["c", None], ["d", None]], [("a", "b", "s"), ("b", "c"), ("a", "d"), ("a", "c")]).marks
    ends = [[tuple(map(float, p.split())) for p in m[1][1:].split("L")][-1] for m in marks if m[0] == "path"][::2]
    boxes = {m[3]: (m[1], m[2] - 4) for m in marks if m[0] == "text" and m[7]}
    for (x, y), name in zip(ends, "bcdc"):
        assert abs(x - boxes[name][0]) <= 12 and abs(y - boxes[name][1]) <= 14, name
    with pytest.raises(ValueError, match="an arrow leads to 'z'; the boxes are a, b"):
        draw.blocks([["a", "b"]], [("a", "z")])


@pytest.mark.browser
def test_pointing_and_links_in_a_browser(browser, tmp_path):
    drawing = lambda a: draw.Drawing(80, [
        draw.rect(0, 0, 360, 40), draw.link("x.html", "to x", [draw.rect(0, 50, 40, 20)]),
        draw.link("", "to y", [draw.rect(60, 50, 40, 20)])], f"a is {a}")
    figure = live(drawing, alt="Test.", a=[0, 1, 2, 3], pick={"a": (0, 0, 360, 40)})
    (tmp_path / "page.html").write_text("<!doctype html><meta charset='utf-8'><body>" + figure.to_html(), encoding="utf-8")
    page = browser.new_page(viewport={"width": 375, "height": 600})
    page.goto((tmp_path / "page.html").as_uri())
    box, words = page.locator(".k3-live svg").bounding_box(), page.locator(".k3-words")
    for stop in (3, 1, 0):
        page.mouse.move(box["x"] + box["width"] * (stop + 0.5) / 4, box["y"] + 10)
        assert words.text_content() == f"a is {stop}" and page.locator("input").input_value() == str(stop)
    page.mouse.move(box["x"] + 200, box["y"] + box["height"] - 5)  # outside of the part: nothing moves
    assert words.text_content() == "a is 0"
    assert page.locator("svg").get_attribute("role") == "group"
    assert page.locator("svg a").count() == 1 and page.locator("svg a").get_attribute("aria-label") == "to x"
    assert "a chapter to come" in page.locator("svg g title").text_content()
    page.locator("input").focus()
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "x.html"
    page.close()


def test_vector_figures_are_the_same_bytes_each_time():
    """Two figures of the same data, drawn by IPython's own printer with the options of `setup`."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from IPython.core.pylabtools import print_figure
    setup()

    def one():
        fig, ax = plt.subplots()
        ax.plot([0, 1, 4]), ax.set(xlabel="x", ylabel="y")
        ax.fill_between([0, 1], [0, 1])
        out = print_figure(fig, "svg", metadata={"Date": None, "Creator": None})
        plt.close(fig)
        return out

    assert one() == one() and "<dc:date>" not in one()
    assert palette.PALETTE["blue"] in one() and palette.INK in one()


def coordinates(mark):
    return [tuple(map(float, place.split())) for place in mark[1][1:].split("L")]


def test_up_is_more():
    drawing = draw.lines([0, 1], {"f": [0, 1]})
    (curve,) = [m for m in drawing.marks if m[0] == "path"]
    (x0, y0), (x1, y1) = coordinates(curve)
    assert x1 > x0 and y1 < y0
    low, high = [m for m in draw.scatter({"s": [(0, 0), (1, 1)]}).marks if m[0] == "dot"][:2]
    assert high[1] > low[1] and high[2] < low[2]
    heights = [m[4] for m in draw.bars([1, 2]).marks if m[0] == "rect"]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)


def test_stronger_is_larger():
    shades = [m[6] for m in draw.heat([[1, 2, float("nan")]]).marks if m[0] == "rect"]
    assert shades[0] < shades[1] and shades[2] == shades[0]
    assert len({m[6] for m in draw.heat([[3, 3]]).marks if m[0] == "rect"}) == 1


def test_values_outside_the_limits_stay_in_the_picture():
    (bar,) = [m for m in draw.bars([10], limits=(0, 4)).marks if m[0] == "rect"]
    assert 0 <= bar[2] and bar[2] + bar[4] <= 180
    dots = draw.scatter({"s": [(0, 0), (9, 9)]}, x_limits=(0, 1), y_limits=(0, 1)).marks
    assert sum(m[0] == "dot" for m in dots) == 2  # one of the two, and the legend's


def test_a_gap_is_not_drawn_over():
    nan = float("nan")
    drawing = draw.lines([0, 1, 2, 3, 4], {"f": [nan, 1, nan, 2, 3]})
    assert [len(coordinates(m)) for m in drawing.marks if m[0] == "path"] == [1, 2]
    assert drawing.says == "f from 1 to 3"


@pytest.mark.parametrize("wrong, message", [
    (lambda: draw.bars([1, 2], "a"), "zip"), (lambda: draw.lines([0, 1], {"f": [1]}), "zip"),
    (lambda: draw.lines([1], {"f": [1]}), "the limits are"), (lambda: draw.bars([1], limits=(2, 2)), "the limits are"),
    (lambda: draw.bars([float("nan")]), "a coordinate is nan"), (lambda: live(draw.bars, alt="x", a={1, 2}), "a is a set"),
    (lambda: live(lambda a: draw.bars([a]), alt="x", a=[1, 1.0]), "says '1' at two stops"),
    (lambda: live(lambda a: draw.bars([a]), alt="x", a=[1, 2], start={"a": 2}), "index of a stop"),
    (lambda: live(lambda a: draw.bars([a]), alt="x", a=[1, 2], start={"a": 1.0}), "index of a stop"),
    (lambda: live(lambda a: draw.bars([a]), alt="x", a=[1, 2], pick={"a": (5, 0, 5, 9)}), "with x0 < x1"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_words_cannot_break_a_still():
    from xml.etree import ElementTree
    root = ElementTree.fromstring(draw.bars([1], ['<a "b"&']).svg())
    assert root.attrib["aria-label"] == '<a "b"& 1' and root[0].attrib["fill"] == "#fff"


def test_what_is_lit_is_said_and_marked():
    drawing = draw.blocks([["a"], ["b"], ["c"]], [("a", "b"), ("b", "c")], lit={"a", "b"})
    assert drawing.says == "a, b"
    assert [m[2] for m in drawing.marks if m[0] == "path"] == ["rust", "rust", "ink", "ink"]
    assert draw.bars([1, 2], "ab", lit=set()).says == "a 1, b 2"


@pytest.mark.browser
@pytest.mark.parametrize("page_is", ['<html data-theme="dark">', "<html theme=dark>", '<body data-jp-theme-light="false">',
                                     '<body class="vscode-dark">', '<body class="vscode-high-contrast">'])  # fmt: skip
def test_every_viewer_has_its_dark_colours(browser, tmp_path, page_is):
    text = f"<!doctype html>{page_is}<meta charset='utf-8'>{example().to_html()}"
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    ink = "e => getComputedStyle(e).getPropertyValue('--k3-ink')"
    assert page.locator(".k3-live").evaluate(ink).strip() == palette.DARK["ink"]
    page.close()


@pytest.mark.browser
def test_what_a_screen_reader_hears(browser, tmp_path):
    """Names and values of the controls; one announcement for a move; no key reaches the viewer."""
    figure = live(lambda some_size, kind, at: draw.bars([some_size]), alt="T.", steps="at",
                  some_size=[0.12345, 2], kind=["slow", "fast"], at=["one", "two", "three"])
    html = f"<!doctype html><meta charset='utf-8'><body>{figure.to_html()}"
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    with screen(browser) as context:
        page, wrong = open_page(context, (tmp_path / "page.html").as_uri())
        page.evaluate("window.keys = 0; document.addEventListener('keydown', () => { window.keys += 1; })")
        slider = page.get_by_role("slider", name="some size", exact=True)
        assert slider.get_attribute("aria-valuetext") == "0.1235"
        assert page.locator("[aria-live]").count() == 1 and page.locator("output").count() == 0
        assert page.locator("input:not([data-lm-suppress-shortcuts]), button:not([data-lm-suppress-shortcuts])").count() == 0
        slider.focus()
        assert slider.evaluate("e => getComputedStyle(e).outlineWidth") == "3px"
        page.keyboard.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") == "2" and page.locator(".k3-value").first.text_content() == "2"
        group = page.get_by_role("group", name="at", exact=True)
        group.get_by_text("next").focus()
        seen = []
        for key in ("ArrowRight", "Enter", "Enter", "Home", "End", "ArrowLeft"):
            page.keyboard.press(key)
            off = [b.get_attribute("aria-disabled") for b in group.get_by_role("button").all()]
            seen.append((group.locator(".k3-value").text_content()[0], *off))
        on, end, start = ("2", "false", "false"), ("3", "false", "true"), ("1", "true", "false")
        assert seen == [on, end, end, start, end, on]
        assert page.evaluate("window.keys") == 0 and not wrong
