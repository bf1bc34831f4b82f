"""The Markdown summary: the headline tells the truth in either direction, and outside text breaks nothing."""

import pytest

from configs.runtime.terminal import one_line
from eval.report.markdown import code, code_block, escape, render_markdown, table
from eval.report.text import headline
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
        (1.42, 1.31, 1.53, "1.42× [1.31, 1.53] the speed of plain decoding by the lean forward; 1 of 32 answers differs"),
        (0.80, 0.75, 0.86, "0.80× [0.75, 0.86] the speed of plain decoding by the lean forward (slower);"),
        (1.02, 0.97, 1.08, "the speed of plain decoding by the lean forward (not significant);"),
        (1.42, None, None, "1.42× the speed of plain decoding by the lean forward, from one batch and so without an interval;"),
    ],
)
def test_the_headline_says_faster_slower_or_neither_as_the_interval_does_and_by_which_forward(report, point, low, high, words):
    bounds = None if low is None else [low, high]
    report = changed(report, {"speed": {"decode_speedup": point, "decode_speedup_ci": bounds}, "decode": {"forward": "lean"}})
    assert words in headline(report)


@pytest.mark.parametrize(
    ("ratio", "bounds", "words"),
    [
        (0.8, [0.7, 0.9], ", slower than prompt lookup, which needs no training, at 1.44×; "),
        (
            0.95,
            [0.8, 1.1],
            ", not significantly faster than prompt lookup, which needs no training, at 1.44× (ratio 0.95× [0.80, 1.10]); ",
        ),
        (1.2, [1.1, 1.3], "the speed of plain decoding; "),
    ],
)
def test_a_way_without_training_that_is_no_slower_is_in_the_headline(report, ratio, bounds, words):
    rival = {"decode_speedup": 1.44, "decode_speed_ratio": ratio, "decode_speed_ratio_ci": bounds}
    assert f"{words}1 of 32 answers" in headline(changed(report, {"baselines.prompt_lookup": rival}))


def test_what_a_token_takes_is_said_in_milliseconds_beside_generates(report):
    speed = {"milliseconds_per_token_autoregressive": 20.0, "milliseconds_per_token_speculative": 10.0}
    peer = {"num_prompts": 4, "milliseconds_per_token_generate": 18.0, "milliseconds_per_token_autoregressive": 21.0}
    text = render_markdown(changed(report, {"speed": speed | {"generate": peer}}))
    assert "A token takes 20.0 ms in plain decoding and 10.0 ms with the draft, at this batch size. On 4 prompts" in text
    assert "18.0 ms in transformers' generate and 21.0 ms in plain decoding here." in text


def test_warnings_are_said_first(report):
    warned = changed(report, {"warnings": ["The target's template differs."]})
    assert "template differs" in render_markdown(warned).split("\n\n")[1]


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
