"""Text from elsewhere stays text in everything that is rendered: reports, verdicts, model cards, runs that are looked in on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from configs.runtime.command import DONE
from configs.runtime.terminal import UNSEEN, one_line
from eval.release import Finding, GateVerdict, as_markdown, as_table
from eval.report.page import render_html
from eval.report.schema import load_report
from eval.report.tables import code, code_block, escape, render_markdown, table
from heads.metadata import hash_artifact
from scripts.watch.__main__ import render
from scripts.watch.reading import Stage, read_run
from tests.scripts.conftest import change, judge
from tests.support.reports import changed

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def tokens_of(text):
    """Return the kinds of everything in a text, blocks and what stands in them."""
    blocks = READER.parse(text)
    return {token.type for block in blocks for token in (block, *(block.children or ()))}


def shape_of(text):
    """Return the kinds of the blocks of a text, in order."""
    return [block.type for block in READER.parse(text)]


def read_back(text):
    """Return the text that a reader sees of the first paragraph or cell; asserts that it is text or code alone."""
    (first, *_) = [block for block in READER.parse(text) if block.type == "inline"]
    assert {token.type for token in first.children} <= {"text", "code_inline"}, first.children
    return "".join(token.content for token in first.children)


ATTACKS = [
    r"\[x](http://host)",
    r"\\[x](http://host) \`",
    "![x](//host)<img src=x onerror=y> &lt; &#60;script>",
    "end` ``` <b>",
    "a\n\n# heading\n---\n- item\n```\n<details>",
    "**bold** ~~gone~~ $x$ <https://host> https://host www.host.org me@host",
    "| --- | a\\| b \\\\| c",
    "\x1b]0;title\x07 \u202egnp.exe \x9b2J",
]
HOSTILE = "\n".join([*ATTACKS, "</pre><script>x</script>]]><testcase/>{{ 7 * 7 }}[bold]\"' \x00\uffff"])
LIVE = {"link_open", "image", "html_block", "html_inline", "hr"}  # of Markdown


@pytest.mark.parametrize("text", ATTACKS)
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


@pytest.fixture(params=["plain words", HOSTILE], ids=["plain", "hostile"])
def judged(request, measured):
    """A text, a report, a verdict and a run into which it was written everywhere."""
    text = request.param
    report = load_report(measured / "evaluation" / "report.json")
    values = report.to_dict()
    suite = {field: values[field] for field in ("prompts", "acceptance", "speed", "by_category", "baselines")}
    named = {"draft.path": text, "target.name": text, "prompts.source": text, "warnings": [text], "suites": {text: suite}}
    report = changed(report, named | {"by_category": {text: next(iter(values["by_category"].values()))}})
    found = Finding(check=text, outcome="fail", value=text, required=text, reason=text)
    stages, gate = (Stage(name=text, state="failed"),), {"outcome": "fail", "findings": [asdict(found)]}
    run = replace(read_run(measured / "evaluation"), target=text, report=report, stages=stages, gate=gate)
    return text, report, GateVerdict(findings=(found,)), run


def test_markdown_gains_no_markup(judged):
    _, report, verdict, _ = judged
    for rendered in (render_markdown(report), as_markdown(verdict, report)):
        assert tokens_of(rendered).isdisjoint(LIVE)
        assert not UNSEEN.search(rendered)


class Tags(HTMLParser):
    """Collects the tags of a page, and the names of their attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found |= {tag, *(name for name, _ in attrs)}


def test_pages_gain_no_tags(judged):
    text, report, _, _ = judged
    page = render_html(report)
    assert Tags(page).found.isdisjoint({"script", "img", "testcase", "onerror"})
    assert not UNSEEN.search(page)
    assert ("plain" if text != HOSTILE else "&lt;script&gt;") in page


def test_terminals_take_no_command(judged):
    text, _, verdict, run = judged
    shown = render(run)
    assert not UNSEEN.search(as_table(verdict) + shown)
    assert ("[bold]" in shown) == (text == HOSTILE)


def write_everywhere(release, text):
    """Write a text into whatever of an artifact and its report takes one, and let the gate judge them."""

    def alter(metadata):
        metadata["target"] |= {"name": f"embedded:{text}", "revision": text}
        metadata["training"] = {"data": {"train": text}, text: text, "student": {"init": "model", "path": text}}
        metadata["provenance"] = {"command": [text], "imported_from": text, "versions": {text: text}, "git": {"commit": text}}

    artifact, path = release / "artifact", release / "evaluation" / "report.json"
    change(artifact / "draftsmith.json", alter)
    sha256 = hash_artifact(artifact)
    report = changed(load_report(path), {"draft": {"sha256": sha256, "path": text}, "warnings": [text], "hardware.cpu": text})
    path.write_text(json.dumps(report.to_dict()))
    judge(release)


def test_a_model_card_keeps_its_form(push, release, tmp_path):
    cards = []
    for number, text in enumerate(("plain words", HOSTILE)):
        write_everywhere(release, text)
        code, out, err = push("--dry-run", str(tmp_path / str(number)))
        content = (tmp_path / str(number) / "README.md").read_text()
        assert code == DONE, err
        assert not UNSEEN.search(out + err + content)
        cards.append(ModelCard(content))
    plain, hostile = cards
    assert shape_of(hostile.text) == shape_of(plain.text)
    assert tokens_of(hostile.text).isdisjoint({"link_open", "image", "html_inline"})
    assert hostile.data.to_dict().keys() == plain.data.to_dict().keys()
    assert (hostile.data.license, hostile.data.base_model) == (plain.data.license, plain.data.base_model)
