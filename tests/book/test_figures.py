"""Every live figure on every built page: each control moved through all its stops by keyboard.

What a page shows must be what the notebook stores, and nbval computes the stored data again with the
package; so the numbers a reader sees at a stop are the package's.
"""

import json
import re

import pytest

from k3_teach import K3Config
from k3_teach.notebook import form, model_map, palette

from .browser import ROOT, each_scheme, open_page, screen, too_wide

CHAPTERS = sorted((ROOT / "book").glob("*.ipynb"))
DATA = re.compile(r'<div class="k3-live">.*?<script type="application/json">(.*?)</script>', re.S)
SHOWN = """root => { const svg = root.querySelector('svg'); return {
    words: root.querySelector('.k3-words').textContent, label: svg.getAttribute('aria-label'),
    drawn: svg.querySelectorAll('rect, line, path, circle, text').length, picture: svg.innerHTML }; }"""


def stored_figures(path):
    """The data of the live figures in a notebook, in order."""
    cells = form.read(path.read_text(encoding="utf-8")).cells
    html = ["".join(output["data"].get("text/html", "")) for cell in cells
            for output in cell.get("outputs", []) if "data" in output]
    return [json.loads(found) for text in html for found in DATA.findall(text)]


def without_addresses(mark):
    """A mark, its links' addresses left out: a page leads to pages, a notebook to notebooks."""
    return ["link", "", mark[2], [without_addresses(m) for m in mark[3]]] if mark[0] == "link" else mark


def count(mark):
    return sum(map(count, mark[3])) if mark[0] == "link" else 1


def frame(data, stops):
    number = 0
    for control, stop in zip(data["controls"], stops):
        number = number * len(control["values"]) + stop
    return data["frames"][number]


def check_shown(root, data, stops, before=None):
    """The figure shows the frame at `stops`, in picture, words and text alternative."""
    shown, wanted = root.evaluate(SHOWN), frame(data, stops)
    marks = [data["marks"][i] for i in wanted["marks"]]
    assert shown["words"] == (wanted["says"] if data["controls"] else "")
    assert shown["label"] == data["alt"] + " " + wanted["says"]
    assert shown["drawn"] == sum(map(count, marks))
    if before is not None and before[1]["marks"] != wanted["marks"]:
        assert shown["picture"] != before[0]["picture"]
        assert shown["label"] != before[0]["label"], f"nothing tells a blind reader what changed: {stops}"
    return shown, wanted


def move(page, root, data, number):
    """Move a control with the keyboard, from its first stop to its last; yield at every one."""
    control = data["controls"][number]
    last = len(control["values"]) - 1
    if control["kind"] == "choice":
        radios = root.get_by_role("group", name=control["label"]).get_by_role("radio")
        radios.nth(control["start"]).focus()
        for _ in range(control["start"]):
            page.keyboard.press("ArrowLeft")
    elif control["kind"] == "steps":
        buttons = root.locator(".k3-steps button")
        buttons.first.focus()
        for _ in range(last):
            page.keyboard.press("ArrowLeft")
        buttons.last.focus()
    else:
        sliders = [c for c in data["controls"] if c["kind"] == "slider"]
        root.get_by_role("slider").nth(sliders.index(control)).focus()
        page.keyboard.press("Home")
    yield 0
    for stop in range(1, last + 1):
        page.keyboard.press("Enter" if control["kind"] == "steps" else "ArrowRight")
        yield stop


@pytest.mark.browser
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_control_at_every_stop(browser, site, address, path):
    figures = stored_figures(path)
    with screen(browser) as context:
        page, wrong = open_page(context, f"{address}/book/{path.stem}.html")
        roots = page.locator(".k3-live")
        assert roots.count() == len(figures)
        for i, data in enumerate(figures):
            root = roots.nth(i)
            on_page = json.loads(root.locator("script").first.text_content())
            on_page["marks"] = list(map(without_addresses, on_page["marks"]))
            assert on_page == data | {"marks": list(map(without_addresses, data["marks"]))}
            stops = [control["start"] for control in data["controls"]]
            before = check_shown(root, data, stops)
            for number, control in enumerate(data["controls"]):
                for stop in move(page, root, data, number):
                    stops[number] = stop
                    before = check_shown(root, data, stops, before)
        assert not wrong


