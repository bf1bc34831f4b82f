"""The page: one file without the network, the same bytes for the same report. The headline is true in either direction."""

import re
from html.parser import HTMLParser

import pytest

from eval.report.page import VARIABLES, draw_positions, render_html
from eval.report.schema import definitions
from eval.report.tables import render_markdown
from eval.report.text import headline, lossless_detail, what_to_serve
from tests.support.reports import changed

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and insists that every tag closes in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


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


def test_every_number_is_defined_once(page):
    ids = [value for _, name, value in Reader(page).attributes if name == "id"]
    assert {f"def-{path}" for path in definitions()} <= set(ids)
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
        ({"acceptance.detectable_change_percent": 4.26}, ["smallest detectable change in τ (%)", "4.26"]),
        ({"acceptance.draft_token_yield_ci": [0.31, 0.52]}, ["[31, 52]"]),
    ],
)
def test_failures_and_the_detectable_change_are_shown(report, changes, words):
    text = text_of(render_html(changed(report, changes)))
    assert all(word in text for word in words)


def test_the_quality_of_answers_is_shown_side_by_side_where_it_was_measured(report, page, quality_section):
    assert "Quality of the answers" not in page
    text = text_of(render_html(changed(report, {"quality": quality_section})))
    assert "29 reached the limit" in text
    assert all(number in text for number in ("1.020×", "[0.990, 1.050]", "-0.031", "[-0.090, 0.010]"))


# --- the Markdown summary and its headline -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "low", "high", "words"),
    [
        (1.42, 1.31, 1.53, ["1.42× [1.31, 1.53]", "lean forward;", "; 1 of 32 answers"]),
        (0.80, 0.75, 0.86, ["0.80× [0.75, 0.86]", "(slower);"]),
        (1.02, 0.97, 1.08, ["(not significant);"]),
        (1.42, None, None, ["1.42×", "without an interval;"]),
    ],
)
def test_the_headline_says_faster_slower_or_neither_as_the_interval_does_and_by_which_forward(report, point, low, high, words):
    bounds = None if low is None else [low, high]
    report = changed(report, {"speed": {"decode_speedup": point, "decode_speedup_ci": bounds}, "decode": {"forward": "lean"}})
    assert all(each in headline(report) for each in words)


@pytest.mark.parametrize(
    ("ratio", "bounds", "words"), [(0.8, [0.7, 0.9], "slower than"), (0.95, [0.8, 1.1], "not sig"), (1.2, [1.1, 1.3], "")]
)
def test_a_way_without_training_that_is_no_slower_is_in_the_headline(report, ratio, bounds, words):
    rival = {"decode_speedup": 1.44, "decode_speed_ratio": ratio, "decode_speed_ratio_ci": bounds}
    said = headline(changed(report, {"baselines.prompt_lookup": rival}))
    assert (words in said, "prompt lookup" in said) == (True, bool(words))


def test_warnings_are_said_first_and_without_speed_and_intervals_it_still_reads(report):
    bare = {"warnings": ["The target's template differs."], "speed": None, "acceptance.tokens_per_target_step_ci": None}
    text = render_markdown(changed(report, bare))
    assert "template differs" in text.split("\n\n")[1]
    assert "None" not in text


@pytest.mark.parametrize(
    ("verdict", "num_differing", "wrong", "words"),
    [
        ("lossless", 0, 0, ["3,412 tokens", "none of 32"]),
        ("lossless_up_to_ties", 2, 0, ["3,412 tokens", "2 of 32", "tie"]),
        ("not_lossless", 2, 5, ["5 tokens are not", "2 of 32"]),
    ],
)
def test_a_greedy_headline_counts_tokens_and_differing_answers(report, verdict, num_differing, wrong, words):
    section = {
        "verdict": verdict,
        "checked_tokens": 3412,
        "largest_gap": 0.113,
        "largest_gap_in_roundings": 3.27,
        "tolerance": 4.5,
        "off_share": 0.0183,
        "plain_largest_gap_in_roundings": 2.84,
        "plain_off_share": 0.021,
        "divergences": [report.lossless.divergences[0].model_dump()] * num_differing,
        "failed_checks": ["greedy"] if wrong else [],
        "checks": {"greedy": {"wrong_tokens": wrong, "wrong_ends": 0}},
    }
    report = changed(report, {"lossless": section})
    assert all(each in headline(report) for each in words)
    assert all(each in lossless_detail(report) for each in (*words, "0.11", "3.3", "4.5", "2.8", "1.8 %", "2.1 %"))


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(1.2, ("Serve the draft", "1.20", "prompt lookup")), (0.85, ("Serve prompt lookup", "0.85")), (None, ())],
)
def test_the_faster_one_of_draft_and_lookup_is_to_be_served(report, ratio, words):
    said = what_to_serve(
        changed(report, {"baselines.prompt_lookup": {"decode_speed_ratio": ratio, "decode_speed_ratio_ci": None}})
    )
    assert bool(said) == bool(words)
    assert all(each in said for each in words)


def test_intervals_of_a_way_that_learns_from_prompts_are_marked(report):
    learning = {name: each | {"learns_from_prompts": True} for name, each in report.to_dict()["baselines"].items()}
    marked = changed(report, {"baselines": learning, "hardware": {"processes": 2}})
    for text in (render_markdown(marked), text_of(render_html(marked)), what_to_serve(marked)):
        assert all(each in text.replace("\\", "") for each in ("]*", "not independent", "2 processes"))
    assert "]*" not in render_html(report)


def test_a_headline_of_several_suites_says_which_number_is_of_which(report):
    house = {name: report.to_dict()[name] for name in ("prompts", "acceptance", "speed", "by_category", "baselines")}
    first, second = headline(changed(report, {"suites": {"house": house}, "lossless": {"checked_tokens": 740}})).split(". ")
    assert first.startswith("On house64 ")
    assert "on house " in first
    assert ("all suites" in second, "740 tokens" in second) == (True, True)


def test_a_headline_names_the_mode_whose_answers_are_wrong(report):
    section = {"verdict": "not_lossless", "checked_tokens": 9, "failed_checks": ["greedy", "greedy_prompt_lookup"]}
    checks = {"greedy": {"p_value": 0.002}, "greedy_prompt_lookup": {"wrong_tokens": 1, "wrong_ends": 2}}
    said = headline(changed(report, {"lossless": section | {"divergences": [], "checks": checks}}))
    assert "p = 0.002" in said
    assert "in prompt lookup: 1 tokens are not" in said


def test_the_test_of_samples_is_named_with_its_p_value_and_what_it_lacks(report):
    test = {"p_value": 0.4, "num_samples": 512, "detectable_difference": 0.12}

    def sampled(verdict, **lossless):
        checks = {"checks": {"first_tokens": test}} | lossless
        return changed(report, {"decode.temperature": 1.0, "lossless": {"verdict": verdict} | checks})

    assert "512 samples, p = 0.4" in headline(sampled("lossless"))
    assert "0.12" in lossless_detail(sampled("lossless"))
    assert "first tokens (p = 0.4)" in headline(sampled("not_lossless", failed_checks=["first_tokens"]))
    lacking = {"checks": {"first_tokens": {"p_value": None, "reason": "samples_failed"}}}
    assert "first tokens (samples failed)" in headline(sampled("inconclusive", inconclusive_checks=["first_tokens"], **lacking))
