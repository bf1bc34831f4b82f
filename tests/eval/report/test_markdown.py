"""The Markdown summary: the headline tells the truth in either direction, and outside text breaks nothing."""

import pytest

from configs.runtime.terminal import one_line
from eval.report.markdown import code, code_block, escape, render_markdown, table
from tests.support.markdown import READER, read_back, shape_of, tokens_of
from tests.support.reports import changed

HOSTILE = [
    r"\[x](http://host)",
    r"\\[x](http://host) \`",
    "![x](//host)<img src=x onerror=y> &lt; &#60;script>",
    "end` ``` <b>",
    "a\n\n# heading\n---\n- item\n```\n<details>",
    "**bold** ~~gone~~ $x$ <https://host> https://host www.host.org me@host",
    "| --- | a\\| b \\\\| c",
    "\x1b]0;title\x07 \u202egnp.exe \x9b2J",
]


@pytest.mark.parametrize(
    ("point", "low", "high", "words"),
    [
        (1.42, 1.31, 1.53, "1.42× the speed of plain decoding; 1 of 32 answers differs from"),
        (0.80, 0.75, 0.86, "Slower than plain decoding, at 0.80× its speed"),
        (1.02, 0.97, 1.08, "which may be no difference"),
    ],
)
def test_the_headline_says_faster_slower_or_neither_as_the_interval_does(report, point, low, high, words):
    report = changed(report, {"speed": {"decode_speedup": point, "decode_speedup_ci": [low, high]}})
    assert words in render_markdown(report).splitlines()[0]


@pytest.mark.parametrize(
    ("ratio", "bounds", "words"),
    [
        (0.8, [0.7, 0.9], "; prompt lookup, which needs no training, is faster, at 1.44×."),
        (0.95, [0.8, 1.1], "; prompt lookup, which needs no training, is as fast, at 1.44×."),
        (1.2, [1.1, 1.3], "first where two tokens nearly tie."),
    ],
)
def test_a_way_without_training_that_is_no_slower_is_in_the_headline(report, ratio, bounds, words):
    rival = {"decode_speedup": 1.44, "decode_speed_ratio": ratio, "decode_speed_ratio_ci": bounds}
    assert render_markdown(changed(report, {"baselines.prompt_lookup": rival})).splitlines()[0].endswith(words)


def test_the_weakest_category_is_named(report):
    name = min(report.by_category, key=lambda each: report.by_category[each].acceptance.tokens_per_target_step)
    assert f"Weakest kind of prompt: {name}, " in render_markdown(report)


def test_every_category_position_and_baseline_has_its_row(report):
    rows = [line.split(" | ")[0].removeprefix("| ") for line in render_markdown(report).splitlines() if line.startswith("| ")]
    assert set(report.by_category) <= set(rows)
    assert {"1", "2", "3"} <= set(rows)
    assert {"this draft", "autoregressive", "prompt_lookup"} <= set(rows)


def test_warnings_failures_and_simulation_are_said_first(report):
    warned = changed(report, {"warnings": ["The target's template differs."], "simulated": True})
    second, third = render_markdown(warned).split("\n\n")[1:3]
    assert "simulated" in second
    assert "template differs" in third


def test_without_speed_and_intervals_it_still_reads(report):
    text = render_markdown(changed(report, {"speed": None, "acceptance.tokens_per_target_step_ci": None}))
    assert "speed not measured" in text
    assert "None" not in text


@pytest.mark.parametrize("text", HOSTILE)
def test_outside_text_reads_as_itself_in_a_paragraph_a_cell_and_a_block_of_code(text):
    plain = one_line(text).replace("`", "'")

    assert read_back(f"It says {escape(text)}") == f"It says {plain}"
    assert read_back(table((escape(text), ""), [("", "")])) == plain
    assert shape_of(table(("x", "y"), [(escape(text), "")])) == shape_of(table(("x", "y"), [("", "")]))
    assert read_back(f"It is {code(text)}.").strip() == f"It is {plain}."
    (block,) = READER.parse(code_block(text, "yaml"))
    assert (block.type, block.info) == ("fence", "yaml")
    for live in ("://", "www.", "@"):  # what readers make a link of without being asked
        assert live not in escape(text)


def test_hostile_names_bring_neither_links_nor_html_into_the_summary(report):
    for text in HOSTILE:
        category = {text: report.to_dict()["by_category"]["coding"]}
        values = {"by_category": category, "warnings": [text], "target.name": text, "draft.path": text}
        suite = {field: report.to_dict()[field] for field in ("prompts", "acceptance", "speed", "by_category", "baselines")}
        lookup = {text: suite["baselines"]["prompt_lookup"] | {"decode_speed_ratio": 0.9}}
        values |= {"suites": {text: suite | {"baselines": lookup}}, "draft.lookups": [text]}

        found = tokens_of(render_markdown(changed(report, values)))

        assert found.isdisjoint({"link_open", "image", "html_block", "html_inline", "hr"})
