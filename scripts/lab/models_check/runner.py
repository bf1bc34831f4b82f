"""The models' check: every family of transformers, tiny, through every stage; a row each, and a table in docs/models.md."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import InputError, first_line
from configs.runtime.files import CHECKOUT
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.provenance import is_published
from scripts.lab.bench.tables import update_tables
from scripts.lab.models_check.architectures import family_of, names, not_a_decoder
from scripts.lab.models_check.cases import Case, Mismatch, NotApplicable, open_case
from scripts.lab.models_check.stages import STAGES
from scripts.lab.models_check.workers import STARTED, Check, Outcome, check_all
from scripts.lab.settings import ModelsCheckConfig, ResultsTableConfig

log = logging.getLogger("draftsmith")

BUILD = "build"
FAILURES = ("wrong", "error")


def check_models(config: ModelsCheckConfig) -> int:
    known = names()
    if unknown := [name for name in config.names if name not in known]:
        raise InputError(f"names: {unknown[0]!r} is neither in transformers' causal-LM mapping nor a variant of one in it")
    if unknown := [stage for stage in config.stages if stage not in STAGES]:
        raise InputError(f"stages: there is no {unknown[0]!r}; known are {', '.join(STAGES)}")
    if (config.names or config.stages) and is_published(config.output):
        raise InputError(f"output: {config.output} is for all names and stages; set it to another file, and document to null")
    check = partial(check_family, stages=config.stages)
    rows, findings, not_built = collect(config.names or known, config, check)
    write_results(
        config.output,
        "models",
        config,
        rows=rows,
        ratios={},
        summary=summary(rows, not_built),
        findings=findings,
        not_built=not_built,
    )
    if config.document is not None:
        update_tables(ResultsTableConfig(document=config.document, results=str(Path(config.output).parent)))
    for finding in findings:
        if finding["result"] in FAILURES:
            log.error("%(architecture)s, %(stage)s: %(result)s: %(sentence)s", finding)
    log.info("%s", summary(rows, not_built))
    return GATE_FAILED if any(finding["result"] in FAILURES for finding in findings) else DONE


def collect(
    chosen: Sequence[str], config: ModelsCheckConfig, check: Check
) -> tuple[list[dict[str, Any]], list[dict[str, str]], dict[str, str]]:
    rows, findings, not_built = [], [], {}
    checked = check_all(chosen, check, num_workers=config.workers, seconds=config.seconds)
    for name, outcomes in zip(chosen, checked, strict=True):
        if outcomes[-1].stage == BUILD and outcomes[-1].result == "skipped":
            not_built[name] = outcomes[-1].sentence
            continue
        notable = [outcome for outcome in outcomes if outcome.sentence]
        findings += [{"architecture": name, **outcome._asdict()} for outcome in notable]
        results = {outcome.stage: outcome.result for outcome in outcomes if outcome.result != "skipped"}
        row: dict[str, Any] = {"architecture": name} | {stage: results.get(stage) for stage in STAGES}
        rows.append(row | {"reason": reasons(notable)})
    return rows, findings, not_built


def reasons(outcomes: Sequence[Outcome]) -> str | None:
    stages: dict[str, list[str]] = {}
    for outcome in outcomes:
        stages.setdefault(outcome.sentence, []).append(outcome.stage)
    return "; ".join(f"{', '.join(each)}: {sentence}" for sentence, each in stages.items()) or None


def summary(rows: Sequence[Mapping[str, Any]], not_built: Mapping[str, str]) -> str:
    passed = {stage: sum(row[stage] == "ok" for row in rows) for stage in STAGES}
    failed = Counter(row[stage] for row in rows for stage in STAGES if row[stage] in FAILURES)
    together = sum(all(row[stage] == "ok" for stage in ("chain", "batch", "eagle3", "distill", "artifact")) for row in rows)
    counts = ", ".join(f"{stage} {count}" for stage, count in passed.items())
    return (
        f"transformers {transformers.__version__}: {len(rows)} architectures built, {len(not_built)} names not (encoders, "
        f"halves of encoder-decoder models, and what needs another package or model beside it: docs/results/models.json). "
        f"Ok by stage: {counts}; chain, batch, eagle3, distill and artifact all at once {together}. Wrong: {failed['wrong']}, "
        f"errors: {failed['error']}."
    )


def check_family(name: str, report: Callable[[Outcome], None], stages: Sequence[str] = ()) -> None:
    warnings.simplefilter("ignore")  # and transformers' remarks on tiny configs
    logging.disable(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="models-check-") as folder:
        try:
            if (reason := not_a_decoder(family_of(name))) is not None:
                report(Outcome(BUILD, "skipped", reason))
                return
            case = open_case(name, Path(folder))
        except Exception as error:  # whatever transformers raises
            words = "transformers cannot build it tiny, or generate with it alone"
            report(Outcome(BUILD, "skipped", f"{words}: {described(error)}"))
            return
        run_stages(case, report, stages)


def run_stages(case: Case, report: Callable[[Outcome], None], stages: Sequence[str] = ()) -> None:
    """Run the stages on a family, or of them "load" and those of these names; without a loaded target nothing follows."""
    for stage, run in STAGES.items():
        if stages and stage not in ("load", *stages):
            continue
        if case.loaded is None and stage != "load":
            return
        report(Outcome(stage, STARTED))
        try:
            run(case)
            report(Outcome(stage, "ok"))
        except NotApplicable:
            report(Outcome(stage, "skipped"))
        except Mismatch as wrong:
            report(Outcome(stage, "wrong", str(wrong)))
        except InputError as refusal:
            report(Outcome(stage, "refused", str(refusal).replace(str(case.folder), "FOLDER")))
        except Exception as error:  # a traceback is what this check is to find
            report(Outcome(stage, "error", described(error)))


def described(error: Exception) -> str:
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(CHECKOUT)]
    ours = [frame for frame in ours if "site-packages" not in frame.filename]
    where = f" ({Path(ours[-1].filename).relative_to(CHECKOUT)}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"
