"""Judge a report by a gate: `python eval/gate.py report.json --config configs/gates/run.yaml [--baseline previous.json]`.

Prints a table and writes the verdict beside the report as `gate.json` and `gate.md` (for a pull request). Ends with 0 for pass,
1 for fail, 2 for bad input, 3 where the prompts were too few to say. With `--artifact FOLDER` the draft that is to be released
must be, by its hash, the one that was measured (`eval.release`). What `draftsmith check` found in an engine is judged where
`--check` names it, or where it lies beside the report or in the run's folder `check`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import DONE, GATE_FAILED, INCONCLUSIVE, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import sha256_of, write_json, write_text
from configs.runtime.redaction import mask_secrets
from configs.runtime.terminal import one_line, say
from configs.schema.evaluation import GateConfig
from eval.release import as_markdown, as_table, as_values, judge, read_artifact
from eval.report.schema import CHECK_FILE, load_check, load_report, report_file
from eval.report.text import headline

EXIT_CODES = {"pass": DONE, "fail": GATE_FAILED, "inconclusive": INCONCLUSIVE}


def main(config: GateConfig, args: argparse.Namespace) -> int:
    """Read, judge, write, print; return the exit code."""
    report_path = report_file(args.report)
    baseline_path = None if args.baseline is None else report_file(args.baseline)
    output = report_path.with_name("gate.json")
    reports = [path.resolve() for path in (report_path, baseline_path) if path is not None]
    for file in map(output.with_suffix, (".json", ".md")):  # an earlier verdict, which bad input would leave behind
        if file.resolve() in reports:
            raise InputError(f"the verdict would overwrite the report {file}; give that another name")
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{file} cannot be replaced: {error.strerror or error}") from error
    report = load_report(report_path)
    baseline = None if baseline_path is None else load_report(baseline_path, "baseline report")
    artifact = read_artifact(args.artifact) if args.artifact else None
    check = find_check(args.check, report_path)
    served = None if check is None else load_check(check)
    if args.check and served and served.draft_sha256 not in (report.draft.sha256, report.draft.measured_sha256):
        raise InputError(f"--check: {check} is not of the draft that was measured; export that one, and check the export")
    verdict = judge(report, config, baseline, artifact, served)
    code = EXIT_CODES[verdict.outcome]
    record = {
        "format_version": 1,
        **as_values(verdict),
        "exit_code": code,
        "report": str(report_path),
        "report_sha256": sha256_of(report_path),
        "baseline": None if baseline_path is None else str(baseline_path),
        "artifact": " + ".join(args.artifact) or None,
        "check": None if check is None else str(check),
        "config": mask_secrets(config.model_dump(mode="json")),
    }
    write_json(output, record)
    write_text(output.with_suffix(".md"), as_markdown(verdict, report))
    say(f"{one_line(headline(report))}\n\n{as_table(verdict)}")
    return code


def find_check(named: str | None, report: Path) -> Path | None:
    """Return where the result of `draftsmith check` is: as it was named, beside the report, or where a run puts it."""
    places = [report.with_name(CHECK_FILE), report.absolute().parent.parent / "check" / CHECK_FILE]
    return Path(named) if named is not None else next((path for path in places if path.is_file()), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", metavar="REPORT", help="report.json, or the folder that eval/run.py wrote it to")
    parser.add_argument(
        "--baseline", metavar="FILE", help="an earlier report.json or its folder, for rules with relative_to_baseline"
    )
    artifact = "the draft to be released: must be the one that was measured; repeat it for several measured together, in order"
    parser.add_argument("--artifact", metavar="FOLDER", action="append", default=[], help=artifact)
    check = "what draftsmith check wrote of the export: check.json or its folder; default: where it lies beside the report"
    parser.add_argument("--check", metavar="FILE", help=check)


if __name__ == "__main__":
    sys.exit(run_command(GateConfig, main, description="Judge a report by a gate's rules.", add_arguments=add_arguments))
