"""With MODELS_RESULTS=FILE: a results file of what the tests of families found, for the table in docs/models.md."""

import os

import pytest
import transformers

from scripts.bench.harness import write_results
from tests.models.stages import STAGES

ROWS, NOT_BUILT = {}, {}


def pytest_runtest_logreport(report):
    name = report.nodeid.partition("[")[2].removesuffix("]")
    if report.when != "call" or "test_every_family" not in report.nodeid:
        return
    found = dict(report.user_properties)
    if "not_built" in found:
        NOT_BUILT[name] = found["not_built"]
        return
    stages_by_reason = {}
    for key, value in report.user_properties:
        if key == "finding":
            stages_by_reason.setdefault(value[1], []).append(value[0])
    reason = "; ".join(f"{', '.join(stages)}: {sentence}" for sentence, stages in stages_by_reason.items())
    ROWS[name] = {"architecture": name} | {stage: found.get(stage) for stage in STAGES} | {"reason": reason or None}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    output = os.environ.get("MODELS_RESULTS")
    if not output or not ROWS or hasattr(session.config, "workerinput"):
        return
    rows = [ROWS[name] for name in sorted(ROWS)]
    passed = ", ".join(f"{stage} {sum(row[stage] == 'ok' for row in rows)}" for stage in STAGES)
    built = f"{len(rows)} architectures built, {len(NOT_BUILT)} names not"
    summary = f"transformers {transformers.__version__}: {built}. Ok by stage: {passed}."
    write_results(output, "models", rows=rows, ratios={}, summary=summary, not_built=NOT_BUILT)
