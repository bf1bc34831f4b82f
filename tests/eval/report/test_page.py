"""The page: one file without the network, the same bytes for the same report."""

import re
from html.parser import HTMLParser

import pytest

from eval.report.page import VARIABLES, draw_positions, render_html
from eval.report.schema import definitions
from tests.support.reports import changed

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and insists that every tag closes in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.spans = [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class", "")))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1][0] == "span":
            self.spans.append((self.open[-1][1], data))


@pytest.fixture(scope="module")
def page(report):
    return render_html(report)


def text_of(page):
    return " ".join(Reader(page).text)


def test_the_page_is_well_formed_and_leads_with_speed_tau_verdict_and_alpha(page, report):
    text = text_of(page)
    assert f"{report.speed.decode_speedup:.2f}×" in text
    assert f"{report.acceptance.tokens_per_target_step:.2f}" in text
    assert f"{report.acceptance.overlap_alpha:.2f}" in text
    assert "Lossless up to ties" in text
    assert render_html(report) == page


def test_nothing_is_fetched_from_anywhere(page):
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    fetching = [value for _, name, value in reader.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert all(value.startswith("#") for value in fetching)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_accepted_rejected_and_target_tokens_are_marked_as_such(page, report):
    spans = Reader(page).spans
    for sample in report.samples["worst"] + report.samples["best"]:
        for piece in sample.pieces:
            assert (piece.kind, piece.text) in spans


def test_the_definition_of_every_number_is_one_click_away(page):
    reader = Reader(page)
    targets = {value for tag, name, value in reader.attributes if tag == "dt" and name == "id"}
    links = {value[1:] for tag, name, value in reader.attributes if tag == "a" and name == "href"}
    assert targets == {f"def-{path}" for path in definitions()}
    assert links <= targets
    ids = [value for _, name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_pictures_take_every_colour_from_the_page_and_keep_their_text(report):
    svg = draw_positions(report)
    assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []
    assert "var(--series-1)" in svg
    assert "<text" in svg
    assert set(re.findall(r"var\([^)]*\)", svg)) <= set(VARIABLES.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"prompts.failed": [{"prompt_id": "coding-1", "mode": "speculative", "stop_reason": "non_finite"}]},
            ["1 request failed.", "non_finite"],
        ),
        ({"lossless.divergences": lambda found: [found[0] | {"logit_gap": 3.4028234663852886e38}]}, ["3.4e+38"]),
        ({"acceptance.detectable_change_percent": 4.26}, ["smallest detectable change in τ (%)", "4.26"]),
    ],
)
def test_failures_gaps_without_bound_and_the_detectable_change_are_shown(report, changes, words):
    text = text_of(render_html(changed(report, changes)))
    assert all(word in text for word in words)


def test_the_quality_of_answers_is_shown_side_by_side_where_it_was_measured(report, page, quality_section):
    assert "Quality of the answers" not in page
    text = text_of(render_html(changed(report, {"quality": quality_section})))
    assert "29 reached the limit" in text
    assert all(number in text for number in ("1.020×", "[0.990, 1.050]", "-0.031", "[-0.090, 0.010]"))
