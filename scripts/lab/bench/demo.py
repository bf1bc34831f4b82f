"""What `make demo` measured, as a results file: a row for each draft and suite of the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.runtime.command import DONE
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
