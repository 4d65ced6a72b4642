"""Live figures: the data they store, their still picture, and what happens in a browser when a control moves."""

import json
import re
import shutil
from html import unescape

import pytest

from k3_teach.notebook import draw
from k3_teach.notebook.live import live

CHROME = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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
    (draw.lines([0, 1], {"f": [2, 3]}, marks_at=1), "at 1: f 3"), (draw.flow({"a": (40, 20, 60, "in"), "b": (200, 20, 60, "out")}, [("a", "b")]), "in, out")])
def test_builders_say_what_they_show(drawing, says):
    assert drawing.says == says
    assert drawing.svg().startswith("<svg") and says.split(",")[0] in unescape(drawing.svg())
    for kind, *values in drawing.marks:
        numbers = [v for v in values if isinstance(v, (int, float))]
        assert all(-5 <= v <= 400 for v in numbers), (kind, values)


def test_numbers_are_short():
    assert [draw.number(x) for x in (0, -0.0, 1.23456, -12345.6, 1e-9, 3e10, float("inf"))] == ["0", "0", "1.23", "−1.23e4", "1.00e−9", "3.00e10", "∞"]


def test_ticks_are_round():
    assert draw.ticks(0, 1) == [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert draw.ticks(-60, 60) == [-50, -25, 0, 25, 50] and draw.ticks(2, 2) == [2]


def test_drawings_move_as_one():
    one = draw.lines([0, 1], {"f": [0, 1]})
    two = draw.stack(one, one, gap=0)
    assert two.height == 2 * one.height
    assert sorted(str(m) for m in two.marks[:len(one.marks)]) != sorted(str(m) for m in two.marks[len(one.marks):])


@pytest.mark.browser
@pytest.mark.skipif(CHROME is None, reason="no Chromium here: live figures were NOT tried in a browser")
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_moving_a_control_by_keyboard_changes_picture_and_words(tmp_path, width, scheme):
    from playwright.sync_api import sync_playwright

    figures = [example(), example(steps="kind", start={"a": 1})]
    (tmp_path / "page.html").write_text("<!doctype html><meta charset='utf-8'><body>" + "".join(f.to_html() for f in figures), encoding="utf-8")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROME, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors = []
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.goto((tmp_path / "page.html").as_uri())
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
        assert not errors
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        browser.close()


def contrast(a: str, b: str) -> float:
    """WCAG contrast of two #rrggbb colours."""
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    x, y = sorted((luminance(a), luminance(b)), reverse=True)
    return (x + 0.05) / (y + 0.05)


def test_words_in_live_figures_have_contrast_on_both_pages():
    """4.5:1 for the inks of small words on the light page (grey) and on the dark one (all colours)."""
    from k3_teach.notebook.live import STYLE
    light = re.search(r"\.k3-live\{--k3-ink:(#\w{6})", STYLE)[1]
    dark = dict(re.findall(r"--k3-(\w+):(#\w{6})!important", STYLE.split("data-theme")[1]))
    assert contrast(light, "#ffffff") > 4.5
    assert set(dark) >= {"ink", "blue", "rust"} and all(contrast(c, "#121212") > 4.5 for c in dark.values())
