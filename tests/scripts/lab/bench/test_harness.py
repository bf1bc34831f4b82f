"""A results file says where it comes from."""

import json
import sys

from scripts.lab.bench.harness import write_results
from scripts.lab.settings import BenchDecodeConfig


def test_the_file_says_what_was_run_where_and_with_what(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["somewhere/benchmark.py", "decode", "--set", "hub_token=secret", "--set", "repeats=3"])
    path = tmp_path / "results" / "decode.json"
    config = BenchDecodeConfig(repeats=3)
    write_results(path, "decode", config, rows=[{"tau": 1.5}], ratios={"speed": 2.0}, threads=2)
    content = json.loads(path.read_text())
    assert content["command"] == "python scripts/lab/benchmark.py decode --set 'hub_token=***' --set repeats=3"
    assert (content["name"], content["rows"], content["ratios"]) == ("decode", [{"tau": 1.5}], {"speed": 2.0})
    assert content["config"]["repeats"] == 3
    assert content["threads"] == 2
    assert {"hardware", "versions", "git"} <= content.keys()
