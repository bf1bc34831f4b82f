"""What the comparison of two checkouts calls equal, and what it reads."""

import json

import pytest

from configs.runtime.errors import InputError
from configs.schema.commands.benchmarks import CommitsConfig
from scripts.bench.commits import compare_commits, count_equal, read_evaluation, read_training


def run_of(*values):
    return {"values": list(values)}


def test_a_value_is_equal_only_where_every_run_of_both_sides_has_it():
    assert count_equal([run_of(1, 2, 3)], [run_of(1, 2, 3), run_of(1, 2, 3)]) == 3
    assert count_equal([run_of(1, 2.0000001, 3)], [run_of(1, 2, 3)]) == 2
    assert count_equal([run_of(1, 2)], [run_of(1, 2, 3)]) == 2
    assert count_equal([run_of(1, 2, 3), run_of(1, 2, 4)], [run_of(1, 2, 3)]) == 2


def test_losses_tokens_and_seconds_are_read(tmp_path):
    folder = tmp_path / "distill"
    folder.mkdir()
    steps = [{"step": step, "seconds": 0.5 * step, "loss": 1.0 / step, "gradient_norm": 2.0} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert read_training(folder) == {
        "values": [(1, 1.0, 2.0), (2, 0.5, 2.0), (3, 1 / 3, 2.0)],
        "seconds": {"distill": [1.0, 1.5]},
    }
    lines = [
        {"generation": {"prompt_id": "a", "mode": "autoregressive", "tokens": [1, 2]}},
        {"generation": {"prompt_id": "a", "mode": "prompt_lookup", "tokens": [1, 2]}},
        {"timing": {"mode": "autoregressive", "decode_seconds": 0.25}},
        {"timing": {"mode": "speculative", "decode_seconds": 0.125}},
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_evaluation(folder)
    assert read["values"] == [("a", "autoregressive", [1, 2])]
    assert read["seconds"] == {"autoregressive": [0.25], "speculative": [0.125]}


def test_a_base_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(InputError, match="is no checkout of draftsmith"):
        compare_commits(CommitsConfig(base=str(tmp_path)))
