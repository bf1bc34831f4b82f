"""Tables of a document come from the benchmarks' files, and nothing else in it changes."""

import json

import pytest

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import InputError
from scripts.lab.bench.tables import fill_tables
from scripts.lab.benchmark import run

RESULTS = {
    "name": "decode",
    "command": "python scripts/lab/benchmark.py decode",
    "hardware": {"cpu": "a test machine", "cores": 2, "gpus": []},
    "versions": {"torch": "2.13.0"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "rows": [
        {"rule": "greedy", "tau": 1.504, "tau_low": 1.4, "tau_high": 1.6, "batch_size": 1},
        {"rule": "block|token", "tau": None, "tau_low": None, "tau_high": None, "batch_size": 8},
    ],
    "ratios": {"overhead_share": 0.0123, "overhead_share_low": 0.01, "overhead_share_high": 0.02, "speed": 1.256},
}
EXPECTED = """\
| ratio | value | 95 % interval |
| --- | --- | --- |
| overhead_share | 0.012 | [0.010, 0.020] |
| speed | 1.26 |  |

| rule | tau | batch_size |
| --- | --- | --- |
| greedy | 1.50 [1.40, 1.60] | 1 |
| block\\|token | – | 8 |

`decode.json`: `python scripts/lab/benchmark.py decode` on 2 cores of a test machine, torch 2.13.0, commit 0123456789ab.
"""


@pytest.fixture
def results(tmp_path):
    (tmp_path / "decode.json").write_text(json.dumps(RESULTS))
    return tmp_path


def test_a_table_is_replaced_and_the_text_around_it_is_not(results):
    filled = fill_tables("No table: <!-- end -->\n<!-- table: decode -->\nold\n<!-- end -->\nAfter.\n", results)
    assert filled == f"No table: <!-- end -->\n<!-- table: decode -->\n\n{EXPECTED}\n<!-- end -->\nAfter.\n"
    assert fill_tables(filled, results) == filled


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("<!-- table: decode -->\nold\n", "table 'decode' has no"),
        ("<!-- table: decode {rows: {rule: [none]}} -->\n<!-- end -->\n", r"decode.json has nothing of \{rows: \{rule: \[none"),
        (
            "<!-- table: decode {row: {}} -->\n<!-- end -->\n",
            r"table 'decode': \{row: \{\}\} is no mapping of ratios, rows and",
        ),
        ("<!-- table: odd -->\n<!-- end -->\n", "odd.json are not in the form"),
    ],
)
def test_a_mistake_is_named(results, document, complaint):
    (results / "odd.json").write_text("[1]")
    with pytest.raises(InputError, match=complaint):
        fill_tables(document, results)


def test_the_command_rewrites_the_document_or_leaves_it_alone(results, capsys):
    document = results / "README.md"
    document.write_text("<!-- table: decode -->\n<!-- end -->\n")
    arguments = ["--set", f"document={document}", "--set", f"results={results}"]
    assert run(["tables", *arguments]) == DONE
    filled = document.read_text()
    assert EXPECTED in filled
    (results / "decode.json").write_text("{}")
    assert run(["tables", *arguments]) == BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1
    assert document.read_text() == filled


def test_a_part_of_a_file_is_shown_where_its_table_says_which(results):
    opening = "<!-- table: decode {ratios: [speed], rows: {rule: [greedy, other]}, columns: [tau, rule]} -->"
    filled = fill_tables(f"{opening}\nold\n<!-- end -->", results)
    assert filled.startswith(f"{opening}\n\n| ratio | value | 95 % interval |\n| --- | --- | --- |\n| speed | 1.26 |  |\n\n")
    assert "\n| tau | rule |\n| --- | --- |\n| 1.50 [1.40, 1.60] | greedy |\n\n`decode.json`: " in filled
    assert fill_tables(filled, results) == filled
    rows_alone = fill_tables("<!-- table: decode {rows: {batch_size: [8]}} -->\n<!-- end -->", results)
    assert "ratio" not in rows_alone
    assert "| block\\|token | – | 8 |" in rows_alone


def test_bounds_of_no_column_in_the_row_are_columns_themselves(tmp_path):
    rows = [{"family": "medusa", "tau_ours": 1.9, "tau_low": 1.7, "tau_high": None, "verdict": "agrees"}]
    (tmp_path / "serve.json").write_text(json.dumps({**RESULTS, "rows": rows, "ratios": {}}))
    filled = fill_tables("<!-- table: serve -->\n<!-- end -->", tmp_path)
    assert "| family | tau_ours | tau_low | tau_high | verdict |" in filled
    assert "| medusa | 1.90 | 1.70 | – | agrees |" in filled
    assert "| ratio |" not in filled  # there are none
