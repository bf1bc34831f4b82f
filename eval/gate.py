"""Judge a report by a gate: `python eval/gate.py report.json --config configs/gates/demo.yaml [--baseline previous.json]`.

Prints a table, writes `gate.json` beside the report, and ends with 0 for pass, 1 for fail, 2 for bad input, 3 where the
prompts were too few to say. The rules are `eval.gating`'s.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

# Python puts this script's folder first, where `suite` or `report` could hide an installed module: the checkout goes before it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.command import DONE, GATE_FAILED, INCONCLUSIVE, run_command
from configs.files import write_json
from configs.schema import GateConfig
from eval.gating import Finding, Verdict, judge
from eval.report_schema import read_report

EXIT_CODES = {"pass": DONE, "fail": GATE_FAILED, "inconclusive": INCONCLUSIVE}


def main(config: GateConfig, args: argparse.Namespace) -> int:
    """Read, judge, write, print; return the exit code."""
    report_path = Path(args.report)
    report = read_report(report_path)
    baseline = None if args.baseline is None else read_report(Path(args.baseline), "baseline report")
    verdict = judge(report, config, baseline)
    code = EXIT_CODES[verdict.outcome]
    output = Path(args.output) if args.output else report_path.with_name("gate.json")
    write_json(
        output,
        {
            "format_version": 1,
            "outcome": verdict.outcome,
            "exit_code": code,
            "report": args.report,
            "baseline": args.baseline,
            "findings": [asdict(finding) for finding in verdict.findings],
            "config": config.model_dump(mode="json"),
        },
    )
    print(as_table(verdict))
    return code


def as_table(verdict: Verdict) -> str:
    """Return the verdict for a terminal: a line a check, the reason under each that did not pass, the outcome last."""
    rows = [(each.outcome.upper(), each.check, _measured(each), each.required, each.reason) for each in verdict.findings]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for outcome, check, measured, required, reason in rows:
        lines.append(f"{outcome:<{widths[0]}}  {check:<{widths[1]}}  {measured:<{widths[2]}}  asked: {required}")
        if reason:
            lines.append(f"{'':<{widths[0]}}  {reason}")
    return "\n".join([*lines, "", f"gate: {verdict.outcome}"])


def _measured(finding: Finding) -> str:
    if finding.value is None or isinstance(finding.value, str):
        return finding.value or "not measured"
    bounds = "" if finding.low is None else f" [{finding.low:.3f}, {finding.high:.3f}]"
    return f"{finding.value:.4g}{bounds}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the gate's own arguments."""
    parser.add_argument("report", metavar="REPORT", help="report.json, written by eval/run.py")
    parser.add_argument("--baseline", metavar="FILE", help="an earlier report.json, for rules with relative_to_baseline")
    parser.add_argument("--output", metavar="FILE", help="where the verdict goes; by default gate.json beside the report")


if __name__ == "__main__":
    sys.exit(run_command(GateConfig, main, description="Judge a report by a gate's rules.", add_arguments=add_arguments))
