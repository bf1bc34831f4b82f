"""What `make demo` and `make demo-serve` measured, as a results file.

A row for each draft and suite of the reports, and one for each draft that the engine served, by its check.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE
from configs.runtime.files import read_object
from eval.report.schema import Report, SuiteSection, load_report
from eval.report.text import by_suite, fastest_free, speedup_of
from eval.stats.bootstrap import Interval
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.provenance import TRAINING_CODE, check_same_origin, is_published
from scripts.lab.settings import BenchDemoConfig


def record_demo(config: BenchDemoConfig) -> int:
    rows = []
    for path in config.reports:
        report = load_report(Path(path))
        if is_published(config.output):
            check_same_origin(report.to_dict(), path, TRAINING_CODE)
        rows += [_row(report, suite, section) for suite, section in (by_suite(report) or {"home": report}).items()]
    checks = {served: read_object(Path(path), "check") for served, path in config.checks.items() if Path(path).is_file()}
    rows += [_served(served, check) for served, check in checks.items()]
    write_results(config.output, "demo", config, rows=rows, ratios={})
    return DONE


def _row(report: Report, suite: str, section: Report | SuiteSection) -> dict[str, Any]:
    acceptance, free = section.acceptance, fastest_free(section)
    speedup, bounds = speedup_of(section)
    return {
        "draft": report.draft.kind,
        "suite": suite,
        "prompts": section.prompts.num_prompts,
        "tau": Interval(acceptance.tokens_per_target_step, *(acceptance.tokens_per_target_step_ci or ())),
        "speedup": Interval(speedup, *(bounds or ())),
        "with_lookup_speedup": section.with_lookup and section.with_lookup.decode_speedup,
        "fastest_untrained": free and free[0],
        "fastest_untrained_speedup": free and free[1].decode_speedup,
        "lossless": report.lossless.verdict,
    }


def _served(served: str, check: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "engine": f"{check['engine']} {check['version']}, {check['dtype']}",
        "served": served,
        "prompts": check["num_prompts"],
        "tau": check["tokens_per_target_step"],
        "speedup": Interval(check["speedup"], check["speedup_low"], check["speedup_high"]),
        "same_answers": check["same_answers"],
    }
