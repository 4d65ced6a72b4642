"""axe-core, the accessibility checker, finds no serious fault on any page.

At two widths, light and dark.
"""

from pathlib import Path

import axe_playwright_python
import pytest

from .browser import SCHEMES, WIDTHS, addresses, open_page, screen

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
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_serious_fault(browser, address, site, pages, width, scheme):
    bad = []
    with screen(browser, width, scheme) as context:
        for path, url in addresses(pages, site, address).items():
            page, _ = open_page(context, url)
            page.evaluate(PREPARE)
            page.wait_for_timeout(SETTLE)
            bad += [f"{path.name}: {words}" for impact, words in faults(page) if impact in SERIOUS]
            page.close()
    assert not bad, "\n".join(bad)


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