@pytest.mark.browser
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_figures_on_a_phone(browser, site, address, path):
    """On 375 px every figure keeps inside the page at the last stop of its controls, and has its colours."""
    figures = stored_figures(path)
    with screen(browser, 375) as context:
        page, wrong = open_page(context, f"{address}/book/{path.stem}.html")
        roots = page.locator(".k3-live")
        for i, data in enumerate(figures):
            root = roots.nth(i)
            sliders = [control for control in data["controls"] if control["kind"] == "slider"]
            for number in range(len(sliders)):
                root.get_by_role("slider").nth(number).focus()
                page.keyboard.press("End")
            last = [len(c["values"]) - 1 if c in sliders else c["start"] for c in data["controls"]]
            check_shown(root, data, last)
            box = root.locator("svg").bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 375
        for scheme in each_scheme(page, "light"):
            ink = roots.evaluate_all("all => all.map(e => getComputedStyle(e).getPropertyValue('--k3-ink').trim())")
            assert ink == [getattr(palette, scheme.upper())["ink"]] * len(figures), scheme
            assert not wrong + too_wide(page), scheme


@pytest.mark.browser
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_without_scripts_there_is_a_still(browser, site, address, path):
    with screen(browser, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{address}/book/{path.stem}.html", wait_until="load")
        for i, data in enumerate(stored_figures(path)):
            still = page.locator(".k3-live").nth(i).locator("img")
            assert still.get_attribute("alt").startswith(data["alt"])
            assert still.evaluate("image => image.naturalWidth") > 0


@pytest.mark.browser
def test_the_map_says_what_the_package_computes(browser, site, address):
    """Each layer of the map in 00_map against the configuration, and pointing at its column."""
    config = K3Config.k3()
    with screen(browser) as context:
        page, _ = open_page(context, f"{address}/book/00_map.html")
        root = page.locator(".k3-live").filter(has=page.get_by_role("slider", name="layer")).first
        words, slider = root.locator(".k3-words"), root.get_by_role("slider", name="layer")
        slider.focus()
        page.keyboard.press("Home")
        for layer in range(config.num_hidden_layers):
            assert words.text_content() == model_map.says(config, layer)
            page.keyboard.press("ArrowRight")
        box = root.locator("svg").bounding_box()
        for layer in (0, 47, 92):
            x = model_map.column(config, layer + 0.5) / 360 * box["width"]
            root.locator("svg").hover(position={"x": x, "y": 90 / 360 * box["width"]})
            assert words.text_content() == model_map.says(config, layer)
        links = root.locator("svg a")
        assert links.count() >= 3
        for i in range(links.count()):
            target = links.nth(i).get_attribute("href")
            assert (site / "book" / target).exists(), target


@pytest.mark.browser
def test_a_picture_to_point_at_opens_large(browser, site, address):
    """By keyboard: the button fills the window, the controls work there, Escape puts all back."""
    with screen(browser) as context:
        page, wrong = open_page(context, f"{address}/book/00_map.html")
        root = page.locator(".k3-live", has=page.locator(".k3-enlarge")).first
        small, parent = root.locator("svg").bounding_box(), root.evaluate("e => e.parentNode.className")
        root.locator(".k3-enlarge").focus()
        page.keyboard.press("Enter")
        large = page.locator("dialog[open] svg").bounding_box()
        assert large["width"] > 1.5 * small["width"] and too_wide(page) == []
        assert page.evaluate("document.activeElement.textContent") == "close"
        slider = page.locator("dialog").get_by_role("slider")
        before = slider.get_attribute("aria-valuetext")
        slider.focus()
        page.keyboard.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") != before
        page.keyboard.press("Escape")
        page.wait_for_function("!document.querySelector('dialog')")
        assert root.evaluate("e => e.parentNode.className") == parent
        assert root.locator("svg").bounding_box()["width"] == small["width"]
        assert page.evaluate("document.activeElement.textContent") == "open large"
        assert not wrong
