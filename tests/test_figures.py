"""Every table of README.md and docs/ is made of a results file, each of one command and of a commit's clean tree."""

import json

import pytest

from scripts.bench.harness import RESULTS
from scripts.bench.tables import OPENING, documents, fill_tables


@pytest.mark.parametrize("name", sorted({path.stem for path in RESULTS.glob("*.json")} - {"archive"}))
def test_a_results_file_is_of_one_command_on_one_machine_and_of_a_commit(name):
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert {"command", "git", "hardware", "versions", "rows", "ratios"} <= content.keys()
    assert content["git"]["dirty"] is False
    assert content["git"]["commit"] is not None


def test_no_results_file_is_left_out_of_the_documents():
    shown = {match[1] for page in documents() for match in OPENING.finditer(page.read_text(encoding="utf-8"))}
    assert shown == {path.stem for path in RESULTS.glob("*.json")}


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.name)
def test_a_documents_tables_are_those_of_the_results_files(page):
    text = page.read_text(encoding="utf-8")
    assert fill_tables(text, RESULTS) == text, "run make tables"
