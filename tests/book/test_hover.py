"""Terms and labels explain themselves: to a pointer, a keyboard, a finger, and without scripts."""

import pytest

from .browser import SCHEMES, WIDTHS, open_page, screen, too_wide
from .colours import contrast
from .test_pages import chapter, hexadecimal


def shown(page):
    """The words of the explanation that a reader sees now, or None."""
    box = page.locator("[role=tooltip]")
    return box.inner_text() if box.is_visible() else None


@pytest.mark.browser
def test_pointing_at_a_term_explains_it(browser, address):
    with screen(browser) as context:
        page, wrong = open_page(context, f"{address}/book/index.html")
        term, box = page.locator("a.k3-term").first, page.locator("[role=tooltip]")
        assert shown(page) is None and term.get_attribute("title") is None
        term.hover()
        box.wait_for(state="visible")
        assert term.get_attribute("aria-describedby") == box.get_attribute("id")
        assert "one score for each expert" in shown(page)
        box.hover()
        page.wait_for_timeout(500)
        assert shown(page), "it must stay while the pointer is on it"
        page.keyboard.press("Escape")
        assert shown(page) is None and term.get_attribute("aria-describedby") is None
        term.hover()
        box.wait_for(state="visible")
        page.mouse.move(5, 5)
        box.wait_for(state="hidden")
        assert not wrong


@pytest.mark.browser
def test_the_keyboard_explains_a_term_too(browser, address):
    with screen(browser) as context:
        page, _ = open_page(context, f"{address}/book/index.html")
        has_focus = "e => e === document.activeElement"
        term = page.locator("a.k3-term").first
        page.locator("#how-to-read-it").evaluate("e => { e.tabIndex = -1; e.focus(); }")
        for _ in range(40):
            page.keyboard.press("Tab")
            if term.evaluate(has_focus):
                break
        assert "one score for each expert" in (shown(page) or "")
        page.keyboard.press("Escape")
        assert shown(page) is None and term.evaluate(has_focus)
        page.keyboard.press("Enter")
        page.wait_for_url("**/glossary.html#router")


@pytest.mark.browser
def test_the_first_tap_explains_and_the_second_follows(browser, address):
    with screen(browser, width=375, has_touch=True) as context:
        page, _ = open_page(context, chapter(address))
        label = page.locator("a.k3-label").first
        label.tap()
        assert shown(page) and page.url == chapter(address)
        page.locator("article h1").tap()
        assert shown(page) is None
        label.tap()
        label.tap()
        page.wait_for_url("**/index.html#label-*")


@pytest.mark.browser
def test_without_scripts_the_explanation_is_the_title(browser, address):
    with screen(browser, java_script_enabled=False) as context:
        page, _ = open_page(context, f"{address}/book/index.html")
        title = page.locator("a.k3-term").first.get_attribute("title")
        assert "one score for each expert" in title


LOOK = """e => { const own = getComputedStyle(e), line = getComputedStyle(e.parentElement);
    return [own.color, own.backgroundColor, e.offsetHeight, parseFloat(line.lineHeight)]; }"""


def look(element):
    """The contrast of an element's words, its height, and the height of the line it is in."""
    words, ground, height, line = element.evaluate(LOOK)
    return contrast(hexadecimal(words), hexadecimal(ground)), height, line


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_badges_and_explanations_are_readable(browser, address, width, scheme):
    """A badge is inside its line, an explanation on the screen, and both have contrast."""
    with screen(browser, width, scheme) as context:
        page, _ = open_page(context, chapter(address))
        box, badges = page.locator("[role=tooltip]"), page.locator("a.k3-label")
        for number in range(0, badges.count(), 7):
            readable, height, line = look(badges.nth(number))
            assert readable >= 4.5 and height < line
            badges.nth(number).hover()
            box.wait_for(state="visible")
            place = box.bounding_box()
            assert 0 <= place["x"] <= width - place["width"] and not too_wide(page)
            assert 0 <= place["y"] <= 900 - place["height"] and look(box)[0] >= 4.5
            assert place["height"] < 120, "squeezed against the edge"
            page.keyboard.press("Escape")
