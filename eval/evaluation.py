"""One evaluation: decode every prompt plainly, with the draft and with the free baselines, interleaved; judge; report.

All modes run through the same decoder on the same prompts and count the same token ids. Repeats alternate (plain, draft,
baselines, plain, ...) so that a machine whose speed drifts drifts for all of them.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.command import DONE
from configs.files import write_text
from configs.progress import progress
from configs.provenance import describe_git, describe_hardware, describe_versions, mask_arguments, write_run_record
from configs.schema import EvalConfig
from distill.prompts import encode_prompt
from distill.target import Target, load_target
from eval.decode import Request, check_decodable, decode
from eval.lossless import judge_lossless
from eval.page import render_page
from eval.records import AUTOREGRESSIVE, SPECULATIVE, Generation, Timing
from eval.report import PromptSet, build_report, write_report
from eval.suite import Suite, load_suite
from eval.summary import render_markdown
from heads.artifact import Draft, load_draft
from heads.prompt_lookup import PromptLookup
from heads.proposer import Proposer

log = logging.getLogger("draftsmith")


@dataclass
class Records:
    """Everything a run measured."""

    generations: list[Generation] = field(default_factory=list)  # of the first repeat
    timings: list[Timing] = field(default_factory=list)

    def of(self, mode: str) -> list[Generation]:
        """Return one mode's generations in the order of the prompts."""
        return [generation for generation in self.generations if generation.mode == mode]


def evaluate(config: EvalConfig) -> int:
    """Evaluate as configured and write `report.json`, `.html`, `.md`, `records.jsonl` and `run.json`; see `eval/run.py`."""
    output = Path(config.output)
    suite = load_suite(config.suite)
    target = load_target(config.target)
    draft = _load(config, target)
    requests = [
        Request(prompt_id=prompt.prompt_id, category=prompt.category, tokens=encode_prompt(target, prompt))
        for prompt in suite.prompts
    ]
    check_decodable(target, requests)
    write_run_record(output, config)
    records = measure(target, requests, config, {SPECULATIVE: draft.proposer, **_baselines(config, target)})
    lossless = judge_lossless(
        target,
        records.of(AUTOREGRESSIVE),
        records.of(SPECULATIVE),
        config.decode,
        config.lossless,
        lambda other: load_draft(config.draft, other.identity, other.model, allow_target_mismatch=config.allow_target_mismatch),
    )
    report = _describe(config, suite, target, draft, records, lossless)
    write_records(output / "records.jsonl", records)
    write_report(output / "report.json", report)
    write_text(output / "report.md", render_markdown(report))
    write_text(output / "report.html", render_page(report))
    print(render_markdown(report))
    log.info("report in %s", output / "report.html")
    return DONE


def measure(target: Target, requests: Sequence[Request], config: EvalConfig, proposers: Mapping[str, Proposer]) -> Records:
    """Decode the requests plainly and with each proposer, `config.repeats` times, a batch at a time, modes taking turns.

    Before, each mode decodes the batches of the first `config.warmup_prompts` prompts: whole ones, whose shapes are the timed.
    """
    modes: dict[str, Proposer | None] = {AUTOREGRESSIVE: None, **proposers}
    # The free baselines draft chains, whatever shape the draft under evaluation is asked for.
    settings = {
        mode: config.decode if mode == SPECULATIVE else config.decode.model_copy(update={"tree": None}) for mode in modes
    }
    size = config.decode.batch_size
    batches = [requests[start : start + size] for start in range(0, len(requests), size)]
    for batch, mode in itertools.product(batches[: math.ceil(config.warmup_prompts / size)], modes):
        decode(target, batch, settings[mode], modes[mode])
    records = Records()
    with progress("decoding", len(requests), "prompts") as advance:
        for batch in batches:
            for repeat, mode in itertools.product(range(config.repeats), modes):
                measure_overlap = repeat == 0 and mode == SPECULATIVE
                generations, timing = decode(
                    target, batch, settings[mode], modes[mode], mode=mode, repeat=repeat, measure_overlap=measure_overlap
                )
                records.timings.append(timing)
                records.generations += generations if repeat == 0 else []
            advance(len(batch))
    return records


def write_records(path: Path, records: Records) -> None:
    """Write one JSON line for each generation and each timing."""
    lines = [json.dumps({"generation": asdict(generation)}) for generation in records.generations]
    lines += [json.dumps({"timing": asdict(timing)}) for timing in records.timings]
    write_text(path, "\n".join(lines) + "\n")


def _load(config: EvalConfig, target: Target) -> Draft:
    draft = load_draft(config.draft, target.identity, target.model, allow_target_mismatch=config.allow_target_mismatch)
    for warning in draft.warnings:
        log.warning("%s", warning)
    return draft


def _baselines(config: EvalConfig, target: Target) -> dict[str, Proposer]:
    makers = {"prompt_lookup": lambda: PromptLookup(target.device)}
    return {name: makers[name]() for name in config.baselines}


def _describe(
    config: EvalConfig, suite: Suite, target: Target, draft: Draft, records: Records, lossless: dict[str, Any]
) -> dict[str, Any]:
    """Put the records and everything that says where they come from into the report."""
    warnings = list(draft.warnings)
    if suite.num_later_turns:
        warnings.append(
            f"{suite.num_later_turns} later turns of the suite's conversations were not asked; only first turns were"
        )
    return build_report(
        target=target.identity.to_dict()
        | {"dtype": config.target.dtype, "num_parameters": sum(each.numel() for each in target.model.parameters())},
        draft={
            "kind": draft.metadata.kind,
            "path": config.draft,
            "sha256": draft.sha256,
            "num_parameters": draft.num_parameters,
            "target_sha256": draft.metadata.target["weights_sha256"],
        },
        decode=config.decode.model_dump(mode="json")
        | {
            "dtype": config.target.dtype,
            "attention": config.target.attention,
            "forward": config.target.forward,
            "compile": False,
            "warmup_prompts": config.warmup_prompts,
        },
        prompts=PromptSet(
            source=suite.source,
            sha256=suite.sha256,
            texts={prompt.prompt_id: prompt.turns[0] for prompt in suite.prompts},
        ),
        generations=records.generations,
        timings=records.timings,
        lossless=lossless,
        decode_tokens=lambda ids: str(target.tokenizer.decode(list(ids), skip_special_tokens=False)),
        hardware=describe_hardware() | {"device": str(target.device), "threads": torch.get_num_threads()},
        versions=describe_versions(),
        git=describe_git(),
        command=mask_arguments(sys.orig_argv),
        warnings=warnings,
        bootstrap_samples=config.bootstrap_samples,
        seed=config.decode.seed,
    )
