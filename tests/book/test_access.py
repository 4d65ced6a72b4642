"""Every page in a browser without network, at two widths, light and dark.

No errors, no sideways scrolling, and no serious fault that axe-core, the accessibility checker, finds.
A page is loaded once for a width, light or dark, and then changes to the other scheme.
"""

from pathlib import Path

import axe_playwright_python
import pytest

from .browser import SCHEMES, WIDTHS, addresses, each_scheme, open_page, screen, too_wide

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
SERIOUS = {"serious", "critical"}

# Formulas are MathJax's affair. Of code, one word of each colour is enough: ten thousand alike
# would take most of the time.
PREPARE = """() => {
  const still = document.createElement("style");  // no colour half-way to another
  still.textContent = "* { transition: none !important; animation: none !important; }";
  document.head.append(still);
  const seen = new Set();
  for (const word of document.querySelectorAll("div.highlight pre span")) {
    const kind = word.className + (word.closest(".cell_output") ? " output" : "");
    seen.has(kind) ? word.replaceWith(...word.childNodes) : seen.add(kind);
  }
}"""
SETTLE = 400    # ms; the theme looks for what can be scrolled 0.3 s after the last change
CHECK = """async () => {
  const found = await axe.run({exclude: [["mjx-container"]]}, {resultTypes: ["violations"]});
  return found.violations.flatMap(fault => fault.nodes.map(node => [
    fault.impact, `${fault.id} at ${node.target}: ${node.html.slice(0, 120)}`]));
}"""


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width, first", [*zip(WIDTHS, SCHEMES)])
def test_nothing_is_wrong_on_any_page(browser, address, site, pages, width, first):
    outside, bad = [], []

    def only_here(route):
        if route.request.url.startswith((address, "data:", "blob:")):
            return route.continue_()
        outside.append(route.request.url)
        return route.abort()

    with screen(browser, width, first) as context:
        context.route("**/*", only_here)
        for path, url in addresses(pages, site, address).items():
            bad += [f"{path.name}, {width} px, {words}" for words in look_at(context, url, first)]
    assert not outside and not bad, "\n".join(outside + bad)


def look_at(context, url, first):
    """What is wrong with a page, each with the scheme in which it was seen."""
    page, wrong = open_page(context, url)
    for scheme in each_scheme(page, first):
        yield from (f"{scheme}: {words}" for words in wrong + too_wide(page))
        wrong.clear()
    page.evaluate(PREPARE)
    for scheme in each_scheme(page, scheme):    # axe-core asks for files that are not there
        page.wait_for_timeout(SETTLE)
        yield from (f"{scheme}: {words}" for impact, words in faults(page) if impact in SERIOUS)
    page.close()


def faults(page):
    """Impact and description of every fault that axe-core finds on an open page."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    return page.evaluate(CHECK)


@pytest.mark.browser
@pytest.mark.parametrize(
    "fault, rule",
    [
        ('<img src="data:,">', "image-alt"),
        ('<p style="color:#999">pale</p>', "color-contrast"),
        ('<div class="highlight"><pre><span class="k" style="color:#999">pale</span></pre></div>',
         "color-contrast"),
        ("<input>", "label"),
    ],
)  # fmt: skip
def test_the_check_itself_sees(browser, fault, rule):
    with screen(browser) as context:
        page = context.new_page()
        page.set_content(f'<html lang="en"><title>t</title><main><h1>t</h1>{fault}</main></html>')
        page.evaluate(PREPARE)
        assert [words for impact, words in faults(page) if impact in SERIOUS and rule in words]
