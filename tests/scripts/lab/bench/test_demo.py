"""The demo's figures are those of its reports, a row for each draft and suite."""

import json
from pathlib import Path

from scripts.lab.bench.demo import record_demo
from scripts.lab.settings import BenchDemoConfig

REPORT = Path(__file__).resolve().parents[3] / "compatibility" / "written_before" / "report.json"


def test_each_suite_of_each_report_has_a_row(tmp_path):
    report = json.loads(REPORT.read_text())
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(report | {"draft": report["draft"] | {"kind": name}}))
    output = tmp_path / "demo.json"
    reports = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    record_demo(BenchDemoConfig(reports=reports, output=str(output)))
    rows = json.loads(output.read_text())["rows"]
    assert {row["draft"] for row in rows} == {"one", "two"}
    assert len(rows) == 2 * (1 + len(report.get("suites", {})))
    assert rows[0]["tau"] == report["acceptance"]["tokens_per_target_step"]
    assert [rows[0]["tau_low"], rows[0]["tau_high"]] == report["acceptance"]["tokens_per_target_step_ci"]
    assert rows[0]["speedup"] == report["speed"]["decode_speedup"]
    assert rows[0]["lossless"] == report["lossless"]["verdict"]
