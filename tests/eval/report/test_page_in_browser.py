"""The page in a real browser: it renders at any width, asks for nothing, runs nothing.

Skipped where there is no `chromium` on the PATH.
"""

from __future__ import annotations

import json
import re
from html import unescape

import pytest

from eval.report.page import render_html
from tests.support.browser import needs_browser, open_page

pytestmark = needs_browser

# Added to a copy of a page, this measures what a reader would see; it is the test's own, the page has no script.
PROBE = """<script>
const boxes = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect());
const found = {
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  height: document.documentElement.scrollHeight,
  pictures: boxes.map((box) => [box.width, box.height]),
  headline: document.querySelector("h1").getBoundingClientRect().height,
  styled: getComputedStyle(document.querySelector(".card, td")).borderBottomStyle,
  fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
};
document.body.insertAdjacentHTML("beforeend", "<pre id='probe'></pre>");
document.getElementById("probe").textContent = JSON.stringify(found);
</script></body>"""


@pytest.fixture
def browse(tmp_path):
    """Return a function that opens a page without a network and gives its final DOM and what the console said."""

    def browse(page, width=1280):
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        return open_page(path.as_uri(), tmp_path / "profile", width)

    return browse


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_laid_out_within_the_window_and_fetches_nothing(report, browse, width):
    dom, console = browse(render_html(report).replace("</body>", PROBE), width)
    found = json.loads(unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom)[1]))
    assert found["overflow"] <= 0
    assert found["height"] > 1000
    assert found["headline"] > 0
    assert found["styled"] == "solid"
    assert all(size > 60 for picture in found["pictures"] for size in picture)
    assert len(found["pictures"]) == 1
    assert found["fetched"] == []
    assert console == []
